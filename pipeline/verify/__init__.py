"""Checks a comparison report, ours or the published one whose fields ours extend, without our code's help, a machine of ours, or a GPU.

Only the standard library, and nothing else of this project: the folder can be copied and read alone. `python -m pipeline.verify FILE` here,
`python -I -S verify FILE` on a copy.
"""
