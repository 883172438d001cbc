"""The tables of the pages are those of the saved results."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks import engines, first_round, uneven_parts
from benchmarks.defaults import report as defaults
from benchmarks.defaults.tasks import TASKS
from recipes.budgets.config import TRIALS
from torchpisa.presets import PAPER_TABLE, PRESETS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")

NAMES_OF_LANGUAGE = [("MISA", "MISA"), ("Muon + AdamW", "Muon"), ("NSISA", "NSISA")]
NAMES_OF_LANGUAGE += [("AdamW", "AdamW")]


def runs(*names: str) -> list[dict[str, Any]]:
    return [run for name in names for run in saved(name)["runs"]]


def saved(name: str) -> dict[str, Any]:
    path = ROOT / "docs" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def words(page: str) -> str:
    """The text of a page, with a space for every break."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_uneven_parts() -> None:
    plain = uneven_parts.table(runs("uneven_parts")).replace("**", "")
    assert plain in PAGE.replace("**", "")


def test_defaults() -> None:
    assert defaults.overview(runs("defaults")) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_gpt2() -> None:
    """The README's table has cells of docs/results/language_nano.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, shown in (("AdamW", "AdamW"), ("Muon", "Muon + AdamW"), ("MISA", "MISA")):
        *_, loss, _, time, _, state, _ = cells("language_nano", f"Nano | {name}")
        assert f"| {shown} | {loss.strip('*')} | {state} | {time} ms |" in readme


def cells(page: str, first: str) -> list[str]:
    """The cells of the first row of a saved table that begins so."""
    text = (ROOT / "docs" / "results" / f"{page}.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip(" *") for cell in line.split("|")[1:-1]]


def test_overview() -> None:
    """The first table of docs/results.md says what the tables below it say."""
    ends = [
        f"{name} {cells('language_nano', f'Nano | {key}')[4].split()[0]}"
        for name, key in NAMES_OF_LANGUAGE
    ]
    assert f"| {', '.join(ends)} |" in PAGE
    misa, adamw = (cells("lightbench", name)[1].split(" (")[0] for name in ("misa", "adamw-0.001"))
    assert f"| MISA solves {misa} tasks, AdamW {adamw.split()[0]} |" in PAGE
    text = (ROOT / "docs" / "results" / "defaults.md").read_text(encoding="utf-8")
    better = [
        int(line.split("|")[4].split()[0])
        for line in text.splitlines()
        if line.startswith(("| MISA | choose |", "| MISA | judge |"))
    ]
    constant, cosine = sum(better[:2]), sum(better[2:4])
    assert f"better than AdamW at 1e-3 on {constant} and {cosine} of 18 tasks |" in PAGE


def test_smaller_rate() -> None:
    """Where MISA gains by AdamW's rate, and how often it is then ahead of AdamW."""
    scores = defaults.Scores(runs("defaults"))
    ahead, gains = {}, {}
    for schedule in ("constant", "cosine"):
        ahead[schedule] = sum(scores.ratio(t, "misa-0.001", schedule) < 1 for t in TASKS)
        gains[schedule] = {t for t in TASKS if scores.ratio(t, "misa-0.001", schedule, "misa") < 1}
    text = words("docs/results.md")
    assert f"than AdamW on {ahead['constant']} tasks with a constant schedule and" in text
    assert f"schedule and on {ahead['cosine']} with a cosine. It gains" in text
    assert gains == {"constant": {"gan"}, "cosine": {"gan", "imbalanced"}}
    normalised = {
        name
        for name, task in TASKS.items()
        for module in task.make(0).modules
        if any(type(part).__name__.endswith(("Norm", "Norm2d")) for part in module.modules())
    }
    assert normalised == {"cnn", "transformer"}


