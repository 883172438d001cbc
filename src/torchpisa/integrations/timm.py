"""timm: the optimizers of torchpisa by name in `timm.optim.create_optimizer_v2` and train.py."""

from torchpisa.registry import OPTIMIZERS

try:
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "timm":
        raise
    raise ModuleNotFoundError(
        "torchpisa.integrations.timm needs timm: pip install timm", name=error.name
    ) from error

__all__ = ["register"]


def register() -> list[str]:
    """Add MISA and SISA to timm's registry, and return their names there.

    `lr`, `weight_decay` and the groups that timm makes (layer decay, no decay of biases) are passed
    on. timm's argument `momentum` is not: its default of 0.9 belongs to SGD.
    """
    names = ["misa", "sisa"]  # of the others, lr is relative, where timm's is absolute
    for name in names:
        info = OPTIMIZERS[name]
        default_registry.register(
            OptimInfo(
                name=info.name,
                opt_class=info.cls,
                description=f"torchpisa: {info.description}",
                has_eps=True,
                has_momentum=False,
                has_betas=False,
            )
        )
    return names
