"""Mutations: one thing is broken on purpose, and the checker must say so and name the place.

`python -m tests.mutations` breaks files that runs left behind (--files) and source code that real ranks then run (--sources).
"""