def test_finetuning() -> None:
    """The first table of docs/finetune.md is that of the results."""
    page = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    by_label = {
        run["settings"]["choice"]["label"]: dict(zip(run["epoch"], run["test_loss"], strict=True))
        for run in saved("language_finetune")["runs"].values()
    }
    titles = {
        "adamw_published": "AdamW, published setting",
        "sisa_row": "SISA, the paper's row",
        "misa_lr0.004": "MISA, lr 4e-3",
        "adamw_lr0.001": "AdamW, lr 1e-3",
        "sisa_row_scheme2": "SISA, the paper's row with Scheme II",
        "sisa_lr0.001": "SISA, lr 1e-3",
    }
    for label, title in titles.items():
        shown = [f"{by_label[label][epoch]:.2f}" for epoch in (2, 5, 15)]
        assert f"| {title} | {' | '.join(shown)} |" in page, shown
    pretrained = next(iter(saved("language_finetune_pretraining")["runs"].values()))
    assert f"validation loss {pretrained['val_loss'][-1]:.2f})" in page


def test_stages() -> None:
    """Pages quote the comparison of stages on tokens that chose nothing."""
    runs = saved("language_stages")["runs"].values()
    losses: dict[str, list[float]] = {}
    for run in runs:
        losses.setdefault(run["settings"]["label"], []).append(run.get("test"))
    names = ("misa", "muon", "muon_rest_misa", "normuon", "misa_whiten", "misa_both_sides")
    misa, muon, rest, normuon, whitened, both, soap = (
        statistics.fmean(losses[f"{name}_decay"]) for name in (*names, "soap_muon")
    )
    files = ("README.md", "docs/language.md", "docs/misa.md", "docs/results.md")
    readme, language, page, results = map(words, files)
    ahead, of_rest, of_rows = f"{muon - misa:.3f}", f"{rest - misa:.3f}", f"{normuon - misa:.3f}"
    assert f"MISA ends {ahead} below Muon, but only {of_rest} below a Muon that" in readme
    assert all(len(losses[f"{name}_decay"]) == 3 for name in names[:3])  # as the README says
    assert f"MISA ends {ahead} below Muon and {of_rest} below Muon with MISA's rule" in language
    assert f"MISA ends {ahead} below Muon, and {of_rest} below a Muon that" in page
    assert f"{ahead} over Muon with AdamW, {of_rows} over NorMuon" in page
    assert f"and {of_rest} over Muon with MISA's rule for the embedding" in page
    assert f"it ends {soap - both:.3f} below SOAP-Muon" in page
    gain, gain_of_both = f"{misa - whitened:.3f}", f"{misa - both:.3f}"
    assert f"whitening ends {gain} lower than MISA" in page
    assert f"both sides {gain_of_both} lower" in page
    assert f"MISA {misa:.3f}, Muon {muon:.3f}, Muon with MISA's rule for the embedding" in results
    assert f"embedding {rest:.3f}; whitened {whitened:.3f}, for" in results
    assert f"Muon gains {muon - rest:.3f} when MISA's rule" in results
    assert f"ends {of_rest} above MISA" in results
    assert f"(NorMuon, two seeds) gain {muon - normuon:.3f}" in results
    assert f"gains {gain}** over MISA" in results
    assert f"both eigenbases {gain_of_both} (one seed)" in results
    first = {run["settings"]["label"]: run for run in runs if run["settings"]["seed"] == 0}
    times = [
        first[f"misa_{stage}_decay"]["optimizer_ms"] / first["misa_decay"]["optimizer_ms"]
        for stage in ("whiten", "both_sides")
    ]
    assert [round(time) for time in times] == [7, 38]
    assert "for seven and 38 times the optimizer's time" in page
    assert sum(run["settings"]["label"] == "misa" for run in runs) == 1
    decay = first["misa"]["last"] - first["misa_decay"]["last"]
    assert f"ends {decay:.3f} lower than no decay (one seed)" in page


def test_time_of_misas_kernels() -> None:
    """The pages on MISA and speed quote the comparison of stages."""
    ours, muon = (cells("language_stages", name) for name in ("MISA", "Muon"))
    (time, step), (muon_time, muon_step) = (row[5:7] for row in (ours, muon))
    for page in ("misa", "speed"):
        text = words(f"docs/{page}.md")
        assert f"{time} ms of" in text
        assert f"{float(muon_time):.0f} of {muon_step}" in text or (
            f"{float(muon_time):.0f} ms of {muon_step}" in text
        )
        assert step in text


