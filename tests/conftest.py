"""For all tests: one thread per process, as the ranks have it, and no network by accident."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before any Triton kernel is imported: they then run on CPU tensors (tests/gpu unsets it)
