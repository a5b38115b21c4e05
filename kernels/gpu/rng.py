"""Counter-based random numbers and sampling; see `kernels.rng`. The fp64 functions are those of kernels/cpu/vmath_extra.h."""

from __future__ import annotations

import math as host

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import elementwise, math

_UNIFORM, _NORMAL, _GUMBEL, _SAMPLE_KEY = 1, 2, 3, 4  # streams, as in kernels/cpu/rng.cpp
_BLOCK = 256  # Philox blocks of four words
_SPAN = 1024  # vocabulary ids per program of `sample`


@triton.jit
def words(key_low, key_high, block, stream):
    """The four words of Philox blocks `block` (int64) in a stream."""
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox_impl(low, high, zero, zero + stream, (zero + key_low).to(tl.uint32), (zero + key_high).to(tl.uint32), 10)


@triton.jit
def unit(word):
    """A 32-bit word as an fp64 number in (0, 1), exactly (w + 1/2) / 2^32."""
    integer = ((word.to(tl.int64) & 0xFFFFFFFF) | 0x4330000000000000).to(tl.float64, bitcast=True)  # 2^52 + w
    return (integer - constant(integer, 4503599627370495.5)) * constant(integer, 2.3283064365386963e-10)


@triton.jit
def constant(x, value: tl.constexpr):
    return tl.full(x.shape, value, tl.float64)


