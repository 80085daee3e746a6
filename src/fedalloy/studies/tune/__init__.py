"""A search for good settings of one or several algorithms, each with the same budget."""