def test_time_of_a_step() -> None:
    """The first table of docs/speed.md, and what README and docs/misa.md quote from it."""
    columns = []
    for model in ("124m", "355m", "1.5b"):
        step, matrices = (
            {row["name"]: row for row in saved(f"{kind}_cuda_gpt2-{model}")["rows"]}
            for kind in ("step", "matrices")
        )
        others = {
            name: row["ms"]
            for name, row in matrices.items()
            if not name.startswith("torchpisa")
            and not row["error"]
            and "vector" not in row["kinds"]
        }
        if model == "124m":
            assert len({name.split()[0] for name in others}) == 5
        column = [step["torch AdamW, fused"]["ms"], step["torchpisa SISA, fused"]["ms"]]
        ours = ("MISA, all parameters", "MISA, defaults", "NSISA, defaults")
        column += [matrices[f"torchpisa {name}"]["ms"] for name in ours]
        columns.append([*column, min(others.values()), others["torch Muon"]])
    names = ["torch AdamW, `fused=True`", "SISA with sigma and rho", "MISA"]
    alone = ["MISA", "NSISA", "the fastest Muon of five other libraries", "torch Muon"]
    names += [f"hidden matrices only: {name}" for name in alone]
    speed, readme, misa = map(words, ("docs/speed.md", "README.md", "docs/misa.md"))
    for name, *times in zip(names, *columns, strict=True):
        assert f"| {name} | {' | '.join(f'{ms:.3g}' for ms in times)} |" in speed
    small, fastest = columns[0][3], columns[0][5]
    assert f"alone MISA takes {small:.1f} ms. The fastest Muon of the five libraries" in readme
    assert f"that we timed takes {fastest:.1f} ms ([all of them" in readme
    assert f"MISA takes {small:.1f} ms, the fastest Muon of five libraries {fastest:.1f} ms" in misa


def test_time_of_elementwise_steps() -> None:
    """docs/speed.md has the ratios to AdamW's foreach of the saved runs."""
    text = words("docs/speed.md")

    def ratios(name: str) -> dict[str, float]:
        rows = saved(f"step_{name}")["rows"]
        return {
            row["name"]: row["ratios"]["torch AdamW, foreach"] for row in rows if not row["error"]
        }

    cpu, gpu, large = map(ratios, ("cpu_small", "cuda_small", "cpu_gpt2-50m"))
    rows = {
        "MISA": "MISA, all parameters",
        "SISA with sigma and rho, `fused=True`": "SISA, fused",
        "SISA with sigma and rho, which also looks for infinities": "SISA, defaults",
        "SISA, sigma follows the gradients": "SISA, sigma follows gradients",
    }
    for shown, name in rows.items():
        cells = (f"{of_device[f'torchpisa {name}']:.2f}" for of_device in (cpu, gpu))
        assert f"| {shown} | {' | '.join(cells)} |" in text
    adamw = (of_device["torch AdamW, fused"] for of_device in (cpu, gpu))
    shares = "takes {:.2f} of the time of its own `foreach` on the CPU, {:.2f} on the H200."
    assert shares.format(*adamw) in text
    foreach, follows = (
        large[f"torchpisa SISA, {name}"] for name in ("foreach", "sigma follows gradients")
    )
    assert f"takes {foreach:.2f} of the time of AdamW's and {follows:.2f} where sigma" in text
    large_rows = {
        row["name"]: row for row in saved("step_cpu_gpt2-50m")["rows"] if not row["error"]
    }
    foreach_ms, follows_ms, fused_ms = (
        large_rows[f"torchpisa SISA, {name}"]["ms"]
        for name in ("foreach", "sigma follows gradients", "fused")
    )
    assert 0.2 < fused_ms / foreach_ms < 0.3  # "a quarter"
    adamws = [row["beside_ms"]["torch AdamW, foreach"] for row in large_rows.values()]
    assert f"{min(adamws):.0f} to {max(adamws):.0f} ms from one set" in text
    assert f"ours takes {foreach_ms:.0f} and {follows_ms:.0f}." in text