@triton.jit
def log_f64(x):
    """Of a positive normal number: x = 2^k m, log m = 2 atanh((m - 1) / (m + 1))."""
    shifted = x.to(tl.int64, bitcast=True) + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
    k = ((shifted >> 52) - 1023).to(tl.float64)
    f = ((shifted & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).to(tl.float64, bitcast=True) - constant(x, 1.0)
    s = f / (constant(x, 2.0) + f)
    z = s * s
    p = constant(x, 1.0 / 23)
    p = p * z + constant(x, 1.0 / 21)
    p = p * z + constant(x, 1.0 / 19)
    p = p * z + constant(x, 1.0 / 17)
    p = p * z + constant(x, 1.0 / 15)
    p = p * z + constant(x, 1.0 / 13)
    p = p * z + constant(x, 1.0 / 11)
    p = p * z + constant(x, 1.0 / 9)
    p = p * z + constant(x, 1.0 / 7)
    p = p * z + constant(x, 1.0 / 5)
    p = p * z + constant(x, 1.0 / 3)
    high, low = constant(x, LN2_HIGH), constant(x, LN2_LOW)  # k * high is exact
    return k * high + (k * low + constant(x, 2.0) * (s + s * (z * p)))


LN2_HIGH: tl.constexpr = tl.constexpr(float.fromhex("0x1.62e42fefa38p-1"))
LN2_LOW: tl.constexpr = tl.constexpr(float.fromhex("0x1.ef35793c7673p-45"))


@triton.jit
def gumbel_of(word):
    return (-log_f64(-log_f64(unit(word)))).to(tl.float32)


@triton.jit
def uniform_of(word):
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def sine_cosine(turns):
    """Of an angle in turns, 0 <= turns < 1: the quarter turn is split off exactly, Taylor series within an eighth of a turn."""
    quarters = turns * constant(turns, 4.0)
    magic = constant(turns, 6755399441055744.0)
    shifted = quarters + magic
    quadrant = shifted.to(tl.int64, bitcast=True) & 3
    a = (quarters - (shifted - magic)) * constant(turns, 1.5707963267948966)
    z = a * a
    p, q = constant(turns, 1.0 / 355687428096000.0), constant(turns, 1.0 / 20922789888000.0)
    p = p * z - constant(turns, 1.0 / 1307674368000.0)
    q = q * z - constant(turns, 1.0 / 87178291200.0)
    p = p * z + constant(turns, 1.0 / 6227020800.0)
    q = q * z + constant(turns, 1.0 / 479001600.0)
    p = p * z - constant(turns, 1.0 / 39916800.0)
    q = q * z - constant(turns, 1.0 / 3628800.0)
    p = p * z + constant(turns, 1.0 / 362880.0)
    q = q * z + constant(turns, 1.0 / 40320.0)
    p = p * z - constant(turns, 1.0 / 5040.0)
    q = q * z - constant(turns, 1.0 / 720.0)
    p = p * z + constant(turns, 1.0 / 120.0)
    q = q * z + constant(turns, 1.0 / 24.0)
    p = p * z - constant(turns, 1.0 / 6.0)
    q = q * z - constant(turns, 0.5)
    s, c = a + a * (z * p), constant(turns, 1.0) + z * q
    odd = (quadrant & 1) == 1
    sine, cosine = tl.where(odd, c, s), tl.where(odd, s, c)
    return tl.where((quadrant & 2) != 0, -sine, sine), tl.where(((quadrant + 1) & 2) != 0, -cosine, cosine)


@triton.jit
def stream_kernel(out_ptr, key_ptr, first_block, offset, count, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """out [count] = elements offset .. of a stream; element i is word i % 4 of block i / 4."""
    block = first_block + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = words(tl.load(key_ptr), tl.load(key_ptr + 1), block, STREAM)
    if STREAM == 1:
        a, b, c, d = uniform_of(a), uniform_of(b), uniform_of(c), uniform_of(d)
    elif STREAM == 3:
        a, b, c, d = gumbel_of(a), gumbel_of(b), gumbel_of(c), gumbel_of(d)
    else:  # Box and Muller: words (0, 1) give elements 0 and 1, words (2, 3) elements 2 and 3
        s, t = sine_cosine(unit(b))
        radius = math.root_f64(constant(t, -2.0) * log_f64(unit(a)))
        u, v = sine_cosine(unit(d))
        second = math.root_f64(constant(v, -2.0) * log_f64(unit(c)))
        a, b, c, d = (radius * t).to(tl.float32), (radius * s).to(tl.float32), (second * v).to(tl.float32), (second * u).to(tl.float32)
    at = block * 4 - offset
    tl.store(out_ptr + at, a, mask=(at >= 0) & (at < count))
    tl.store(out_ptr + at + 1, b, mask=(at + 1 >= 0) & (at + 1 < count))
    tl.store(out_ptr + at + 2, c, mask=(at + 2 >= 0) & (at + 2 < count))
    tl.store(out_ptr + at + 3, d, mask=(at + 3 >= 0) & (at + 3 < count))


@triton.jit
def keys_kernel(out_ptr, key_ptr, prompt_ptr, sample_ptr, position_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    prompt = tl.load(prompt_ptr + i, mask=mask, other=0).to(tl.uint32)
    sample = tl.load(sample_ptr + i, mask=mask, other=0).to(tl.uint32)
    position = tl.load(position_ptr + i, mask=mask, other=0).to(tl.uint32)
    zero = prompt * 0
    low, high = (zero + tl.load(key_ptr)).to(tl.uint32), (zero + tl.load(key_ptr + 1)).to(tl.uint32)
    a, b, c, d = tl.philox_impl(prompt, sample, position, zero + 4, low, high, 10)
    tl.store(out_ptr + i, (b.to(tl.int64) << 32) | (a.to(tl.int64) & 0xFFFFFFFF), mask=mask)


@triton.jit
def value_of(logits_ptr, keys_ptr, row, i, mask, inv_temp, stride, GREEDY: tl.constexpr):
    """logit * inv_temp + noise of ids i (int64 [B, 4], four to a Philox block) and whether each logit is NaN or +inf."""
    logits = tl.load(logits_ptr + row * stride + i, mask=mask, other=float("-inf"))
    bad = mask & ((logits != logits) | (logits == float("inf")))
    if GREEDY:
        return logits, bad
    key = tl.load(keys_ptr + row)
    first = tl.reshape(tl.min(i, 1), (i.shape[0],))
    a, b, c, d = words(key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF, first >> 2, 3)
    noise = tl.join(tl.join(gumbel_of(a), gumbel_of(c)), tl.join(gumbel_of(b), gumbel_of(d)))  # [B, 2, 2]: (a, b), (c, d)
    return logits * inv_temp + tl.reshape(noise, (i.shape[0], 4)), bad


@triton.jit
def best_kernel(logits_ptr, keys_ptr, inv_temp_ptr, best_ptr, id_ptr, vocab, stride, GREEDY: tl.constexpr, SPAN: tl.constexpr):
    """Of SPAN ids of a row: the largest value and the lowest id that has it; id -1 where a logit is NaN or +inf."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = (span * SPAN + tl.arange(0, SPAN // 4) * 4).to(tl.int64)[:, None] + tl.arange(0, 4)[None, :]
    value, bad = value_of(logits_ptr, keys_ptr, row, i, i < vocab, tl.load(inv_temp_ptr), stride, GREEDY)
    value = tl.where(i < vocab, value, float("-inf"))
    best = tl.max(tl.max(tl.where(value != value, float("-inf"), value), 1), 0)
    lowest = tl.min(tl.min(tl.where((value == best) & (i < vocab), i, 0x7FFFFFFFFFFFFFFF), 1), 0)
    anything_bad = tl.max(tl.max(tl.where(bad, 1, 0), 1), 0)
    at = row * tl.num_programs(1) + span
    tl.store(best_ptr + at, best)
    tl.store(id_ptr + at, tl.where(anything_bad != 0, -1, lowest))


@triton.jit
def choose_kernel(best_ptr, id_ptr, out_ptr, spans, SPANS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPANS)
    best = tl.load(best_ptr + row * spans + s, mask=s < spans, other=float("-inf"))
    ids = tl.load(id_ptr + row * spans + s, mask=s < spans, other=0x7FFFFFFFFFFFFFFF)
    lowest = tl.min(tl.where(best == tl.max(best, 0), ids, 0x7FFFFFFFFFFFFFFF), 0)
    tl.store(out_ptr + row, tl.where(tl.min(ids, 0) < 0, -1, lowest))


@triton.jit
def values_kernel(logits_ptr, keys_ptr, inv_temp_ptr, out_ptr, vocab, stride, SPAN: tl.constexpr):
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = (span * SPAN + tl.arange(0, SPAN // 4) * 4).to(tl.int64)[:, None] + tl.arange(0, 4)[None, :]
    value, bad = value_of(logits_ptr, keys_ptr, row, i, i < vocab, tl.load(inv_temp_ptr), stride, False)
    tl.store(out_ptr + row * vocab + i, tl.where(bad, float("nan"), value), mask=i < vocab)


# --- launches ----------------------------------------------------------------------------------------------------------------
def stream(number: int, key: int, n: int, offset: int, device: torch.device) -> Tensor:
    """fp32 [n]: elements offset .. of stream `number` (uniform, normal, Gumbel) of a 64-bit key."""
    out = torch.empty(n, dtype=torch.float32, device=device)
    if n:
        first = offset // 4
        grid = (triton.cdiv(-(-(offset + n) // 4) - first, _BLOCK),)
        stream_kernel[grid](out, _words_of(key, device), first, offset, n, STREAM=number, BLOCK=_BLOCK, **math.LAUNCH)
    return out


def sample_keys(key: int, prompt: Tensor, sample: Tensor, position: Tensor) -> Tensor:
    """int64 [M] from the derived key and int64 [M] each."""
    out = torch.empty(len(prompt), dtype=torch.int64, device=prompt.device)
    if len(out):
        words_ = _words_of(key, prompt.device)
        keys_kernel[(triton.cdiv(len(out), 128),)](out, words_, prompt, sample, position, len(out), BLOCK=128, **math.LAUNCH)
    return out


def sample(logits: Tensor, inv_temp: float, keys: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Token ids int64 [M]; -1 where a logit is NaN or +inf, which the caller looks for: nothing here waits for the GPU."""
    (rows, vocab), device = logits.shape, logits.device
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    if not logits.numel():
        return ids.fill_(-1)
    greedy, spans = host.isinf(inv_temp), triton.cdiv(vocab, _SPAN)
    scale = _scalar(1.0 if greedy else inv_temp, device)
    if not greedy and (0 < top_k < vocab or top_p < 1.0):
        return _restricted(logits, inv_temp, scale, keys, top_k, top_p)
    best, lowest = torch.empty(rows, spans, device=device), torch.empty(rows, spans, dtype=torch.int64, device=device)
    best_kernel[(rows, spans)](logits, keys, scale, best, lowest, vocab, logits.stride(0), GREEDY=greedy, SPAN=_SPAN, **math.LAUNCH)
    choose_kernel[(rows,)](best, lowest, ids, spans, SPANS=triton.next_power_of_2(spans), **math.LAUNCH)
    return ids


def _restricted(logits: Tensor, inv_temp: float, scale: Tensor, keys: Tensor, top_k: int, top_p: float) -> Tensor:
    """With top-k or top-p: tokens in the order (value descending, id ascending), probabilities as integers in units of 2^-40."""
    rows, vocab = logits.shape
    values = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    values_kernel[(rows, triton.cdiv(vocab, _SPAN))](logits, keys, scale, values, vocab, logits.stride(0), SPAN=_SPAN, **math.LAUNCH)
    y = logits * scale + 0.0  # -0 and +0 are one value
    y, order = torch.sort(y, dim=1, descending=True, stable=True)
    if 0 < top_k < vocab:
        y, order = y[:, :top_k], order[:, :top_k]
    noisy = values.gather(1, order)
    if top_p < 1.0:
        mass = (elementwise.exp((y - y[:, :1]).contiguous()).double() * 2.0**40).to(torch.int64)
        before = mass.cumsum(1) - mass
        noisy = torch.where(before.double() < mass.sum(1, keepdim=True).double() * top_p, noisy, float("-inf"))
    best = noisy.amax(1, keepdim=True)
    ids = torch.where(noisy == best, order, vocab).amin(1)
    return torch.where(values.isnan().any(1), -1, ids)


def _words_of(key: int, device: torch.device) -> Tensor:
    """The two halves of a 64-bit key, int64 [2]."""
    return torch.tensor([key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF], dtype=torch.int64).to(device)


_SCALARS: dict[tuple[float, torch.device], Tensor] = {}


def _scalar(value: float, device: torch.device) -> Tensor:
    """An fp32 number in the device's memory: rounded once, and no copy while a graph is recorded."""
    if (value, device) not in _SCALARS:
        _SCALARS[value, device] = torch.tensor([value], dtype=torch.float32).to(device)
    return _SCALARS[value, device]


def compile_cases() -> list:
    from kernels.gpu.ahead_of_time import Case

    signature = {"out_ptr": "*fp32", "key_ptr": "*i64", "first_block": "i32", "offset": "i32", "count": "i32"}
    cases = [
        Case(stream_kernel, name, signature, {"STREAM": number, "BLOCK": _BLOCK}, ("out_ptr", "key_ptr"))
        for name, number in (("uniform", _UNIFORM), ("normal", _NORMAL), ("gumbel", _GUMBEL))
    ]
    pointers = dict.fromkeys(("out_ptr", "key_ptr", "prompt_ptr", "sample_ptr", "position_ptr"), "*i64")
    cases.append(Case(keys_kernel, "keys", {**pointers, "count": "i32"}, {"BLOCK": 128}, tuple(pointers)))
    pointers = {"logits_ptr": "*fp32", "keys_ptr": "*i64", "inv_temp_ptr": "*fp32", "best_ptr": "*fp32", "id_ptr": "*i64"}
    signature = {**pointers, "vocab": "i32", "stride": "i32"}
    for greedy in (False, True):
        constexprs = {"GREEDY": greedy, "SPAN": _SPAN}
        cases.append(Case(best_kernel, "greedy" if greedy else "sampling", signature, constexprs, (*pointers, "vocab", "stride")))
    signature = {"best_ptr": "*fp32", "id_ptr": "*i64", "out_ptr": "*i64", "spans": "i32"}
    cases.append(Case(choose_kernel, "spans", signature, {"SPANS": 256}, ("best_ptr", "id_ptr", "out_ptr")))
    pointers = {"logits_ptr": "*fp32", "keys_ptr": "*i64", "inv_temp_ptr": "*fp32", "out_ptr": "*fp32"}
    signature = {**pointers, "vocab": "i32", "stride": "i32"}
    cases.append(Case(values_kernel, "values", signature, {"SPAN": _SPAN}, (*pointers, "vocab", "stride")))
    return cases
