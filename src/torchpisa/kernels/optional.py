"""What may or may not be installed beside torch."""

import importlib.util
from functools import cache

__all__ = ["without_triton"]

# The oldest version whose compiler and interpreter take the kernels.
_TRITON = (3, 3)


@cache
def without_triton() -> str | None:
    """Return why Triton cannot be used, or None; it is imported only to be used."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < _TRITON:
        return f"Triton must be {'.'.join(map(str, _TRITON))} or newer, got {triton.__version__}"
    return None
