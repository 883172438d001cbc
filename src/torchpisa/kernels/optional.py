"""Optional dependencies of kernels: Triton."""

import importlib.util
from functools import cache

__all__ = ["without_triton"]

# The oldest version that compiles and interprets the kernels.
_TRITON = (3, 3)


@cache
def without_triton() -> str | None:
    """Return the reason why Triton cannot be used, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < _TRITON:
        return f"Triton must be {'.'.join(map(str, _TRITON))} or newer, got {triton.__version__}"
    return None
