"""The comparison at three sizes: losses at equal tokens, over time, and memory.

Losses of the last weights are those of tokens that nothing was chosen on. Every statement names the
runs that it compares.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.language.config import label_prefix
from recipes.language.figure import COLOUR_OF
from recipes.language.model import TITLES as SIZE_TITLES
from recipes.language.optimizers import TITLES
from recipes.language.results import describe
from recipes.recipe import Check, Results
from recipes.style import DASHES, INK, figure_style
from recipes.tables import checks_table, markdown, provenance

__all__ = ["check", "draw", "report"]

AHEAD_OF_ADAMW, BEHIND_MUON = 0.2, 0.03  # nats, of NSISA with 124M parameters
MEMORY_SHARE = 1.02
MIB = 2**20

Runs = list[dict[str, Any]]
# Optimizers that share their colour with another one.
MARKED = ("shampoo", "adam_mini")
# Settings that were not chosen but given.
GIVEN = {"nsisa_script": "published script", "nsisa_paper": "the paper's row"}


def groups_of(results: Results) -> dict[str, dict[tuple[str, int], Runs]]:
    """Return the seeds of every setting: by model, then by label and number of batches."""
    groups: dict[str, dict[tuple[str, int], Runs]] = {}
    for run in results["runs"].values():
        settings = run["settings"]
        model = settings["model"]
        key = settings["label"].removeprefix(label_prefix(model)), settings["batches"]
        groups.setdefault(model, {}).setdefault(key, []).append(run)
    return groups


def tested(runs: Runs) -> float:
    """Return the mean loss over the seeds on the tokens to report on; infinite if one diverged."""
    losses = [float("inf") if run["test"] is None else run["test"] for run in runs]
    return statistics.fmean(losses)


def show(runs: Runs) -> str:
    """Return the mean, and how far the seeds are apart."""
    losses = [run["test"] for run in runs]
    if None in losses:
        return "diverged"
    if len(losses) == 1:
        return f"{losses[0]:.3f}"
    return f"{tested(runs):.3f} ({min(losses):.3f} to {max(losses):.3f})"


def fastest(runs: Runs) -> dict[str, Any]:
    """Return the seed with the shortest steps: what else a machine does can only add to them."""
    return min(runs, key=lambda run: run["step_ms"])


def title(label: str, batches: int, run: dict[str, Any]) -> str:
    """Return a title such as "NSISA, m = 4"."""
    words = [TITLES[run["settings"]["choice"]["name"]]]
    words += [GIVEN[label]] if label in GIVEN else []
    words += [f"m = {batches}"] if batches > 1 else []
    return ", ".join(words)


def check(results: Results) -> list[Check]:
    """Check all statements for which there are runs."""
    checks = []
    for model, groups in groups_of(results).items():
        size, runs = SIZE_TITLES.get(model, model), chosen(groups)
        checks += [*check_losses(model, size, runs), *check_memory(size, runs)]
    return checks


def chosen(groups: dict[tuple[str, int], Runs]) -> dict[str, Runs]:
    """Return the setting of every optimizer that is lowest on the tokens to choose on, m = 1."""
    found: dict[str, Runs] = {}
    for (label, batches), runs in groups.items():
        name = runs[0]["settings"]["choice"]["name"]
        if batches > 1 or label in GIVEN or runs[0]["last"] is None:
            continue
        if name not in found or runs[0]["last"] < found[name][0]["last"]:
            found[name] = runs
    return found


def check_losses(model: str, size: str, runs: dict[str, Runs]) -> Iterator[Check]:
    def compare(ours: str, theirs: str, claim: str, most: float) -> Iterator[Check]:
        if ours in runs and theirs in runs:
            a, b = tested(runs[ours]), tested(runs[theirs])
            here = f"{show(runs[ours])} and {show(runs[theirs])}"
            claim = f"{TITLES[ours]} {claim} {TITLES[theirs]}'s loss"
            yield Check(size, claim, here, a <= b + most)

    if model == "gpt2":
        at_least, at_most = f"at least {AHEAD_OF_ADAMW} below", f"at most {BEHIND_MUON} above"
        yield from compare("nsisa", "adamw", at_least, -AHEAD_OF_ADAMW)
        yield from compare("nsisa", "muon", at_most, BEHIND_MUON)
    else:
        yield from compare("nsisa", "adamw", "(paper) below", 0.0)
        yield from compare("nsisa", "muon", "(paper) below", 0.0)
    yield from compare("misa", "muon", "at most", 0.0)


def check_memory(size: str, runs: dict[str, Runs]) -> Iterator[Check]:
    for ours, theirs in (("nsisa", "adamw"), ("misa", "muon")):
        if ours in runs and theirs in runs:
            a, b = (runs[name][0]["peak_bytes"] for name in (ours, theirs))
            if a and b:
                yield Check(
                    size,
                    f"{TITLES[ours]}'s peak memory at most 2 % above {TITLES[theirs]}'s",
                    f"{a / MIB:,.0f} and {b / MIB:,.0f} MiB ({a / b - 1:+.1%})",
                    a <= MEMORY_SHARE * b,
                )


def report(results: Results) -> str:
    """Return all tables."""
    config = results["config"]
    tried = {trial["label"]: trial["tried"] for trial in config["trials"]}
    lines = []
    for model, groups in groups_of(results).items():
        muon = chosen(groups).get("muon")
        for (label, batches), runs in sorted(groups.items(), key=lambda item: tested(item[1])):
            run = fastest(runs)
            peak = run["peak_bytes"]
            behind = "-" if muon is None else f"{tested(runs) - tested(muon):+.3f}"
            lines.append(
                [
                    *(SIZE_TITLES.get(model, model), title(label, batches, run)),
                    *(describe(run["settings"]), tried.get(run["settings"]["label"], 1)),
                    *(f"**{show(runs)}**", behind),
                    "-" if run["optimizer_ms"] is None else f"{run['optimizer_ms']:.1f}",
                    f"{run['step_ms']:,.0f}",
                    f"{run['state_bytes'] / run['parameters']:.2f}",
                    f"{peak / MIB:,.0f}" if peak else "-",
                ]
            )
    heads = ["", "optimizer", "settings", "trials", "loss", "less Muon's", "optimizer, ms"]
    heads += ["whole step, ms", "state, bytes per parameter", "peak, MiB"]
    some = next(iter(results["runs"].values()))
    text = (
        f"Loss of the last weights after {config['steps']} steps of {config['sequences']} "
        f"sequences ({some['tokens'][-1] / 1e6:,.1f}M tokens, {config['tokens']}), on validation "
        "tokens other than those to choose on: the mean over the seeds and, with two, both. With "
        "m = 4 a step has the data of m = 1 in four batches; AdamW, Muon and the others average "
        "over them. Times are those of the fastest seed. "
        f"Peak memory is that of the whole training, in passes of {config['micro']} sequences."
    )
    parts = [text, markdown(heads, lines)]
    checks = check(results)
    if checks:
        parts += ["**Statements**:", checks_table(checks, "expected")]
    missing = results.get("missing", [])
    if missing:
        parts.append(f"Planned and not run: {', '.join(missing)}.")
    return "\n\n".join([*parts, provenance(results)]) + "\n"


def draw(results: Results, path: Path) -> None:
    """Draw validation loss against tokens and against time, a row per size, one seed each."""
    from matplotlib.figure import Figure

    models = groups_of(results)
    words = ("million tokens", "seconds of training")
    with figure_style("language"):
        figure = Figure((7.0, 0.7 + 2.8 * len(models)), layout="constrained")
        grid = figure.subplots(len(models), 2, squeeze=False)
        handles: dict[str, Any] = {}
        for row, (model, groups) in zip(grid, models.items(), strict=True):
            lasts: dict[str, float] = {}
            for (label, batches), runs in groups.items():
                run, step_ms = runs[0], fastest(runs)["step_ms"]
                name = run["settings"]["choice"]["name"]
                style = {"color": COLOUR_OF[name], "lw": 1.2}
                style["ls"] = "-" if batches == 1 and label not in GIVEN else DASHES
                style["marker"] = "." if name in MARKED else ""
                points = [i for i, loss in enumerate(run["val_loss"]) if loss is not None]
                losses = [run["val_loss"][i] for i in points]
                # Times are without compiling, which only the first run of a process does.
                tokens = [run["tokens"][i] / 1e6 for i in points]
                seconds = [run["step"][i] * step_ms / 1000 for i in points]
                for axes, x in zip(row, (tokens, seconds), strict=True):
                    (line,) = axes.plot(x, losses, **style)
                handles.setdefault(title(label, batches, run), line)
                lasts[label] = losses[-1]
            for axes, label_of_x in zip(row, words, strict=True):
                # Far above AdamW's curve there is nothing to tell the others apart by.
                best = min(lasts.values())
                top = max(best, *(end for name, end in lasts.items() if "adamw" in name))
                axes.set_ylim(best - 0.05, max(top + 0.1, best + 1))
                axes.set_xlabel(label_of_x)
                axes.grid(color=INK, alpha=0.2, lw=0.6)
                axes.spines[["top", "right"]].set_visible(False)
            row[0].set_ylabel("validation loss, nats")
            row[0].set_title(SIZE_TITLES.get(model, model), fontsize=9, loc="left")
        figure.legend(
            *(list(handles.values()), list(handles)),
            **{"loc": "outside upper center", "ncols": 5, "frameon": False},
        )
        figure.savefig(path, transparent=True, metadata={"Date": None})
