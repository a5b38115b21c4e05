"""What the fork server imports once for all ranks."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable

from pipeline.launch.address import PROJECT_ROOT

PRELOAD_VARIABLE = "LOCKSTEP_PRELOAD"  # module names joined by commas instead of the list below; empty: none
_LIBRARIES = (
    "torch",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.distributed",
    "safetensors.torch",
    "omegaconf",
    "rich.progress",
    "transformers.models.auto.tokenization_auto",
)
_PROJECT_PACKAGES = ("kernels", "stages")


def preload(wanted: Callable[[], bool] = lambda: True) -> None:
    """Imports; a module that can't be imported is reported, and fails again with its traceback in the rank that needs it.

    Between two modules it asks `wanted`, and leaves the rest when that says no.
    """
    chosen = os.environ.get(PRELOAD_VARIABLE)
    names = [*_LIBRARIES, *_project_modules()] if chosen is None else [name for name in chosen.split(",") if name]
    # DeepSpeed imports mlflow for its autotuner where it is installed, with it pandas and pyarrow: a second of time, 150 MB, and a thread.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    start = time.monotonic()
    for name in names:
        if not wanted():
            return
        try:
            importlib.import_module(name)
        except Exception:
            print(f"not loaded: {name}\n{traceback.format_exc()}", flush=True)
    del sys.modules["mlflow"]
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "deepspeed.ops" in sys.modules:  # else every init_distributed compiles it, for minutes; gloo's path is the one we use
        sys.modules["deepspeed.ops"].__compatible_ops__["deepspeed_shm_comm"] = False
    gc.collect()
    gc.freeze()  # the ranks share these pages as long as no collection writes to them
    threads = len(os.listdir("/proc/self/task"))
    print(f"loaded {len(names)} modules in {time.monotonic() - start:.1f} s, {threads} thread(s)", flush=True)
    if threads > 1:
        print(
            "warning: a module started a thread at import; it does not exist in the ranks, and its locks may be held there for ever",
            flush=True,
        )


def _project_modules() -> list[str]:
    names = []
    for package in _PROJECT_PACKAGES:
        folder = PROJECT_ROOT / package
        names += [f"{package}.{path.stem}" for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
    return names
