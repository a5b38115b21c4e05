"""The certificate: every bit of every operation, by every path that a layout, a schedule, a build or a batch can take, against the rule.

`python -m kernels.certify` prints it. One file per operation states what is certified, as a generator of named cases; `core` compares them
and `setting` holds what a case may vary: device, dtype, build, threads, memory around the operands, the processor's modes.
"""
