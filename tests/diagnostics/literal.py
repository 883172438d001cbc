"""The numbers of a row by their definitions, over whole tensors, batch by batch, in float64."""

import math
from typing import Any

import torch
from torch import Tensor

from torchpisa.algorithms import nsisa
from torchpisa.optim.pisa import PISA
from torchpisa.preconditioners import NewtonSchulz

State = dict[Any, dict[str, Tensor]]


def copied(opt: PISA) -> State:
    """Return copies of weights and state."""
    return {
        param: {
            "w": param.detach().clone(),
            **{k: v.clone() for k, v in opt.state[param].items() if isinstance(v, Tensor)},
        }
        for group in opt.param_groups
        for param in group["params"]
        if param in opt.state
    }


def real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def norm(vectors: list[Tensor]) -> float:
    return float(torch.cat(vectors).norm()) if vectors else 0.0


def diagonal(part: Any, i: int, old: Any, new: Any) -> Tensor | None:
    """Return q of batch i, as it was used in this round."""
    rule = part.preconditioner
    step = float(new[f"step.{i}"])
    if isinstance(rule, NewtonSchulz):
        o = nsisa.newton_schulz(new[f"momentum.{i}"].flatten(1), rule.ns_steps, rule.dtype)
        return real((old[f"dual.{i}"] + o.view_as(old[f"dual.{i}"])).abs())
    state = {k.removesuffix(f".{i}"): real(v) for k, v in new.items() if k.endswith(f".{i}")}
    q: Tensor | None = rule.diagonal(real(new[f"dual.{i}"]), state, step)
    return q


def row(opt: PISA, old: State, new: State) -> dict[str, float]:
    """Return the measurements of the round that led from `old` to `new`."""
    alpha: list[float] = opt.param_groups[0]["weights"]
    m = len(alpha)
    primal = dual = duals = spread = 0.0
    steps, first_steps, momenta, dominated = [], [], [], []
    pis = [[] for _ in range(m)]  # type: list[list[Tensor]]
    for i in range(m):
        d, moved = [], []
        for part in opt.parts():
            group, lr = part.group, float(part.lr)
            held = [param for param in part.params if param in new]
            for param in held:
                before, after = old[param], new[param]
                if part.sigma_follows:  # it follows the gradients of every parameter
                    sigmas = [max(float(after[f"sigma.{k}"]), 1e-30) for k in range(m)]
                    size = sum(other.numel() for other in held)
                    means = [
                        sum(o.numel() / size * float(new[o][f"sigma.{k}"]) for o in held)
                        for k in range(m)
                    ]
                else:
                    sigmas = means = part.sigmas
                sigma, rho = sigmas[i] / lr, part.rhos[i] / lr
                pi, pi_new = real(before[f"dual.{i}"]), real(after[f"dual.{i}"])
                took_part = after[f"step.{i}"] > before[f"step.{i}"]
                delta = (pi_new / group["dual_decay"] - pi) if took_part else 0 * pi
                d.append(delta / sigma)
                moved.append(sigma * (real(after["w"]) - real(before["w"])))
                pis[i].append(pi_new)
                total = sum(a * s for a, s in zip(alpha, means, strict=True))
                steps.append(torch.full_like(pi, lr / total))
                q = diagonal(part, i, before, after) if after[f"step.{i}"] > 0 else None
                if q is not None:
                    first_steps.append(2 / (sigma + rho * q))
                    momenta.append(rho * q / (sigma + rho * q))
                    dominated.append(sigma > rho * q)
        primal += alpha[i] * norm(d) ** 2
        dual += alpha[i] * norm(moved) ** 2
        duals += alpha[i] * norm(pis[i]) ** 2
    flat = [torch.cat(parts) for parts in pis]
    mean = sum(a * pi for a, pi in zip(alpha, flat, strict=True))
    spread = sum(a * float((pi - mean).norm()) ** 2 for a, pi in zip(alpha, flat, strict=True))
    w = norm([real(state["w"]) for state in old.values()])
    expected = {
        "iteration": float(opt.iteration),
        "primal_residual": math.sqrt(primal),
        "primal_relative": math.sqrt(primal) / w,
        "dual_residual": math.sqrt(dual),
        "dual_relative": math.sqrt(dual / duals),
        "weight_norm": w,
        "dual_norm": math.sqrt(duals),
    }
    if m > 1:
        expected["spread"] = math.sqrt(spread / duals)
    for name, parts in (("step", steps), ("first_step", first_steps), ("momentum", momenta)):
        if parts:
            values = torch.cat(parts)
            for end in ("min", "median", "max"):
                expected[f"{name}_{end}"] = float(getattr(values, end)())
    if dominated:
        expected["sigma_share"] = float(torch.cat(dominated).double().mean())
    return expected
