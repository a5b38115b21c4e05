"""What the kernels cost, as ratios to PyTorch's own operations on the same work: `python -m kernels.bench [op ...]`.

One file per operation, of its name, with the pairs that are timed; `timing` times them, `rates` measures what the machine could do.
"""
