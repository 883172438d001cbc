"""Tables and the picture of overlap from a saved result of `python -m benchmarks distributed`.

    python -m benchmarks distributed-figure docs/results/distributed.json

Beside FILE it writes `distributed.md`, what was measured, `distributed_overlap.svg`, which that
shows, and `scaling.md`, what the model of `scaling.py` makes of many nodes.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.distributed import scaling
from benchmarks.distributed.overlap import Span, waited_ms
from benchmarks.distributed.scaling import NETWORKS, NODES
from benchmarks.saved import read_saved
from benchmarks.shapes import MODELS, parameters
from benchmarks.step_figure import INK, OTHERS, OURS

__all__ = ["draw", "main", "measured", "on_paper"]

WIRE = "#d9822b"  # readable on white and on black, as the others
ON_PAPER = ("gpt2-124m", "gpt2-1.5b")
Result = dict[str, Any]


def measured(result: Result, picture: str) -> str:
    """Return the measurements as Markdown."""
    config, hardware = result["config"], result["hardware"]
    size = config["size"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    first = result["runs"][0]["rows"][0]
    parts = [
        f"{first['parameters'] / 1e6:.1f}M parameters in {first['tensors']} tensors "
        f"({size['layers']} layers of width {size['width']}), batches of {size['batch']} x "
        f"{size['context']} per process, float32, {4 * first['parameters']:,} bytes of gradients. "
        f"{hardware['cpu']}, {hardware['cores']} cores for all processes, one thread each; gloo on "
        f"one host; {versions}. Median of {config['repeats']} turns."
    ]
    for run in result["runs"]:
        parts += [f"### {run['processes']} processes", _rows(run), _line(run)]
    traced = result["runs"][0]
    waits = [
        f"{waited:.0f} of {under_way:.0f} ms ({times['name']})"
        for times in traced["overlap"]
        for under_way, waited in [waited_ms(times)]
    ]
    parts += [
        "### Overlap",
        f"![One step of two ways to train, by what happens when]({picture})",
        f"One step with {traced['processes']} processes as the first of them saw it: of five the "
        "one of median length, under torch's profiler, which slows it down. A thin line is an "
        "all-reduce that waits for one of gloo's two threads. While all-reduces are under way, "
        f"the thread that trains waits {' and '.join(waits)}; otherwise it works.",
    ]
    return "\n\n".join(parts) + "\n"


def _rows(run: Result) -> str:
    heads = [
        *("", "ms", "interquartile range", "ratio of medians", "median of ratios", "CPU ms"),
        *("bytes handed to all-reduces", "all-reduces", "bytes on the wire"),
        "state, bytes per parameter",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    for row in run["rows"]:
        ours = row["name"].startswith("torchpisa")
        wire = row["wire_bytes"]
        cells = [
            f"**{row['name']}**" if ours else row["name"],
            *(f"{row[key]:.0f}" for key in ("ms", "iqr_ms")),
            *(f"{row[key]:.2f}" for key in ("ratio_of_medians", "median_of_ratios")),
            f"{row['cpu_ms']:.0f}",
            f"{row['handed_bytes']:,.0f}",
            f"{row['all_reduces']:.3g}",
            "–" if wire is None else f"{wire:,.0f}",
            f"{row['state_bytes_per_parameter']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _line(run: Result) -> str:
    """Return the latency and the speed of this host's loopback as text."""
    sums = run["all_reduce"]
    low, high = sums["bytes"][0], sums["bytes"][-1]
    return (
        rf"All-reduces of {low:,} to {high:,} bytes: \(\alpha\) = {sums['alpha_s'] * 1e6:.0f} µs, "
        rf"\(\beta\) = {sums['beta_s_per_byte'] * 1e9:.2f} ns per byte "
        f"({1e-9 / sums['beta_s_per_byte']:.2f} GB/s), which miss no size by more than "
        f"{sums['largest_error']:.0%}."
    )


