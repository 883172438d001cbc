"""Triton's interpreter, without work that it does again for every function that a kernel calls."""

from collections.abc import Callable
from typing import Any

try:
    from triton.language import core
    from triton.runtime import interpreter
except ImportError:
    interpreter = None


def _where_not_yet(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `patch` of the modules of the language that a function uses, done where it is not.

    Those of a kernel are patched while it runs, and with them those of most functions it calls.
    """

    def patched(function: Any) -> Any:
        languages = [
            value
            for value in function.__globals__.values()
            if value is core or value is interpreter.tl
        ]
        if any(core.is_builtin(language.load) for language in languages):
            return patch(function)
        return interpreter._LangPatchScope()

    return patched


if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang = _where_not_yet(interpreter._patch_lang)
