"""The resolvent of `Spectral`: its error beside that of an SVD in float32.

    python -m benchmarks.resolvent --out docs/results/resolvent_cpu.json
    python -m benchmarks.resolvent --device cuda --out docs/results/resolvent_cuda.json

Errors are relative, in the Frobenius norm, against an SVD in float64, for matrices with known
singular values, the largest of them one: means over four draws of the singular vectors, and of
those the worst, for sigma/rho from 0.1 to 1e-4. In brackets the worst ratio to the SVD's.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import environment
from torchpisa.algorithms.spectral import by_gram, by_polar, by_svd

TAUS = (1e-1, 1e-2, 1e-3, 1e-4)
SHAPES = ((16, 16), (48, 80), (200, 300))
CONDITIONS = (1.0, 10.0, 1e2, 1e4, 1e6, 1e8)
WAYS = {"svd": by_svd, "gram": by_gram, "polar": by_polar}
DRAWS = 4  # of which a mean is taken: a single error may happen to be small


def spectra(n: int) -> list[Tensor]:
    """Return spectra of several condition numbers, of deficient rank, and with an outlier."""
    values = [torch.logspace(0, -math.log10(c), n, dtype=torch.float64) for c in CONDITIONS]
    for rank in (n - 1, n // 2):
        values.append(torch.linspace(1, 0.5, n, dtype=torch.float64))
        values[-1][rank:] = 0
    for rest in (1e-2, 1e-4, 1e-6):
        values.append(torch.full((n,), rest, dtype=torch.float64))
        values[-1][0] = 1
    return values


def errors(device: str) -> list[dict[str, Any]]:
    """Return by tau the largest error of each method, and the largest ratio to that of the SVD."""
    torch.manual_seed(0)
    rows = []
    for tau in TAUS:
        worst = dict.fromkeys(WAYS, 0.0)
        ratio = dict.fromkeys(WAYS, 0.0)
        for n, k in SHAPES:
            for s in spectra(n):
                u, v = (torch.linalg.qr(torch.randn(DRAWS, i, n).double())[0] for i in (n, k))
                r = ((u * s) @ v.mT).float().to(device)
                exact = by_svd(r.double(), tau, 1.0)
                by_method = {
                    name: float((way(r, tau, 1.0).double() - exact).norm() / exact.norm())
                    for name, way in WAYS.items()
                }
                for name, error in by_method.items():
                    worst[name] = max(worst[name], error)
                    ratio[name] = max(ratio[name], error / by_method["svd"])
        rows.append({"tau": tau, "error": worst, "ratio": ratio})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs/results/resolvent_cpu.json"))
    args = parser.parse_args()
    result = {
        "hardware": environment.hardware(args.device),
        "versions": environment.versions(),
        "errors": errors(args.device),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["errors"]:
        cells = (f"{name} {row['error'][name]:.1e} ({row['ratio'][name]:.2f})" for name in WAYS)
        print(f"{row['tau']:g}: {', '.join(cells)}")


if __name__ == "__main__":
    main()
