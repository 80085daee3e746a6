/* The kernels for numbers of one type in vectors of one width. native.c includes this file for all of them, and defines

   REAL    the type of the numbers
   LANES   how many of them a vector holds
   NAME    appends type and width to a name
   INT     a whole number of the same size
   SOME    so many examples are multiplied with two classes at once, if they divide the batch, and otherwise
   FEWER   of them: as many sums as fit into the registers beside their factors
   ACROSS  so many vectors of five classes' weights are moved at once
   FAST    the instructions that functions are compiled for */

typedef REAL NAME(vector) __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
typedef INT NAME(mask) __attribute__((vector_size(LANES * sizeof(REAL))));

static INLINE NAME(vector) NAME(spread)(REAL value) {
    NAME(vector) all;
    for (int lane = 0; lane < LANES; lane++) all[lane] = value;
    return all;
}

#include "logistic.c"
#include "pair.c"

#undef REAL
#undef LANES
#undef NAME
#undef INT
#undef SOME
#undef FEWER
#undef ACROSS