def on_paper() -> str:
    """Return the model's predictions for many nodes as Markdown; none of it was measured."""
    accelerator = scaling.ACCELERATOR
    parts = [
        f"Assumed: {accelerator.flop_per_s / 1e12:.0f} TFLOP/s per rank, one rank per node, "
        f"{accelerator.tokens:,} tokens per rank and backward pass, the links of each table. "
        "Milliseconds per backward pass, and in brackets the share of it that is not waiting."
    ]
    columns: dict[str, dict[str, Any]] = {
        "DDP, float32": {"line": False},
        "attach, float32": {},
        "attach, bfloat16": {"item_bytes": 2},
        "attach, float32, m=4": {"batches": 4},
        "attach, bfloat16, m=4": {"item_bytes": 2, "batches": 4},
        "attach, float32, trees": {"tree": True},
    }
    for model in ON_PAPER:
        shapes = MODELS[model]()
        compute = sum(scaling.compute_s(model))
        sent = 4 * parameters(shapes) / 1e6
        parts.append(
            f"### {model}, {parameters(shapes) / 1e6:,.0f}M parameters\n\n{1e3 * compute:.0f} ms "
            f"of computing; {sent:,.0f} MB of gradients in {len(scaling.buckets(model))} buckets."
        )
        for name, network in NETWORKS.items():
            lines = [f"| {name} | {' | '.join(columns)} |", "|--:" * (len(columns) + 1) + "|"]
            for nodes in NODES:
                cells = [_cell(model, nodes, network, compute, **kw) for kw in columns.values()]
                lines.append(f"| {nodes:,} nodes | {' | '.join(cells)} |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cell(
    model: str, nodes: int, network: scaling.Network, compute: float, tree: bool = False, **kw: Any
) -> str:
    seconds = scaling.step_s(model, nodes, network._replace(tree=tree), **kw)
    return f"{1e3 * seconds:,.0f} ({compute / seconds:.0%})"


def draw(run: Result, path: Path) -> None:
    """Draw one panel per way to train, with one lane per kind of work."""
    import matplotlib
    from matplotlib.figure import Figure

    # Glyphs as text, no date and fixed ids: small, and the same bytes for the same results.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "overlap", "font.size": 8}
    settings |= {f"{part}.color": INK for part in ("text", "xtick", "ytick")}
    settings |= {"axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK}
    heights = [len(_lanes(times)) + 1 for times in run["overlap"]]
    with matplotlib.rc_context(settings):
        figure = Figure((7.8, 0.5 + 0.26 * sum(heights)), layout="constrained")
        shape = {"height_ratios": heights, "hspace": 0.1}
        panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=shape)
        for axes, times in zip(panels.flat, run["overlap"], strict=True):
            panel(axes, times)
        panels.flat[-1].set_xlabel("ms from the start of the step")
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _lanes(times: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return label and colour of each lane that is used; all-reduces come last."""
    ours = times["name"].startswith("torchpisa")
    lanes = {
        "forward": ("forward", OTHERS),
        "backward": ("backward", OTHERS),
        "local": ("local steps", OURS),
        "waiting": ("waiting", "none"),
        "step": ("consensus", OURS) if ours else ("step", OTHERS),
        "all_reduces": ("all-reduces", WIRE),
    }
    return {name: lane for name, lane in lanes.items() if times[name]}


def panel(axes: Any, times: dict[str, Any]) -> None:
    """Draw the lanes of one step."""
    lanes = _lanes(times)
    for place, (name, (_, colour)) in enumerate(lanes.items()):
        if name != "all_reduces":
            edge = INK if colour == "none" else colour
            _bars(axes, times[name], place, facecolor=colour, edgecolor=edge, lw=0.8)
    for track, flight in _tracks(times["all_reduces"]):
        place = len(lanes) - 1 + track
        axes.plot((flight["called"], flight["begun"]), (place, place), color=WIRE, lw=0.8)
        _bars(axes, [(flight["begun"], flight["done"])], place, 0.36, color=WIRE)
        if flight["done"] - flight["begun"] > 0.06 * times["total"]:
            middle = (flight["begun"] + flight["done"]) / 2
            text = {"color": "white", "fontsize": 6.5, "ha": "center", "va": "center_baseline"}
            axes.text(middle, place, f"{flight['bytes'] / 1e6:.1f} MB", **text)
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes.values()])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_title(f"{times['name']}, {times['total']:.0f} ms", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _bars(axes: Any, spans: Sequence[Span], place: float, height: float = 0.7, **how: Any) -> None:
    axes.broken_barh(
        [(start, end - start) for start, end in spans], (place - height / 2, height), **how
    )


def _tracks(flights: list[dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Return offsets from the middle of the lane for all-reduces, which run two at a time."""
    busy_until = 0.0
    for flight in flights:
        above = busy_until <= flight["begun"]
        if above:
            busy_until = flight["done"]
        yield -0.2 if above else 0.2, flight


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks distributed-figure", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    entries = {"config": dict, "hardware": dict, "versions": dict, "runs": list}
    try:
        result = read_saved("FILE", args.file, "distributed --out", **entries)
    except ValueError as error:
        parser.error(str(error))
    folder = args.file.parent
    picture = folder / "distributed_overlap.svg"
    draw(result["runs"][0], picture)
    texts = {
        folder / "distributed.md": measured(result, f"results/{picture.name}"),
        folder / "scaling.md": on_paper(),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(*(picture, *texts), sep="\n")
