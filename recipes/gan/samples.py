"""Combine saved pictures of several runs: a row per kind of GAN, a column per optimizer.

python -m recipes.gan.samples runs/short/samples docs/results/gan_samples.jpg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from recipes.curves import display_name
from recipes.gan.config import KINDS, PRESETS, plan
from recipes.style import figure_style

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    parser = argparse.ArgumentParser("python -m recipes.gan.samples", description=__doc__)
    parser.add_argument("folder", type=Path, help="that of --samples")
    parser.add_argument("picture", type=Path, help="file to write")
    parser.add_argument("--preset", choices=list(PRESETS), default="short")
    args = parser.parse_args(argv)
    config = PRESETS[args.preset]
    pictures: dict[tuple[str, str], Path] = {}  # of the first seed that is there
    for name, run in plan(config).items():
        path = args.folder / f"{name}.png"
        if path.is_file():
            pictures.setdefault((run.kind, run.choice.label), path)
    if not pictures:
        parser.error(f"folder must hold pictures of the preset's runs, got {args.folder}")
    kinds = list(dict.fromkeys(kind for kind, _ in pictures))
    labels = list(dict.fromkeys(label for _, label in pictures))
    with figure_style("samples"):
        figure = Figure((2.4 * len(labels), 2.6 * len(kinds)), layout="constrained")
        grid = figure.subplots(len(kinds), len(labels), squeeze=False)
        for row, kind in zip(grid, kinds, strict=True):
            for axes, label in zip(row, labels, strict=True):
                axes.axis("off")
                if (kind, label) in pictures:
                    with Image.open(pictures[kind, label]) as picture:
                        axes.imshow(picture)
                    axes.set_title(f"{KINDS[kind]}, {display_name(label)}", fontsize=8)
        figure.savefig(args.picture, dpi=130)
    print(args.picture)


if __name__ == "__main__":
    main()
