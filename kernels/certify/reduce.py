"""What is certified of kernels/reduce.py: fixed point and back, exact sums and norms, and the trees that ranks share.

rule              to_fixed, from_fixed and the limbs equal to the references; exact_sum equal to the sum of fractions
order             an exact sum and an exact norm in any order and any cut
tensor parallel   every cut of a halving tree over ranks gives its root; an aligned tree keeps its nodes as it grows
C++, builds and threads, flush to zero: see setting.py
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from kernels import reduce
from kernels.certify.core import Case
from kernels.certify.setting import Setting

DTYPES = (torch.float32,)


def cases(s: Setting) -> Iterator[Case]:
    n = 501 if s.small else 20_001
    for scale in (-3, 40, 100):
        down = -90 if scale == 100 else 0
        x = s.values(n, seed=scale + 9, scale_log2=down)
        x[:3] = s.on(torch.tensor([0.5, -1.5, 2.5]) * 2.0**-scale)  # halves go to even
        yield Case(
            "rule",
            f"to_fixed, scale {scale}",
            lambda x=x, e=scale: reduce.to_fixed(x, e),
            lambda x=x, e=scale: reduce.to_fixed_reference(x.cpu(), e),
        )
        acc = s.on(reduce.to_fixed_reference(x.cpu(), scale) * 1_000_003)
        for divisor in (1.0, 3.0):
            args = scale, divisor
            yield Case(
                "rule", f"from_fixed, scale {scale}, divisor {divisor}",
                lambda a=acc, e=args: reduce.from_fixed(a, *e), lambda a=acc, e=args: reduce.from_fixed_reference(a.cpu(), *e),
            )  # fmt: skip
    yield from norms(s, n)
    yield from trees(s)
    many = 501 if s.small else 70_001
    yield from s.circumstances("all", lambda s: outputs(s, many))
    yield from s.flush_to_zero("numbers of 2^-140", lambda s: outputs(s, 501, -140))


def outputs(s: Setting, n: int, scale_log2: int = 0) -> list[Tensor]:
    x = s.values(n, seed=1, scale_log2=scale_log2)
    fixed = reduce.to_fixed(x, 40 - scale_log2 // 2)
    return [fixed, reduce.from_fixed(fixed, 40 - scale_log2 // 2, 3.0), *norm([x])]


def norm(tensors: list[Tensor]) -> list:
    exponent = reduce.max_exponent(tensors)
    limbs = reduce.square_limbs(tensors, exponent)
    return [limbs, reduce.norm_from_limbs(limbs, exponent)]


def norms(s: Setting, n: int) -> Iterator[Case]:
    for down in (0, -140):
        x = s.values(n, seed=4, scale_log2=down)
        exponent = reduce.max_exponent([x.cpu()]) if s.device != "cuda" else 1 + down
        yield Case(
            "rule", f"square_limbs of 2^{down}",
            lambda x=x, e=exponent: reduce.square_limbs([x], e), lambda x=x, e=exponent: reduce.square_limbs_reference([x.cpu()], e),
        )  # fmt: skip
        for ranks in s.ranks:
            cut = [x.flip(0)[n * r // ranks : n * (r + 1) // ranks] for r in range(ranks)]
            yield Case("order", f"norm of 2^{down}, {ranks} ranks", lambda c=cut: norm(c), lambda x=x: norm([x]))


def trees(s: Setting) -> Iterator[Case]:
    if s.device == "interpreter":
        return  # sums in Python: there is no Triton in them
    x = s.values(501, seed=5, scale_log2=3)
    yield Case("rule", "exact_sum", lambda: reduce.exact_sum(x), lambda: float(sum(map(Fraction, x.tolist()))))
    yield Case("order", "exact_sum backwards", lambda: reduce.exact_sum(x.flip(0)), lambda: reduce.exact_sum(x))
    for n in (1, 7, 16, 25):
        leaves = [s.values(3, 5, seed=i) for i in range(n)]
        for tp in s.ranks:
            cuts = [n * r // tp for r in range(tp + 1)]
            nodes = [node for a, b in zip(cuts, cuts[1:]) for node in reduce.nodes(n, a, b)]
            yield Case(
                "tensor parallel", f"{n} leaves, tp={tp}",
                lambda v=leaves, p=nodes, n=n: reduce.combine({(a, b): reduce.halving(a, b, v.__getitem__) for a, b in p}, n),
                lambda v=leaves, n=n: pairwise(v),
            )  # fmt: skip
        grown = dict(enumerate(leaves))
        low = 1 << (n.bit_length() - 1)
        parts = {
            0: reduce.aligned(dict(list(grown.items())[:low])),
            **({1: reduce.aligned({i - low: v for i, v in grown.items() if i >= low})} if n > low else {}),
        }
        yield Case("tensor parallel", f"aligned tree of {n}", lambda g=grown: reduce.aligned(g), lambda p=parts: reduce.aligned(p))


def pairwise(values: list[Tensor]) -> Tensor:
    """The halving tree written out."""
    half = len(values) // 2
    return values[0] if len(values) == 1 else pairwise(values[:half]) + pairwise(values[half:])
