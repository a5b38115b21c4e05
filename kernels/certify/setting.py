"""Where a case runs and on what: device, dtype, inputs, and the circumstances that may change no bit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kernels import device as device_choice
from kernels.certify.core import Case, Result
from kernels.cpu import build

Shape = tuple[int, ...]
ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 255)
RANKS = (1, 2, 3, 4, 6, 8)
THREADS = (1, 2, 3, 4)


_flushing = False  # whether `_flushed` runs


def unflushed(operands: Callable[..., Any]) -> Callable[..., Any]:
    """Inputs keep their subnormal numbers while flush-to-zero is on for what is certified: PyTorch's own arithmetic would drop them."""

    @functools.wraps(operands)
    def made(*args: Any, **kwargs: Any) -> Any:
        global _flushing
        before, _flushing = _flushing, False
        torch.set_flush_denormal(False)
        try:
            return operands(*args, **kwargs)
        finally:
            _flushing = before
            torch.set_flush_denormal(before)

    return made


class NotAvailable(Exception):
    """An operation does not exist for this device or dtype yet."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """device: "cpu", "cuda", or "interpreter" (the Triton kernels on CPU tensors: every expectation is then the C++ kernels' result)."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    quick: bool = False
    tensor_cores: bool = False  # the operation has products that a GPU may do on tensor cores
    narrows: bool = False  # in bf16 the Triton kernels round more often than C++ does (probabilities)

    @property
    def small(self) -> bool:
        return self.quick or self.device == "interpreter"

    @property
    def rows(self) -> tuple[int, ...]:
        return (1, 2, 5, 17) if self.device == "interpreter" else (1, 3, 17, 64) if self.quick else ROWS

    @property
    def ranks(self) -> tuple[int, ...]:
        return (2, 3) if self.small else RANKS

    @property
    def has_rule(self) -> bool:
        """Whether the reference's bits are promised: not where the order inside one instruction is the hardware's."""
        own_class = self.tensor_cores if self.device == "cuda" else self.narrows and self.device == "interpreter"
        return not (self.dtype == torch.bfloat16 and own_class)

    # --- inputs ------------------------------------------------------------------------------------------------------------------
    @unflushed
    def values(self, *shape: int, seed: int, scale_log2: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of the dtype in (-2, 2) * 2^scale_log2, over 9 binades. From integers: the same on every machine and device."""
        generator = torch.Generator().manual_seed(seed)
        mantissa = torch.randint(-(1 << 24), 1 << 24, shape, generator=generator).double()
        exponent = torch.randint(-31, -22, shape, generator=generator).double()
        return self.on((mantissa * torch.exp2(exponent + scale_log2)).float().to(dtype or self.dtype))

    def fp32(self, *shape: int, seed: int, scale_log2: int = 0) -> Tensor:
        return self.values(*shape, seed=seed, scale_log2=scale_log2, dtype=torch.float32)

    def on(self, t: Tensor) -> Tensor:
        return t.to("cuda") if self.device == "cuda" else t

    def counts(self, *values: int) -> Tensor:
        """int64 [len(values)]."""
        return self.on(torch.tensor(values, dtype=torch.int64))

    def zeros(self, *shape: int) -> Tensor:
        """An int64 accumulator."""
        return self.on(torch.zeros(shape, dtype=torch.int64))

    def framed(self, t: Tensor) -> Tensor:
        """The same values as a view into a larger tensor that is NaN elsewhere: before, after and between the rows."""
        frame = t.new_full([t.shape[0] + 3, *(n + 5 for n in t.shape[1:])], math.nan)
        view = frame[(slice(2, 2 + t.shape[0]), *(slice(3, 3 + n) for n in t.shape[1:]))]
        view.copy_(t)
        return view

    def store(self, t: Tensor) -> Tensor:
        """fp32 of a reference, rounded once to the dtype of storage."""
        return t.to(self.dtype)

    # --- circumstances -----------------------------------------------------------------------------------------------------------
    @contextmanager
    def under_test(self) -> Iterator[None]:
        """The interpreter: public functions choose the Triton kernels for CPU tensors, too."""
        if self.device != "interpreter":
            yield
            return
        asked: list[int] = []
        chosen, device_choice.on_gpu = device_choice.on_gpu, lambda *tensors: bool(asked.append(1)) or True  # type: ignore[assignment]
        device_choice.interpreted = True
        try:
            yield
        except ImportError as fault:
            raise NotAvailable(str(fault)) from fault
        finally:
            device_choice.on_gpu, device_choice.interpreted = chosen, False
        if not asked:
            raise NotAvailable("the operation does not choose by device")

    def circumstances(self, name: str, outputs: Callable[[Setting], Result]) -> Iterator[Case]:
        """`outputs` on every build and number of threads, or from the Triton kernels against C++."""
        if self.device == "cpu":
            for build_name in build.runnable_builds():
                for threads in (1, 3) if self.quick else THREADS:
                    yield Case(
                        "builds and threads",
                        f"{name}, {build_name}, {threads} threads",
                        lambda b=build_name, t=threads: _built(b, t, lambda: outputs(self)),
                        lambda: outputs(self),
                    )
        elif self.has_rule and (self.device == "interpreter" or has_compiler()):
            here = self if self.device == "interpreter" else dataclasses.replace(self, device="cpu")
            yield Case("C++", name, lambda: outputs(self), lambda: outputs(here))

    def flush_to_zero(self, name: str, outputs: Callable[[Setting], Result]) -> Iterator[Case]:
        """`outputs`, of subnormal numbers, while the processor's flush-to-zero mode is on. Only a CPU has such a mode."""
        if self.device == "cpu":
            yield Case("flush to zero", name, lambda: _flushed(lambda: outputs(self)), lambda: outputs(self))


def host(*values: Any) -> list[Any]:
    """Arguments of a reference: tensors in main memory, bf16 widened to fp32."""
    return [(v.cpu().float() if v.is_floating_point() else v.cpu()) if isinstance(v, Tensor) else v for v in values]


def has_compiler() -> bool:
    """Whether the C++ kernels can be had on this machine."""
    try:
        build.library()
    except build.KernelError:
        return False
    return True


def _built(name: str, threads: int, outputs: Callable[[], Result]) -> Result:
    """`outputs` with another build's library in the place of the loaded one."""
    before = build.library()
    build._library = build.load(build.build(name))
    build.set_threads(threads)
    try:
        return outputs()
    finally:
        build.set_threads(1)
        build._library = before


def _flushed(outputs: Callable[[], Result]) -> Result:
    global _flushing
    if not torch.set_flush_denormal(True):
        raise NotAvailable("this processor has no flush-to-zero mode")
    _flushing = True
    try:
        return outputs()
    finally:
        _flushing = False
        torch.set_flush_denormal(False)
