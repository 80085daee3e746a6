"""Convolutions of many clients as Triton kernels that read their patches from the images: no patch is ever stored.

Every client has its own weights, ``[outputs, inputs]`` as in :mod:`conv_chain`; images have their
channels last. ``client_conv`` has the same functions in plain torch, and calls these where they can run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(value, ACT: tl.constexpr):
    """The activation; like torch's it keeps NaN."""
    if ACT == "relu":
        value = tl.where(value <= 0, 0.0, value)
    if ACT == "tanh":
        value = 1 - 2 / (tl.exp(2 * value) + 1)
    if ACT == "sigmoid":
        value = 1 / (1 + tl.exp(-value))
    return value


@triton.jit
def _undone(grad, value, ACT: tl.constexpr):
    """The gradient before an activation with the result ``value``."""
    if ACT == "relu":
        grad = tl.where(value <= 0, 0.0, grad)
    if ACT == "tanh":
        grad = grad * (1 - value * value)
    if ACT == "sigmoid":
        grad = grad * (value * (1 - value))
    return grad


@triton.jit
def _rounded(value, PREC: tl.constexpr):
    """The nearest number with the ten bits of tf32: matrix units cut off what has more, which is a larger error, and
    always in one direction."""
    if PREC == "tf32" and value.dtype == tl.float32:
        bits = (value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value


@triton.jit
def _corner(m, DOWN: tl.constexpr, RIGHT: tl.constexpr, POOL: tl.constexpr):
    """Image, row and column of results number ``m``; with ``POOL`` the four of a window follow each other."""
    if POOL:
        window, place = m // 4, m % 4
        p = window % (DOWN * RIGHT // 4)
        return m // (DOWN * RIGHT), p // (RIGHT // 2) * 2 + place // 2, p % (RIGHT // 2) * 2 + place % 2
    p = m % (DOWN * RIGHT)
    return m // (DOWN * RIGHT), p // RIGHT, p % RIGHT


@triton.jit
def _image(rows, client, n, inside, BATCH: tl.constexpr, GATHER: tl.constexpr):
    """Where image ``n`` of a client is among all."""
    if GATHER:
        return tl.load(rows + client * BATCH + n, mask=inside, other=0)
    return client * BATCH + n


@triton.jit
def _larger(best, chosen, other, place):
    """The larger of two numbers and which it is: the first of equal ones, and NaN if there is one."""
    better = (other > best) | (other != other)
    return tl.where(better, other, best), tl.where(better, place, chosen)


@triton.jit
def _store_pooled(out, chosen, value, client,
                  OUT: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The largest of every four rows, and which it is."""
    pairs = tl.reshape(value, (BM // 4, 2, 2, BN)).permute(0, 3, 1, 2)
    left, right = tl.split(pairs)
    first, third = tl.split(left)
    second, fourth = tl.split(right)
    best, which = first, tl.zeros((BM // 4, BN), tl.int8)
    best, which = _larger(best, which, second, 1)
    best, which = _larger(best, which, third, 2)
    best, which = _larger(best, which, fourth, 3)
    m = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
    o = tl.program_id(2) * BN + tl.arange(0, BN)
    at, ok = (client * (M // 4) + m[:, None]) * OUT + o[None, :], (m < M // 4)[:, None] & (o < OUT)[None, :]
    tl.store(out + at, best.to(out.dtype.element_ty), mask=ok)
    tl.store(chosen + at, which.to(tl.int8), mask=ok)


@triton.jit
def convolve(x, rows, weight, bias, out, chosen,
             XN: tl.constexpr, XY: tl.constexpr, XX: tl.constexpr, XC: tl.constexpr, WN: tl.constexpr, WO: tl.constexpr,
             BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
             DOWN: tl.constexpr, RIGHT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
             SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
             GATHER: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, POOL: tl.constexpr, SUM: tl.constexpr,
             PREC: tl.constexpr, ROUND: tl.constexpr, LOADS: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """``out[c, m, o] = act(sum over k of patch[c, m, k] weight[c, o, k] + bias[c, o])``, pooled if asked."""
    c = tl.program_id(1).to(tl.int64)
    m, o = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(2) * BN + tl.arange(0, BN)
    M: tl.constexpr = BATCH * DOWN * RIGHT
    K: tl.constexpr = KH * KW * IN
    n, y, z = _corner(m, DOWN, RIGHT, POOL)
    inside, y, z = m < M, y * SH - PH, z * SW - PW
    start = x + _image(rows, c, n, inside, BATCH, GATHER) * XN + y * XY + z * XX
    total = tl.zeros((BM, BN), SUM)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        if IN % BK == 0:  # one tap, whose channels are neighbours
            tap, channel = k0 // IN, tl.max_contiguous(tl.multiple_of(k0 % IN, BK) + tl.arange(0, BK), BK)
            i, j = y + tap // KW, z + tap % KW
            ok = (inside & (i >= 0) & (i < H) & (j >= 0) & (j < W) if PH + PW > 0 else inside)[:, None]
        else:
            tap, channel = k // IN, k % IN
            i, j = y[:, None] + (tap // KW)[None, :], z[:, None] + (tap % KW)[None, :]
            ok = inside[:, None] & (k < K)[None, :] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        at = tap // KW * XY + tap % KW * XX + channel * XC
        patch = tl.load(start[:, None] + at[None, :], mask=ok, other=0.0)
        known = (o < OUT)[None, :] & (k < K)[:, None]
        w = tl.load(weight + c * WN + o[None, :] * WO + k[:, None], mask=known, other=0.0)
        if GATHER or LOADS:
            patch = _rounded(patch, PREC)
        if LOADS:
            w = _rounded(w, PREC)
        kind = out.dtype.element_ty
        total = tl.dot(patch.to(kind), w.to(kind), total, input_precision=PREC, out_dtype=SUM)
    if BIAS:
        total += tl.load(bias + c * OUT + o, mask=o < OUT, other=0.0)[None, :]
    value = _rounded(_activated(total, ACT), ROUND)
    if POOL:
        _store_pooled(out, chosen, value, c, OUT, M, BM, BN)
    else:
        tl.store(out + (c * M + m[:, None]) * OUT + o[None, :], value.to(out.dtype.element_ty),
                 mask=inside[:, None] & (o < OUT)[None, :])  # fmt: skip


@triton.jit
def by_input(grad, turned, value, out,
             BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
             DOWN: tl.constexpr, RIGHT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
             SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
             ACT: tl.constexpr, SUM: tl.constexpr, PREC: tl.constexpr, ROUND: tl.constexpr, LOADS: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The gradient of the images, ``out[c, m, i]`` for pixels m, from that of the results; with ``ACT`` that of what
    was before an activation with the result ``value``. The weights are ``turned[c, tap, i, o]``."""
    c = tl.program_id(1).to(tl.int64)
    m, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(2) * BN + tl.arange(0, BN)
    M: tl.constexpr = BATCH * H * W
    n, y, z = _corner(m, H, W, False)
    start = grad + (c * BATCH + n) * (DOWN * RIGHT * OUT)
    total = tl.zeros((BM, BN), SUM)
    for k0 in range(0, KH * KW * OUT, BK):
        if OUT % BK == 0:  # one tap, whose outputs are neighbours
            tap, o = k0 // OUT, tl.max_contiguous(tl.multiple_of(k0 % OUT, BK) + tl.arange(0, BK), BK)
            down, right = (y + PH - tap // KW)[:, None], (z + PW - tap % KW)[:, None]
        else:
            k = k0 + tl.arange(0, BK)
            tap, o = k // OUT, k % OUT
            down, right = (y + PH)[:, None] - (tap // KW)[None, :], (z + PW)[:, None] - (tap % KW)[None, :]
        ok = (m < M)[:, None] & (down >= 0) & (right >= 0) & (down < DOWN * SH) & (right < RIGHT * SW)
        if SH * SW > 1:
            ok = ok & (down % SH == 0) & (right % SW == 0)
        known = o + tap * OUT < KH * KW * OUT
        at = start[:, None] + (down // SH * RIGHT + right // SW) * OUT + o[None, :]
        g = tl.load(at, mask=ok & known[None, :], other=0.0)
        w = tl.load(turned + c * (KH * KW * IN * OUT) + (tap * (IN * OUT) + o)[:, None] + (i * OUT)[None, :],
                    mask=known[:, None] & (i < IN)[None, :], other=0.0)  # fmt: skip
        if LOADS:
            g, w = _rounded(g, PREC), _rounded(w, PREC)
        total = tl.dot(g, w.to(g.dtype), total, input_precision=PREC, out_dtype=SUM)
    at, ok = (c * M + m[:, None]) * IN + i[None, :], (m < M)[:, None] & (i < IN)[None, :]
    if ACT != "":
        total = _undone(total, tl.load(value + at, mask=ok, other=0.0).to(SUM), ACT)
    tl.store(out + at, _rounded(total, ROUND).to(out.dtype.element_ty), mask=ok)


@triton.jit
def by_weight(x, rows, grad, weight, bias,
              XN: tl.constexpr, XY: tl.constexpr, XX: tl.constexpr, XC: tl.constexpr, CLIENTS: tl.constexpr,
              BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
              DOWN: tl.constexpr, RIGHT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
              SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
              GATHER: tl.constexpr, SUM: tl.constexpr, PREC: tl.constexpr, LOADS: tl.constexpr,
              EACH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """``weight[s, c, o, k] = sum over m of grad[c, m, o] patch[c, m, k]`` for share s of ``EACH`` results m, and the
    sum of the gradients as ``bias``; ``subtract`` adds the shares up, always in the same order."""
    c, s = tl.program_id(1).to(tl.int64), tl.program_id(2) // tl.cdiv(OUT, BN)
    k, o = tl.program_id(0) * BK + tl.arange(0, BK), tl.program_id(2) % tl.cdiv(OUT, BN) * BN + tl.arange(0, BN)
    M: tl.constexpr = BATCH * DOWN * RIGHT
    K: tl.constexpr = KH * KW * IN
    i, j = k // IN // KW, k // IN % KW
    at = i * XY + j * XX + k % IN * XC
    total, summed = tl.zeros((BN, BK), SUM), tl.zeros((BN,), SUM)
    for m0 in range(0, EACH, BM):
        m = s * EACH + m0 + tl.arange(0, BM)
        n, y, z = _corner(m, DOWN, RIGHT, False)
        inside, y, z = m < M, y * SH - PH, z * SW - PW
        ok = inside[:, None] & (k < K)[None, :]
        if PH + PW > 0:
            ok = ok & (y[:, None] + i[None, :] >= 0) & (y[:, None] + i[None, :] < H)
            ok = ok & (z[:, None] + j[None, :] >= 0) & (z[:, None] + j[None, :] < W)
        start = x + _image(rows, c, n, inside, BATCH, GATHER) * XN + y * XY + z * XX
        patch = tl.load(start[:, None] + at[None, :], mask=ok, other=0.0)
        g = tl.load(
            grad + (c * M + m[:, None]) * OUT + o[None, :], mask=inside[:, None] & (o < OUT)[None, :], other=0.0
        )
        if GATHER or LOADS:
            patch = _rounded(patch, PREC)
        if LOADS:
            g = _rounded(g, PREC)
        total = tl.dot(tl.trans(g), patch.to(g.dtype), total, input_precision=PREC, out_dtype=SUM)
        summed += tl.sum(g.to(SUM), 0)
    own = (s * CLIENTS + c) * OUT + o
    tl.store(weight + own[:, None] * K + k[None, :], total, mask=(o < OUT)[:, None] & (k < K)[None, :])
    tl.store(bias + own, summed, mask=(o < OUT) & (tl.program_id(0) == 0))


@triton.jit
def subtract(shares, bias_shares, weight, bias, COUNT, BIASES,
             SHARES: tl.constexpr, K: tl.constexpr, WO: tl.constexpr, BIAS: tl.constexpr, INTO: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Subtract the sum of all shares from weights and biases; without ``INTO`` write the sums."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total, there = tl.zeros((BLOCK,), weight.dtype.element_ty), weight + at // K * WO + at % K
    for s in range(SHARES):
        total += tl.load(shares + s * COUNT + at, mask=at < COUNT, other=0.0)
    tl.store(there, tl.load(there, mask=at < COUNT, other=0.0) - total if INTO else total, mask=at < COUNT)
    if BIAS:
        summed = tl.zeros((BLOCK,), weight.dtype.element_ty)
        for s in range(SHARES):
            summed += tl.load(bias_shares + s * BIASES + at, mask=at < BIASES, other=0.0)
        old = tl.load(bias + at, mask=at < BIASES, other=0.0)
        tl.store(bias + at, old - summed if INTO else summed, mask=at < BIASES)


@triton.jit
def round_all(value, out, COUNT, BLOCK: tl.constexpr):
    """The nearest numbers with the ten bits of tf32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, _rounded(tl.load(value + at, mask=at < COUNT, other=0.0), "tf32"), mask=at < COUNT)


@triton.jit
def unpool(grad, pooled, chosen, out,
           COUNT, DOWN: tl.constexpr, RIGHT: tl.constexpr, OUT: tl.constexpr, ACT: tl.constexpr, SUM: tl.constexpr,
           ROUND: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The gradient before an activation and pooling over windows of 2 x 2, whose largest number is at ``chosen``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o, pixel = at % OUT, at // OUT
    z, y, n = pixel % RIGHT, pixel // RIGHT % DOWN, pixel // (RIGHT * DOWN)
    window = ((n * (DOWN // 2) + y // 2) * (RIGHT // 2) + z // 2) * OUT + o
    ok = at < COUNT
    g, value = tl.load(grad + window, mask=ok, other=0.0), tl.load(pooled + window, mask=ok, other=0.0)
    g = _undone(g.to(SUM), value.to(SUM), ACT)
    taken = tl.load(chosen + window, mask=ok, other=0) == y % 2 * 2 + z % 2
    tl.store(out + at, tl.where(taken, _rounded(g, ROUND), 0.0).to(out.dtype.element_ty), mask=ok)


@triton.jit
def inner_products(one, other, out,
                   ONE: tl.constexpr, OTHER: tl.constexpr, CLIENTS: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, SUM: tl.constexpr, PREC: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """``out[s, c, i, j]``: share s of the inner product of rows i and j of length ``N``, of ``EACH`` numbers."""
    s, c = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = tl.program_id(2) // tl.cdiv(COLUMNS, BN) * BM, tl.program_id(2) % tl.cdiv(COLUMNS, BN) * BN
    i, j = i + tl.arange(0, BM), j + tl.arange(0, BN)
    total = tl.zeros((BM, BN), SUM)
    for k0 in range(0, EACH, BK):
        k = s * EACH + k0 + tl.arange(0, BK)
        a = tl.load(one + c * ONE + i[:, None] * N + k[None, :], mask=(i < ROWS)[:, None] & (k < N)[None, :], other=0.0)
        b = tl.load(other + c * OTHER + j[:, None] * N + k[None, :],
                    mask=(j < COLUMNS)[:, None] & (k < N)[None, :], other=0.0)  # fmt: skip
        total = tl.dot(_rounded(a, PREC), tl.trans(_rounded(b, PREC)), total, input_precision=PREC, out_dtype=SUM)
    at = ((s * CLIENTS + c) * ROWS + i[:, None]) * COLUMNS + j[None, :]
    tl.store(out + at, total, mask=(i < ROWS)[:, None] & (j < COLUMNS)[None, :])


@triton.jit
def subtract_product(left, right, out,
                     RIGHT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr,
                     SUM: tl.constexpr, PREC: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """``out[c, i, n] -= sum over r of left[c, i, r] right[c, r, n]``."""
    c, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.program_id(2) * BM + tl.arange(0, BM)
    total = tl.zeros((BM, BN), SUM)
    for r0 in range(0, DEPTH, BK):
        r = r0 + tl.arange(0, BK)
        a = tl.load(left + (c * ROWS + i[:, None]) * DEPTH + r[None, :],
                    mask=(i < ROWS)[:, None] & (r < DEPTH)[None, :], other=0.0)  # fmt: skip
        b = tl.load(right + c * RIGHT + r[:, None] * N + n[None, :],
                    mask=(r < DEPTH)[:, None] & (n < N)[None, :], other=0.0)  # fmt: skip
        total = tl.dot(a.to(SUM), b.to(SUM), total, input_precision=PREC, out_dtype=SUM)
    at, ok = out + (c * ROWS + i[:, None]) * N + n[None, :], (i < ROWS)[:, None] & (n < N)[None, :]
    tl.store(at, (tl.load(at, mask=ok, other=0.0).to(SUM) - total).to(out.dtype.element_ty), mask=ok)