def last_rounds(name: str, algorithm: str, cell: str) -> str:
    """The mean over seeds of the accuracy in the last round, as pages have it."""
    found = [
        run["last"]
        for key, run in saved(name)["runs"].items()
        if key.startswith(f"{cell}_{algorithm}_seed")
    ]
    assert len(found) == 3
    return f"{sum(found) / 3:.1f} %"


def test_which_federated_algorithm() -> None:
    """The answers on docs/federated.md have the numbers of the saved runs."""
    text = " ".join((ROOT / "docs" / "federated.md").read_text(encoding="utf-8").split())
    digits = "heterogeneity_rivals_digits"
    adagrad, fedavg = (last_rounds(digits, a, "digits_1label") for a in ("fedadagrad", "fedavg"))
    assert f"FedAdagrad ends at {adagrad} and FedAvg at {fedavg}." in text

    def equal_costs(results: str, cell: str, *algorithms: str) -> list[str]:
        return [last_rounds(results, name, f"{cell}_1label") for name in algorithms]

    names = {"MNIST": "mnist", "CIFAR-10": "cifar10", "Fashion-MNIST": "fashion_mnist"}
    for shown, name in names.items():
        misa, fedavg = equal_costs("budgets", name, "misa", "fedavg")
        assert f"{shown} ({misa}, FedAvg {fedavg})" in text
    few = equal_costs("budgets_digits", "digits", "misa_local", "misa", "fedavg")
    assert "LocalMISA ends at {}, MISA at {}, FedAvg at {}.".format(*few) in text
    adult = dict(zip(TRIALS, cells("budgets", "Adult, 1 label")[2:], strict=False))
    means = {name: float(shown.strip("*").split()[0]) for name, shown in adult.items()}
    assert f"MISA's {means['misa']:.1f} %" in text
    assert max(abs(mean - means["misa"]) for mean in means.values()) <= 0.9


def test_engines() -> None:
    """The table beside other engines is that of the saved run, in which all did the same."""
    result = saved("federated_engines")
    page = (ROOT / "docs" / "federated-results.md").read_text(encoding="utf-8")
    assert engines.table(result) in page
    for rows in result["cases"].values():
        assert set(rows) == set(engines.ENGINES)
        assert max(row["distance"] for row in rows.values()) < 1e-3
        accuracies = [row["accuracy"] for row in rows.values()]
        assert max(accuracies) - min(accuracies) < 0.3
        # What the text below the table says.
        at_once, in_turn, pfl, strategy, flower = (rows[n]["cpu_seconds"] for n in engines.ENGINES)
        assert at_once < min(pfl, in_turn) < max(pfl, in_turn) < flower < strategy
        assert (in_turn > 1.05 * pfl) == (rows is result["cases"]["10 clients"])


def test_first_round() -> None:
    """The tables on SISA without sigma and rho are those of the saved runs."""
    result = saved("first_round")
    page = (ROOT / "docs" / "federated-results.md").read_text(encoding="utf-8")
    assert first_round.table(result) in page
    assert first_round.digits_table(result) in page


def test_animation() -> None:
    """The text below the animation on docs/federated.md has its numbers."""
    text = " ".join((ROOT / "docs" / "federated.md").read_text(encoding="utf-8").split())
    curves = {name: run["accuracy"] for name, run in saved("one_label")["runs"].items()}
    first = {
        name: next(k for k, value in enumerate(curve) if value >= 90)
        for name, curve in curves.items()
    }
    assert (
        f"after {first['MISA']} rounds, SISA after {first['SISA']}, Scaffold after "
        f"{first['Scaffold']}, FedAvg after {first['FedAvg']}."
    ) in text


