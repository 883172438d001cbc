"""Tianshou's loops stay uncompiled in all tests: compiling takes longer than running them."""

import os

os.environ.setdefault("NUMBA_DISABLE_JIT", "1")  # read when numba is imported
