"""Deterministic kernels: one file per operation, a plain-torch reference beside each. Imports nothing of the project's other packages."""