def test_settings_of_the_paper() -> None:
    """docs/paper.md has every row of the hyperparameter table as the presets have it."""
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    for name, row in PAPER_TABLE.items():
        gamma = "WarmDown" if row.warm_down else "1"
        if row.gamma is not None:
            gamma = f"{row.gamma[0]:g} / {row.gamma[1]}"
        numbers = [f"{row.sigma:g}", f"{row.rho:g}", gamma]
        numbers += [f"{value:g}" for value in (row.mu, row.consensus_decay, row.epochs)]
        numbers += [f"{value:g}" for value in (row.batches, row.rounds)]
        numbers += [str(row.samples)]
        shown = name.removeprefix("cifar10/")
        assert f"| `paper/{shown}` | {' | '.join(numbers)} |\n" in page, name
        assert PRESETS[f"paper/{shown}"].settings["eps"] == 1e-8
    assert "the presets one of 1e-8." in page
    settings = PRESETS["paper/gpt2"].settings
    assert f"sigma {settings['sigma']:g}, rho {settings['rho']:g}" in page
    assert f"`batches={settings['batches']}`" in page
    assert f"`dual_decay={settings['dual_decay']}`" in page
    assert f"Nesterov momentum of {settings['momentum']}" in page
    assert settings["nesterov"]
    assert settings["aspect_scaling"]


def test_tables_are_shown_whole() -> None:
    """Where a page shows the first table of a file, the rest of the file follows further down."""
    shown = [
        (path.stem, text, name, int(last))
        for path in sorted((ROOT / "docs").glob("*.md"))
        for text in [path.read_text(encoding="utf-8")]
        for name, last in re.findall(r'^--8<-- "docs/results/(\w+)\.md:1:(\d+)"$', text, re.M)
    ]
    assert len(shown) > 1
    for where, text, name, last in shown:
        lines = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8").splitlines()
        assert lines[last - 1].startswith("|"), (where, name)
        assert not lines[last], (where, name)
        assert f'    --8<-- "docs/results/{name}.md:{last + 2}:"\n' in text, (where, name)


def page(name: str) -> str:
    """The text of a page, in one line."""
    return " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())


def means(name: str, column: str, *keys: str) -> dict[str, float]:
    """The means over seeds of what saved runs end with, by their settings and optimizer."""
    found: dict[str, list[float]] = {}
    for run in saved(name)["runs"].values():
        settings = run["settings"]
        key = "_".join(str(settings[key]) for key in keys)
        found.setdefault(f"{key}_{settings['choice']['label']}", []).append(run[column])
    return {key: sum(values) / len(values) for key, values in found.items()}


def test_images() -> None:
    """The accuracies in docs/vision.md are those of the saved runs."""
    text = page("vision")
    short = {key: f"{value:.1f}" for key, value in means("vision", "last", "model").items()}
    resnet, vgg = (
        {key.removeprefix(f"{model}_"): value for key, value in short.items() if model in key}
        for model in ("resnet34", "vgg11")
    )
    order = ["misa", "muon", "sgd", "adam", "sisa", "adamw", "adabelief"]
    assert sorted(resnet, key=resnet.__getitem__, reverse=True) == order
    first = f"({resnet['misa']} %; Muon has {resnet['muon']}, SGD {resnet['sgd']}, one seed each)"
    assert first in text
    assert f"it ends at {resnet['sisa']} %, below SGD and Adam ({resnet['adam']}) and" in text
    assert f"AdamW ({resnet['adamw']}) and AdaBelief ({resnet['adabelief']})" in text
    adams_rate = vgg.pop("misa_adam_rate")
    assert f"({adams_rate} %; SGD comes next with {vgg['sgd']}, means of three)" in text
    assert max(vgg, key=vgg.__getitem__) == "sgd"
    assert (
        f"({vgg['sisa']} %) ends above Adam ({vgg['adam']}) and AdamW ({vgg['adamw']}), below "
        f"AdaBelief ({vgg['adabelief']}) and SGD ({vgg['sgd']})"
    ) in text
    assert f"ends at {vgg['misa']} %; it loses ground" in text
    readme = words("README.md")
    assert f"ends at {vgg['misa']} % with it, at {adams_rate} % with `lr=1e-3`, and at" in readme
    assert f"and at {vgg['adam']} % with Adam" in readme
    both = f"gets {vgg['misa']} % with the defaults and {adams_rate} % with an `lr` of 1e-3"
    assert both in page("misa")
    assert f"as Muon does ({vgg['muon']} at the end)" in text
    sisa, sgd = means("vision_paper", "last", "model").values()
    assert f"ends at {sisa:.1f} %, SGD at {sgd:.1f} %, one seed each" in text
    best_sisa, best_sgd = means("vision_paper", "best", "model").values()
    assert f"which is {best_sisa:.1f} and {best_sgd:.1f} % here" in text
    results = saved("vision")
    count, missing = len(results["runs"]), len(results["missing"])
    assert (count + missing, missing) == (38, 7)
    assert "Of the plan's 38 runs seven are missing" in text


