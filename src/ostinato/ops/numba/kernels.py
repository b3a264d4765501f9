"""The kernels: norms, the gated activation, and attention for one query per request.

All are in one file, because each may call only what is in its own file (see ``compiled.py``). Their
operators document what they compute. ``T`` tokens, ``R`` requests.
"""

import math

import numpy as np

from ostinato.ops.numba.compiled import compilers

inlined, kernel = compilers(
    nogil=True,
    error_model="numpy",  # no checks for division by zero
    # Allow reordered sums and fused multiply-adds; without them nothing would be vectorised. NaN
    # and infinities keep their meaning.
    fastmath={"reassoc", "contract", "arcp", "nsz"},
)

_ZERO, _ONE = np.float32(0), np.float32(1)
_LOWEST, _HIGHEST = np.float32(-np.inf), np.float32(np.inf)
_HALF = np.float32(0.5)
_LOG2_E = np.float32(math.log2(math.e))
_LN2 = math.log(2)  # float64, and so is everything derived from it
_LEAST = np.float32(-87)  # e to this power is about the smallest normal number
_MOST = np.float32(88)  # e to this power is about the largest number


@inlined
def _exponential(x):
    """e^x of a number from -87 to 88, or NaN, as (m, b): m times the float whose bits are b.

    Accurate to one ulp, and without a call, so that a loop over it is vectorised; the compiler
    cannot vectorise the library's. The polynomial is from Cephes. It uses float64: reordering would
    merge the usual two-part ln 2 and lose 4 ulps.
    """
    exponent = math.floor(x * _LOG2_E + _HALF)
    rest = x - exponent * _LN2
    y = np.float32(1.9875691500e-4)
    y = y * rest + np.float32(1.3981999507e-3)
    y = y * rest + np.float32(8.3334519073e-3)
    y = y * rest + np.float32(4.1665795894e-2)
    y = y * rest + np.float32(1.6666665459e-1)
    y = y * rest + np.float32(5.0000001201e-1)
    return y * rest * rest + rest + _ONE, (np.int32(exponent) + np.int32(127)) << np.int32(23)


@inlined
def _norm_scale(row, eps):
    squares = _ZERO
    for i in range(row.shape[0]):
        squares += row[i] * row[i]
    return _ONE / np.sqrt(squares / np.float32(row.shape[0]) + eps)


@kernel("void(f4[:, ::1], f4[::1], f4[:, ::1], f4)")
def rms_norm(x, weight, out, eps):
    for row in range(x.shape[0]):
        scale = _norm_scale(x[row], eps)
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * scale * weight[i]


@kernel("void(f4[:, ::1], f4[:, ::1], f4[::1], f4[:, ::1], f4[:, ::1], f4)")
def add_rms_norm(x, residual, weight, out, total, eps):
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            total[row, i] = x[row, i] + residual[row, i]
        scale = _norm_scale(total[row], eps)
        for i in range(x.shape[1]):
            out[row, i] = total[row, i] * scale * weight[i]


@kernel("void(f4[:, ::1], f4[:, ::1])")
def silu_and_mul(gate_up, out):
    width = out.shape[1]
    bits = np.empty(width, np.int32)
    powers = bits.view(np.float32)
    for row in range(out.shape[0]):
        for i in range(width):
            x = -gate_up[row, i]
            x = _LEAST if x < _LEAST else x
            x = _MOST if x > _MOST else x
            out[row, i], bits[i] = _exponential(x)
        for i in range(width):
            gate = gate_up[row, i]
            power = _HIGHEST if -gate > _MOST else out[row, i] * powers[i]
            out[row, i] = gate / (_ONE + power) * gate_up[row, width + i]


@inlined
def _rotate(head, angles, weight, eps, out):
    """One head of a query or key: normed if it has a weight, then RoPE."""
    dim = head.shape[0]
    half = dim // 2
    if weight.shape[0]:
        scale = _norm_scale(head, eps)
        for i in range(dim):
            out[i] = head[i] * scale * weight[i]
    else:
        for i in range(dim):
            out[i] = head[i]
    for i in range(half):
        first, second = out[i], out[half + i]
        out[i] = first * angles[i] - second * angles[half + i]
        out[half + i] = second * angles[i] + first * angles[half + i]


