"""The results as Markdown: losses at equal tokens, times and state beside Muon's, all trials."""

from typing import Any

from recipes.language.check import check, format_half_way, format_loss
from recipes.language.results import best, by_optimizer, describe, muon, title
from recipes.recipe import Results
from recipes.tables import checks_table, markdown, provenance

__all__ = ["report"]


def report(results: Results) -> str:
    """Return all tables."""
    config = results["config"]
    runs = list(results["runs"].values())
    parameters = runs[0]["parameters"]
    parts = [
        f"Validation loss of a GPT-2 of {parameters / 1e6:,.1f}M parameters after "
        f"{config['steps']} steps of {config['sequences']} sequences "
        f"({runs[0]['tokens'][-1] / 1e6:,.1f}M tokens, {config['tokens']}). "
        "The **best trial** of every optimizer, one seed. Time of the optimizer's part of a step, "
        "and bytes of its state, also as multiples of Muon's. With m = 4 the data of a step are "
        "those of m = 1, in four batches; AdamW, Muon and SOAP average their gradients.",
        best_trials(results),
        "**All trials**:",
        all_trials(results),
        "**Statements**:",
        checks_table(check(results), "expected"),
        provenance(results),
    ]
    return "\n\n".join(parts) + "\n"


def best_trials(results: Results) -> str:
    lines = []
    for (_, batches), group in by_optimizer(results).items():
        run, against = best(group), muon(results, batches)
        difference = "-"
        if against and against["last"] and run["last"]:
            difference = f"{run['last'] - against['last']:+.3f}"
        per_parameter = run["state_bytes"] / run["parameters"]
        lines.append(
            [
                *(title(run), count_tried_settings(results, group), describe(run["settings"])),
                *(format_half_way(run), f"**{format_loss(run)}**", difference),
                with_ratio(run, against, "optimizer_ms", f"{run['optimizer_ms'] or 0:.2f}"),
                with_ratio(run, against, "state_bytes", f"{per_parameter:.2f}"),
                f"{run['step_ms']:,.0f}",
            ]
        )
    heads = ["", "trials", "settings", "half-way", "at the end", "less Muon's"]
    heads += ["optimizer, ms (x Muon)", "state, bytes per parameter (x Muon)", "whole step, ms"]
    return markdown(heads, lines)


def count_tried_settings(results: Results, runs: list[dict[str, Any]]) -> int:
    """Return the number of settings tried for these runs, also outside of the preset."""
    tried = {(t["label"], t["batches"]): t["tried"] for t in results["config"]["trials"]}
    labels = {(run["settings"]["label"], run["settings"]["batches"]) for run in runs}
    return sum(tried.get(key, 1) for key in labels)


def with_ratio(run: dict[str, Any], other: dict[str, Any] | None, name: str, text: str) -> str:
    if other is None or not other[name] or not run[name]:
        return text
    return f"{text} ({run[name] / other[name]:.2f})"


def all_trials(results: Results) -> str:
    lines = [
        [name, describe(run["settings"]), format_half_way(run), format_loss(run)]
        for name, run in results["runs"].items()
    ]
    lines += [[name, "", "", "not run"] for name in results.get("missing", [])]
    return markdown(["run", "settings", "half-way", "at the end"], lines)
