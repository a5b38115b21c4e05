"""The operations of `kernels/` in Triton, for tensors on a GPU: the same trees and, in fp32, the same chains.

Every module has the functions of the module of the same name one level up, which checks the arguments and chooses by device.
With TRITON_INTERPRET=1, set before the first import, the kernels run on CPU tensors: slowly, for tests.
"""
