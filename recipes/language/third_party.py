"""Shampoo and Adam-mini of pytorch_optimizer, fitted to the recipe's models and checkpoints."""

from typing import Any

from pytorch_optimizer import AdamMini, ScalableShampoo
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Shampoo", "adam_mini"]


class Shampoo(ScalableShampoo):
    """Shampoo in blocks, whose state_dict holds tensors instead of the objects around them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the tensors of every object in it by name."""
        saved = super().state_dict()
        states = {
            key: {name: contents(value) for name, value in state.items()}
            for key, state in saved["state"].items()
        }
        return {**saved, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict({**state_dict, "state": {}})
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.grad = param.new_zeros(param.shape)  # a state is made for what has a gradient
        for group in self.param_groups:
            self.init_group(group)
        for param in params:
            param.grad = None
        for key, saved in state_dict["state"].items():
            for name, value in self.state[params[key]].items():
                restore(value, saved[name])


def contents(value: Any) -> Any:
    """Return a tensor itself, and of an object its tensors by name."""
    if isinstance(value, Tensor):
        return value
    entries = vars(value).items()
    return {name: entry for name, entry in entries if isinstance(entry, Tensor | list)}


def restore(value: Any, saved: Any) -> None:
    """Write what `contents` returned into a tensor or an object."""
    if isinstance(value, Tensor):
        value.copy_(saved)
        return
    for name, entry in saved.items():
        tensors = getattr(value, name)
        if isinstance(tensors, Tensor):
            tensors.copy_(entry)
        else:
            for old, new in zip(tensors, entry, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


def adam_mini(model: nn.Module, **options: Any) -> Optimizer:
    """Build Adam-mini with a second moment per head for queries and keys of the recipe's model."""
    width, heads = model.sizes.width, model.sizes.heads
    optimizer = AdamMini(model, num_embeds=width, num_heads=heads, **options)
    names = {"c_q.weight", "c_k.weight"}  # the library knows other models' names
    optimizer.qk_blocks |= names
    for group in optimizer.param_groups:
        if any(name in group["name"] for name in names):
            group["parameter_per_head"] = width * width // heads
    return optimizer
