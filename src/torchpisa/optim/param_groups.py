"""Parameter groups for models whose matrices are not all to be orthogonalised."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["is_matrix", "looks_like_embedding", "split"]

# Parts of the names that embeddings and output layers have in common libraries.
_EMBEDDING_NAMES = ("embed", "wte", "wpe", "lm_head", "output_layer")
# Rows per column, and rows, from which on a matrix is taken for one: hidden layers are rarely wider
# than eight times their input.
_TALL, _MANY = 16, 4096


def is_matrix(param: object) -> bool:
    """Return whether `param` can be orthogonalised: real, two dimensions or more, not empty."""
    return (
        isinstance(param, Tensor)
        and param.dim() >= 2
        and not param.is_complex()
        and param.numel() > 0
    )


def looks_like_embedding(name: str | None, param: Tensor) -> bool:
    """Return whether a matrix seems to be an embedding or an output layer, by name or shape."""
    if param.dim() != 2:
        return False
    if name is not None and any(part in name.lower() for part in _EMBEDDING_NAMES):
        return True
    rows, cols = param.shape
    return rows >= _MANY and rows >= _TALL * cols


def split(model: nn.Module, head: str | Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Groups for NSISA and MISA: hidden matrices apart from embeddings, output layer and vectors.

    Args:
        model: the model. A parameter shared by an embedding and another layer counts as embedding.
        head: name or names of the output layers, as in `model.named_modules()`. By default what
            `model.get_output_embeddings()` returns if there is such a method (transformers), else
            the last `nn.Linear`. `()` for none.

    Returns:
        Two groups with named parameters, `matrix=True` and `False`; frozen parameters are
        left out. Add settings of your own to them, such as `group["weight_decay"] = 0.1`.
    """
    modules = dict(model.named_modules())
    embeddings = [m for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    apart = {id(p) for m in [*embeddings, *_heads(model, modules, head)] for p in m.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [], "matrix": True},
        {"params": [], "matrix": False},
    ]
    for name, param in model.named_parameters():
        if param.requires_grad:
            orthogonalize = is_matrix(param) and id(param) not in apart
            groups[0 if orthogonalize else 1]["params"].append((name, param))
    return [group for group in groups if group["params"]]


def _heads(
    model: nn.Module, modules: dict[str, nn.Module], head: str | Iterable[str] | None
) -> list[nn.Module]:
    if head is not None:
        names = [head] if isinstance(head, str) else list(head)
        for name in names:
            if name not in modules:
                raise ValueError(
                    f"head must name modules of the model, got {name!r}; "
                    f"there are {', '.join(filter(None, modules))}"
                )
        return [modules[name] for name in names]
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Module):
        return [output]
    linear: list[nn.Module] = [m for m in modules.values() if isinstance(m, nn.Linear)]
    return linear[-1:]
