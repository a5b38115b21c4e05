"""C++ kernels behind a plain C ABI, and what builds and loads them."""
