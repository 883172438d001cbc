"""Parameter groups that tell hidden matrices from embeddings, output layers and vectors."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["is_matrix", "looks_like_embedding", "split"]

# Parts of the names that embeddings and output layers have in common libraries.
_EMBEDDING_NAMES = ("embed", "wte", "wpe", "lm_head", "output_layer")
# A matrix with so many rows, and rows per column, is taken for an embedding or output layer.
_MIN_ROWS, _MIN_ROWS_PER_COL = 1000, 8


def is_matrix(param: object) -> bool:
    """Return whether `param` can be orthogonalised: real, two dimensions or more, not empty."""
    return (
        isinstance(param, Tensor)
        and param.dim() >= 2
        and not param.is_complex()
        and param.numel() > 0
    )


def looks_like_embedding(name: str | None, param: Tensor) -> bool:
    """Return whether a parameter seems to be an embedding or an output layer, by name or shape."""
    if param.dim() != 2:
        return False
    if name is not None and any(part in name.lower() for part in _EMBEDDING_NAMES):
        return True
    rows, cols = param.shape
    return rows >= _MIN_ROWS and rows >= _MIN_ROWS_PER_COL * cols


def split(
    model: nn.Module,
    head: str | Iterable[str] | None = None,
    weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return groups for NSISA and MISA: hidden matrices, embeddings and output layers, vectors.

    Args:
        model: the model. A parameter shared by an embedding and another layer counts as embedding.
        head: name or names of the output layers, as in `model.named_modules()`. By default what
            `model.get_output_embeddings()` returns if there is such a method (transformers), else
            the last `nn.Linear`. `()` for none.
        weight_decay: decay of everything but vectors (biases, norms), which get 0. By default all
            have that of the optimizer.

    Returns:
        Groups with named parameters, `matrix=True` for the hidden matrices and `False` for the
        rest, which is one group or, with a `weight_decay`, two. Frozen parameters are left out.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
        >>> for group in split(model, weight_decay=0.1):
        ...     names = [name for name, _ in group["params"]]
        ...     print(names, group["matrix"], group["weight_decay"])
        ['1.weight'] True 0.1
        ['0.weight', '2.weight'] False 0.1
        ['1.bias', '2.bias'] False 0.0
    """
    modules = dict(model.named_modules())
    embeddings = [m for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    excluded = {id(p) for m in [*embeddings, *_heads(model, modules, head)] for p in m.parameters()}
    matrices: list[tuple[str, nn.Parameter]] = []
    tables: list[tuple[str, nn.Parameter]] = []
    vectors: list[tuple[str, nn.Parameter]] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            kind = tables if id(param) in excluded else matrices
            (kind if is_matrix(param) else vectors).append((name, param))
    groups: list[dict[str, Any]] = [{"params": matrices, "matrix": True}]
    if weight_decay is None:
        others = {id(param) for _, param in tables + vectors}
        ordered = [(name, p) for name, p in model.named_parameters() if id(p) in others]
        groups += [{"params": ordered, "matrix": False}]
    else:
        groups[0]["weight_decay"] = weight_decay
        groups += [
            {"params": tables, "matrix": False, "weight_decay": weight_decay},
            {"params": vectors, "matrix": False, "weight_decay": 0.0},
        ]
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
