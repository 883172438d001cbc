"""Triton kernels; imported only when they run, since triton is optional."""