@inlined
def _check_row(row, table):
    if not 0 <= row < table.shape[0]:
        raise IndexError("a position, slot or block is out of range")


@inlined
def _rotate_and_store(qkv, positions, table, qk_norm, eps, keys, values, slots, query, num_tokens):
    """Write queries to ``query`` [T, heads, dim], keys and values to their slots of the caches."""
    num_heads, dim = query.shape[1:]
    block_size, num_kv_heads = keys.shape[1:3]
    for token in range(num_tokens):
        _check_row(positions[token], table)
        angles = table[positions[token]]
        heads = qkv[token].reshape((-1, dim))
        for head in range(num_heads):
            _rotate(heads[head], angles, qk_norm[head], eps, query[token, head])
        if slots[token] >= 0:
            block, place = slots[token] // block_size, slots[token] % block_size
            _check_row(block, keys)
            for head in range(num_kv_heads):
                key = num_heads + head
                _rotate(heads[key], angles, qk_norm[key], eps, keys[block, place, head])
                for i in range(dim):
                    values[block, place, head, i] = heads[key + num_kv_heads, i]


@inlined
def _softmax(scores, bits, soft_cap, sink):
    """In place, over ``scores`` and a sink without a value. ``bits`` is scratch of equal length."""
    powers = bits.view(np.float32)
    if soft_cap > _ZERO:
        for i in range(scores.shape[0]):
            scores[i] = soft_cap * math.tanh(scores[i] / soft_cap)
    most = sink
    for i in range(scores.shape[0]):
        most = scores[i] if scores[i] > most else most
    for i in range(scores.shape[0]):
        x = scores[i] - most
        x = _LEAST if x < _LEAST else x  # NaN compares false, and stays
        scores[i], bits[i] = _exponential(x)
    total = math.exp(sink - most)
    for i in range(scores.shape[0]):
        scores[i] *= powers[i]
        total += scores[i]
    share = _ONE / total
    for i in range(scores.shape[0]):
        scores[i] *= share