def test_gans() -> None:
    """The distances in docs/gan.md are those of the saved runs."""
    last = means("gan", "last", "kind")
    lower = [round(100 * (1 - last[f"{k}_sisa"] / last[f"{k}_adam"])) for k in ("wgan_gp", "wgan")]
    text = page("gan")
    assert f"lower by {lower[0]} % (WGAN-GP) and {lower[1]} % (WGAN), means of three" in text
    runs = saved("gan")["runs"]
    first, second = (
        sorted(run["last"] for name, run in runs.items() if name.startswith(f"{kind}_adam"))
        for kind in ("wgan_gp", "wgan")
    )
    assert (
        f"with one seed each: it ends at {last['wgan_gp_misa_adam_rate']:.0f}, where Adam's three "
        f"seeds end between {first[0]:.0f} and {first[2]:.0f}, and at "
        f"{last['wgan_misa_adam_rate']:.0f}, where Adam's end between {second[0]:.0f} and "
        f"{second[2]:.0f}."
    ) in text
    on_cpu = {name for name, run in runs.items() if run["hardware"]["gpu"] is None}
    assert on_cpu == {
        *("wgan_sisa_e10_seed2", "wgan_misa_e10_seed1", "wgan_misa_e10_seed2"),
        *("wgan_adam_e10_seed2", "wgan_misa_adam_rate_e10_seed0"),
        "wgan_gp_misa_adam_rate_e10_seed0",
    }


def test_lstms() -> None:
    """The perplexities in docs/rnn.md are those of the saved runs."""
    test = {key: f"{value:.1f}" for key, value in means("rnn", "test", "layers").items()}
    text = page("rnn")
    assert (
        f"SISA {test['1_sisa']}, below Adam ({test['1_adam']}) and AdaBelief "
        f"({test['1_adabelief']})"
    ) in text
    assert f"MISA has {test['1_misa']};" in text
    assert f"no momentum, has {test['1_sgd']};" in text
    assert f"SISA {test['2_sisa']}, MISA {test['2_misa']}, Adam {test['2_adam']}." in text
    assert f"MISA {test['3_misa']}, Adam {test['3_adam']}, SISA {test['3_sisa'][:3]}." in text
    runs = saved("rnn")["runs"]
    assert [value > 700 for value in runs["lstm3_sisa_e8_seed0"]["valid_perplexity"]] == [
        *[True] * 5,
        *[False] * 3,
    ]
    first = {key: run["valid_perplexity"] for key, run in runs.items() if key.startswith("lstm1_")}
    best = [min(first, key=lambda key, at=at: first[key][at]) for at in range(20)]
    assert best == ["lstm1_misa_e20_seed0"] * 12 + ["lstm1_sgd_e20_seed0"] * 8


def test_resnet() -> None:
    """The README's line on ResNet-34 has the means of docs/results/vision.json."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    last: dict[str, list[float]] = {}
    for run in saved("vision")["runs"].values():
        if run["settings"]["model"] == "resnet34":
            last.setdefault(run["settings"]["choice"]["label"], []).append(run["last"])
    means = {label: f"{sum(found) / len(found):.1f}" for label, found in last.items()}
    assert set(means) == {"misa", "muon", "sgd", "adam", "sisa", "adamw", "adabelief"}
    assert (
        f"MISA with default settings {means['misa']} %, Muon {means['muon']} %, "
        f"SGD with momentum {means['sgd']} %, Adam {means['adam']} %, SISA {means['sisa']} %, "
        f"AdamW {means['adamw']} %"
    ) in readme


def test_equal_costs() -> None:
    """The README's sentence on clients with one label has the means of saved runs."""
    names = ("misa", "server_muon", "sisa", "fedavg")
    misa, muon, sisa, fedavg = (last_rounds("budgets", name, "cifar10_1label") for name in names)
    readme = words("README.md")
    assert (
        f"MISA ends at {misa} on CIFAR-10, Muon on the server at {muon}, SISA at {sisa}, "
        f"FedAvg at {fedavg} ("
    ) in readme


