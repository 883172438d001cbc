"""Triton kernels for CUDA devices. Triton is optional, so they are imported only when they run.

In reading order: `plan` decides whether the kernels take a job, and keeps its launches from step to
step; `table` holds the addresses of all tensors of a launch; `launch` calls the kernels. These are
in `elementwise` (SISA and Identity), `orthogonal` (NSISA), `misa` and `symmetric` (the products of
Newton-Schulz); `memory` is how they read and write tensors.
"""
