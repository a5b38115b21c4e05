"""Counter-based random numbers: every number is a function of its key and its index, never of a rank, a batch or a call count.

Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A key is a tuple of integers;
the streams (uniform, normal, Gumbel, sample keys) of one key are independent. Only IEEE operations: the same bits on every machine.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels import device as device_choice
from kernels.cpu import build

Device = torch.device | str

_MASK = 0xFFFFFFFF


def philox_reference(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """One Philox4x32-10 block in plain Python: 4 + 2 words of 32 bits in, 4 out."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q & _MASK, (p >> 32) ^ d ^ k1, p & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return a, b, c, d


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """The same block from the C++ library."""
    words = (ctypes.c_uint32 * 4)(*counter)
    build.library().rng_philox(words, *map(ctypes.c_uint32, key))
    return tuple(words)


@lru_cache(maxsize=4096)
def derive(key: tuple[int, ...]) -> int:
    """64-bit generator key of a tuple of integers in [-2^63, 2^64). ValueError outside."""
    state = (0, 0)
    for i, value in enumerate(key):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"random key {value} does not fit 64 bits")
        state = philox_reference((value & _MASK, value >> 32 & _MASK, i, 0), state)[:2]
    return state[1] << 32 | state[0]


def uniform(key: tuple[int, ...], n: int, offset: int = 0, device: Device = "cpu") -> Tensor:
    """fp32 [n]: elements offset .. offset + n of the stream, odd multiples of 2^-24 strictly between 0 and 1."""
    return _stream("uniform", derive(tuple(key)), n, offset, device)


def normal(key: tuple[int, ...], shape: Sequence[int], offset: int = 0, device: Device = "cpu") -> Tensor:
    """fp32 of `shape`: standard normal numbers by the method of Box and Muller in fp64, rounded once. |x| < 6.8."""
    return _stream("normal", derive(tuple(key)), math.prod(shape), offset, device).view(*shape)


def gumbel(key: int, n: int, offset: int = 0, device: Device = "cpu") -> Tensor:
    """fp32 [n]: -log(-log u) in fp64 from 32-bit u, rounded once. `key` is one of `sample_keys`, element i the noise of token i."""
    return _stream("gumbel", key & (1 << 64) - 1, n, offset, device)


def sample_keys(
    seed: int,
    iteration: int,
    prompt: Sequence[int] | Tensor,
    sample: Sequence[int] | Tensor,
    position: Sequence[int] | Tensor,
    device: Device = "cpu",
) -> Tensor:
    """int64 [M] on `device`: the key of the token at `position` of sample `sample` of prompt `prompt`, each of M values in [0, 2^32)."""
    columns = [torch.as_tensor(c, dtype=torch.int64).contiguous() for c in (prompt, sample, position)]
    if any(c.numel() and not 0 <= int(c.min()) <= int(c.max()) <= _MASK for c in columns):
        raise ValueError("prompt, sample and position must lie in [0, 2^32)")
    if len({len(c) for c in columns}) != 1:
        raise ValueError(f"prompt, sample and position have different lengths: {[len(c) for c in columns]}")
    if _on_gpu(device):
        from kernels.gpu import rng as gpu

        return gpu.sample_keys(derive((seed, iteration)), *(c.to(device) for c in columns))
    out = torch.empty(len(columns[0]), dtype=torch.int64)
    build.library().rng_sample_keys(derive((seed, iteration)), *columns, len(out), out)
    return out


def sample(logits: Tensor, inv_temp: float, keys: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Token ids int64 [M] drawn from softmax(logits * inv_temp) by the Gumbel-max method; math.inf takes the largest logit.

    logits fp32 [M, V], rows may be strided; keys int64 [M]. Ties go to the lowest id. top_k (0 = off) keeps the first k tokens in the
    order (logit * inv_temp descending, id ascending); top_p (1 = off) then the shortest prefix whose probability reaches top_p of the
    kept total, in exact integer sums. A row depends on its own logits and key only. FloatingPointError on NaN or +inf; on a GPU, where
    nothing may wait for a result while a step is recorded, the id of such a row is -1, and the caller has to look.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or keys.dtype != torch.int64 or keys.shape != logits.shape[:1]:
        raise ValueError(f"sample: logits {logits.dtype} {tuple(logits.shape)}, keys {keys.dtype} {tuple(keys.shape)}")
    if not inv_temp > 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"sample: inv_temp {inv_temp}, top_k {top_k}, top_p {top_p}")
    if device_choice.on_gpu(logits, keys):
        from kernels.gpu import rng as gpu

        return gpu.sample(logits, inv_temp, keys.contiguous(), top_k, top_p)
    ids, keys = torch.empty(len(logits), dtype=torch.int64), keys.contiguous()
    build.library().rng_sample(logits, logits.stride(0), *logits.shape, ctypes.c_float(inv_temp), keys, int(top_k), float(top_p), ids)
    if bool((ids < 0).any()):
        raise FloatingPointError(f"logits of row {int((ids < 0).nonzero()[0])} are not finite")
    return ids


def sample_reference(logits: Tensor, inv_temp: float, keys: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The same in plain torch, with probabilities in fp64."""
    ids = []
    for row, key in zip(logits, keys.tolist(), strict=True):
        if math.isinf(inv_temp):
            ids.append(int(row.argmax()))
            continue
        y = row * inv_temp
        order = torch.sort(y, descending=True, stable=True).indices[: top_k or None]
        mass = torch.exp(y[order].double() - y[order[0]].double()).cumsum(0)
        kept = order[: int((mass < top_p * mass[-1]).sum()) + 1] if top_p < 1 else order
        kept = kept.sort().values
        ids.append(int(kept[(y + gumbel_reference(key, len(row)))[kept].argmax()]))
    return torch.tensor(ids, dtype=torch.int64)


def gumbel_reference(key: int, n: int) -> Tensor:
    """`gumbel` from element 0 on, bit for bit, in plain Python and torch: for machines without a compiler."""
    blocks = [philox_reference((i, 0, 0, _STREAMS["gumbel"]), (key & _MASK, key >> 32 & _MASK)) for i in range(-(-n // 4))]
    u = (torch.tensor(blocks, dtype=torch.float64).reshape(-1)[:n] + 0.5) * 2.0**-32
    return (-_log_reference(-_log_reference(u))).float()


def _log_reference(x: Tensor) -> Tensor:
    """log_f64 of cpu/vmath_extra.h."""
    root_half, one = 0x3FE6A09E667F3BCD, 0x3FF0000000000000
    shifted = x.view(torch.int64) + (one - root_half)
    k = ((shifted >> 52) - 1023).double()
    f = ((shifted & 0x000FFFFFFFFFFFFF) + root_half).view(torch.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = torch.full_like(z, 1.0 / 23)
    for odd in range(21, 1, -2):
        p = p * z + 1.0 / odd
    high, low = float.fromhex("0x1.62e42fefa38p-1"), float.fromhex("0x1.ef35793c7673p-45")
    return k * high + (k * low + 2.0 * (s + s * (z * p)))


_STREAMS = {"uniform": 1, "normal": 2, "gumbel": 3}


def _stream(name: str, key: int, n: int, offset: int, device: Device) -> Tensor:
    if _on_gpu(device):
        from kernels.gpu import rng as gpu

        return gpu.stream(_STREAMS[name], key, n, offset, torch.device(device))
    out = torch.empty(n, dtype=torch.float32)
    getattr(build.library(), f"rng_{name}")(key, offset, n, out)
    return out


def _on_gpu(where: Device) -> bool:
    """Streams have no operand to choose by."""
    return device_choice.on_gpu(torch.empty(0, device=where))