@inlined
def _score(query, keys, table, first, length, scores):
    """Dot products of ``query`` [heads, dim] with the keys from ``first`` up to ``length``.

    Checks the block numbers in ``table``; ``_mix`` does not check them again.
    """
    block_size, num_kv_heads, dim = keys.shape[1:]
    group = query.shape[0] // num_kv_heads
    for start in range(first - first % block_size, length, block_size):
        _check_row(table[start // block_size], keys)
        block, at = keys[table[start // block_size]], start - first
        low, high = max(-at, 0), min(length - start, block_size)
        four = low + (high - low) // 4 * 4
        for head in range(query.shape[0]):
            q, kv_head, row = query[head], head // group, scores[head]
            for place in range(low, four, 4):  # four at a time share reads of the query
                a = b = c = d = _ZERO
                for i in range(dim):
                    a += q[i] * block[place, kv_head, i]
                    b += q[i] * block[place + 1, kv_head, i]
                    c += q[i] * block[place + 2, kv_head, i]
                    d += q[i] * block[place + 3, kv_head, i]
                row[at + place], row[at + place + 1] = a, b
                row[at + place + 2], row[at + place + 3] = c, d
            for place in range(four, high):
                a = _ZERO
                for i in range(dim):
                    a += q[i] * block[place, kv_head, i]
                row[at + place] = a


@inlined
def _mix(weights, values, table, first, length, out):
    """Sum the weighted values from ``first`` up to ``length`` into ``out`` [heads, dim]."""
    block_size, num_kv_heads, dim = values.shape[1:]
    group = out.shape[0] // num_kv_heads
    out[:] = _ZERO
    for start in range(first - first % block_size, length, block_size):
        block, at = values[table[start // block_size]], start - first
        low, high = max(-at, 0), min(length - start, block_size)
        four = low + (high - low) // 4 * 4
        for head in range(out.shape[0]):
            mixed, kv_head, row = out[head], head // group, weights[head]
            for place in range(low, four, 4):  # four at a time share writes
                a, b = row[at + place], row[at + place + 1]
                c, d = row[at + place + 2], row[at + place + 3]
                for i in range(dim):
                    mixed[i] += (
                        a * block[place, kv_head, i] + b * block[place + 1, kv_head, i]
                    ) + (c * block[place + 2, kv_head, i] + d * block[place + 3, kv_head, i])
            for place in range(four, high):
                a = row[at + place]
                for i in range(dim):
                    mixed[i] += a * block[place, kv_head, i]


@inlined
def _attend(query, keys, values, out, starts, lengths, tables, sinks, rules, most_keys):
    """Attend for requests with one query and at most ``most_keys`` keys; return how many remain.

    ``rules``: scale, window (0: none), soft cap (0: none). Rows that belong to no request become
    zero; rows of the remaining requests are not written, so ``out`` may be ``query``. A dummy batch
    for a capture may claim more keys than its table can hold.
    """
    scale, window, soft_cap = rules
    capacity = tables.shape[1] * keys.shape[1]
    scaled = np.empty(query.shape[1:], np.float32)
    scores = np.empty((query.shape[1], most_keys), np.float32)
    bits = np.empty(most_keys, np.int32)
    num_left = 0
    for request in range(lengths.shape[0]):
        length, end = min(lengths[request], capacity), starts[request + 1]
        num_queries = max(min(end - starts[request], length), 0)
        out[starts[request] : end - num_queries] = _ZERO
        first = max(length - int(window), 0) if window > 0 else 0
        if num_queries > 1 or length - first > most_keys:
            num_left += 1
        elif num_queries == 1:
            for head in range(query.shape[1]):
                for i in range(query.shape[2]):
                    scaled[head, i] = query[end - 1, head, i] * scale
            _score(scaled, keys, tables[request], first, length, scores)
            for head in range(query.shape[1]):
                sink = sinks[head] if sinks.shape[0] else _LOWEST
                _softmax(scores[head, : length - first], bits[: length - first], soft_cap, sink)
            _mix(scores, values, tables[request], first, length, out[end - 1])
    out[starts[lengths.shape[0]] :] = _ZERO
    return num_left


_HEADS = "f4[:, :, ::1]"
_CACHES = "f4[:, :, :, ::1], f4[:, :, :, ::1]"
_BATCH = "i4[::1], i4[::1], i4[:, ::1], i8[::1]"  # starts, lengths, tables, slots
_RULES = "f4[::1], UniTuple(f8, 3), i8"  # sinks, rules, most_keys


@kernel(
    f"i8(f4[:, ::1], i8[::1], f4[:, ::1], f4[:, ::1], f4, {_CACHES}, {_HEADS}, {_BATCH}, {_RULES})"
)
def rotary_attention(
    qkv, positions, table, qk_norm, eps,
    keys, values, out, starts, lengths, tables, slots, sinks, rules, most_keys,
):  # fmt: skip
    """RoPE, store, attend. Rows of requests that are left out hold their queries."""
    num_tokens = starts[lengths.shape[0]]
    _rotate_and_store(qkv, positions, table, qk_norm, eps, keys, values, slots, out, num_tokens)
    return _attend(out, keys, values, out, starts, lengths, tables, sinks, rules, most_keys)


@kernel(f"i8({_HEADS}, {_HEADS}, {_HEADS}, {_CACHES}, {_HEADS}, {_BATCH}, {_RULES})")
def attention(
    query, key, value,
    keys, values, out, starts, lengths, tables, slots, sinks, rules, most_keys,
):  # fmt: skip
    """Store and attend. Rows of requests that are left out are not written."""
    block_size = keys.shape[1]
    for token in range(key.shape[0]):
        if slots[token] >= 0:
            block, place = slots[token] // block_size, slots[token] % block_size
            _check_row(block, keys)
            keys[block, place] = key[token]
            values[block, place] = value[token]
    return _attend(query, keys, values, out, starts, lengths, tables, sinks, rules, most_keys)
