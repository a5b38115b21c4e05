"""Which kernels an operation runs: C++ for tensors in main memory, Triton for any other device. There is no way from one to the other."""

from __future__ import annotations

from torch import Tensor

interpreted = False  # True while Triton's interpreter stands in for a GPU: then the Triton kernels run for CPU tensors, too


def on_gpu(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels are to run. ValueError when the tensors lie on different devices."""
    for t in tensors:
        if t is not None and not t.is_cpu:
            break
    else:
        return interpreted  # found in a fifth of the time that the set below takes
    devices = {t.device for t in tensors if t is not None}
    if len(devices) != 1:
        raise ValueError(f"tensors on different devices: {', '.join(sorted(map(str, devices)))}; move them to one")
    return devices.pop().type != "cpu"