def test_rewards() -> None:
    """What docs/rl.md says of rewards on the way."""
    text = page("rl")
    rewards: dict[tuple[str, str], list[list[float]]] = {}
    for run in saved("rl")["runs"].values():
        key = run["settings"]["task"], run["settings"]["choice"]["label"]
        rewards.setdefault(key, []).append(run["reward"])
    ant = {
        name: [statistics.fmean(at) for at in zip(*rewards["ant", name], strict=True)]
        for name in ("sisa", "misa", "adam")
    }
    leads = [max(ant, key=lambda name, at=at: ant[name][at]) for at in range(11)]
    assert leads[1:7] == ["misa", *["sisa"] * 4, "adam"]  # an evaluation every 30,000 steps
    assert "SISA leads from 60,000 to 150,000 steps and then falls behind" in text
    swings = [value for curve in rewards["double_pendulum", "misa"] for value in curve[10:]]
    assert f"MISA's between {min(swings):,.0f} and {max(swings):,.0f}," in text
    highest = max(map(max, rewards["double_pendulum", "sisa"]))
    assert f"On InvertedDoublePendulum the reward never exceeds {highest:.0f}." in text
    cheetahs = rewards["half_cheetah", "sisa"]
    up, down = max(cheetahs, key=max)[2:4]
    assert up == max(map(max, cheetahs))
    assert f"has {up:.0f} after 60,000 steps and {down:,.0f} after 30,000 more" in text
    assert max(statistics.fmean(curve[-3:]) for curve in cheetahs) <= -200


def test_equal_budgets() -> None:
    """What docs/federated-results.md says of Muon on the server, and of SISA in few rounds."""
    text = page("federated-results")

    def mean(results: str, cell: str, algorithm: str) -> float:
        row = cells(results, cell)[2:]
        return float(dict(zip(TRIALS, row, strict=False))[algorithm].split()[0])

    def leads(data: str) -> list[float]:
        rows = [f"{data}, {labels}" for labels in ("1 label", "2 labels", "3 labels")]
        return [mean("budgets", r, "server_muon") - mean("budgets", r, "misa") for r in rows]

    one, two, three = leads("CIFAR-10")
    assert f"ahead on CIFAR-10 with one and two labels by up to {max(one, two):.1f} points" in text
    assert min(one, two) > 0
    assert f"behind on CIFAR-10 with three labels by {-three:.1f}" in text
    assert f"on Fashion-MNIST by up to {max(leads('Fashion-MNIST')):.1f}," in text
    behind = sorted(-lead for lead in leads("MNIST"))
    assert f"on MNIST by {behind[0]:.1f} to {behind[-1]:.1f} and on Adult" in text
    digits = [f"digits, {labels}" for labels in ("1 label", "2 labels", "3 labels")]
    gaps = [mean("budgets_digits", d, "fedavg") - mean("budgets_digits", d, "sisa") for d in digits]
    assert f"SISA is last, {min(gaps):.0f} to {max(gaps):.0f} points behind FedAvg." in text
    few = {name: mean("budgets_few_rounds", "MNIST, 1 label", name) for name in TRIALS}
    order = sorted(few, key=few.__getitem__, reverse=True)
    assert order[:5] == ["misa_local", "misa", "fedmuon", "server_muon", "fedadam"]
    assert few["fedadam"] - max(few[name] for name in order[5:]) > 5  # the others do not keep up
    assert "FedAvg, FedAvgM, Scaffold, FedDyn and SISA do not keep up" in text
