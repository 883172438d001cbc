"""One run: a GPT-2, the recipes, transformers' Trainer, losses by epoch, and texts."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recipes import optimizers
from recipes.language.finetune import data as recipes_data
from recipes.language.finetune import weights as weights_folders
from recipes.language.finetune.config import BATCHES, MODELS, Config, Settings
from recipes.language.finetune.data import Codec, Example
from recipes.language.finetune.similarity import Scorer, find_scorer, score_texts
from recipes.recipe import Line
from recipes.training import finite_or_none
from torchpisa.data import RoundSampler, split

__all__ = ["PACKAGES", "missing_requirement", "require_data", "run"]

PACKAGES = ("transformers", "accelerate")
DIVERGED = 2.0  # times the loss of a guess
TEST_BATCH = 50
Report = Callable[[Line], None]
TOP_K, TOP_P = 50, 0.85  # of the published script's sampling


def run(
    config: Config,
    settings: Settings,
    *,
    device: str,
    data: str | None = None,
    weights: Sequence[Path] = (),
    texts: Path | None = None,
    similarity: Path | None = None,
    checkpoints: Path | None = None,
) -> Iterator[Line]:
    """Yield losses before the training and after every epoch; one that diverges ends early.

    Args:
        config: for `save_every`.
        settings: of the run.
        device: "cpu" or "cuda".
        data: the data folder.
        weights: folders of pretrained weights.
        texts: folder for the texts that the model writes; None for none.
        similarity: folder of the model for BERTScore; None for the default one.
        checkpoints: folder to save in and to resume from; None for neither. What is saved of a run
            is removed when it is done.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(weights_folders.quiet_transformers())
        if checkpoints is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = Path(checkpoints) / settings.name
        finetuning = Finetuning(
            *(settings, device, data, weights, texts, find_scorer(similarity)),
            folder=folder,
            save_every=0 if checkpoints is None else config.save_every,
            origin=config.weights.get(settings.model, ""),
        )
        yield from in_background(finetuning.train)
        shutil.rmtree(folder, ignore_errors=True)


def in_background(work: Callable[[Report, threading.Event], None]) -> Iterator[Line]:
    """Yield the lines that a function reports while it works; Trainer has its own loop.

    Args:
        work: called with what takes a line, and with an event that asks it to stop.
    """
    end = object()
    lines: queue.Queue[Any] = queue.Queue()
    stop = threading.Event()

    def target() -> None:
        try:
            work(lines.put, stop)
        except BaseException as error:
            lines.put(error)
        else:
            lines.put(end)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    try:
        while (line := lines.get()) is not end:
            if isinstance(line, BaseException):
                raise line
            yield line
    finally:
        stop.set()
        thread.join()


class Finetuning:
    """A model, its data and its Trainer.

    Args:
        settings: of the run.
        device: "cpu" or "cuda".
        data: the data folder.
        weights: folders of pretrained weights.
        texts: folder for texts, or None.
        scorer: of the texts, or None.
        folder: for checkpoints.
        save_every: epochs between them; 0 for none.
        origin: which weights these are. Checkpoints of others are not used.
    """

    def __init__(
        self,
        settings: Settings,
        device: str,
        data: str | None,
        weights: Sequence[Path],
        texts: Path | None,
        scorer: Scorer | None,
        folder: Path,
        save_every: int,
        origin: str = "",
    ) -> None:
        self.settings, self.device, self.scorer = settings, torch.device(device), scorer
        self.folder, self.save_every, self.origin = folder, save_every, origin
        self.texts_file = None if texts is None else Path(texts) / f"{settings.name}.json"
        sizes = MODELS[settings.model]
        self.codec: Codec = recipes_data.load_codec(sizes.tokens, data)
        self.parts = recipes_data.load(
            data, self.codec, settings.sizes, settings.length, settings.limit
        )
        place = weights_folders.find(settings.model, weights) if sizes.pretrained else None
        self.model = weights_folders.load(
            sizes, place, self.codec.vocabulary, settings.dropout, settings.seed
        ).to(self.device)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.cuda.reset_peak_memory_stats()
        self.lines: list[Line] = []
        self.texts: dict[str, list[dict[str, str]]] = {}
        self.elapsed = self._since = 0.0

    # Training

    def train(self, report: Report, stop: threading.Event) -> None:
        """Train to the end, or until `stop` is set, and report a line per epoch."""
        checkpoint = self.find_checkpoint()
        if checkpoint is not None:
            state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            self.lines, self.texts = state["log_history"][-1]["recipe"]
            self.elapsed = self.lines[-1]["elapsed"] or 0.0
        else:
            self.lines.append(self.line(0, None))
        for line in self.lines:
            report(line)
        trainer = self.build_trainer(report, stop)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def find_checkpoint(self) -> Path | None:
        """Return the last complete checkpoint of the same run; remove those of others."""
        run_key = {"weights": self.origin, "settings": dataclasses.asdict(self.settings)}
        key = json.loads(json.dumps(run_key))
        file = self.folder / "run.json"
        if not file.is_file() or json.loads(file.read_text(encoding="utf-8")) != key:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            file.write_text(json.dumps(key), encoding="utf-8")
        # Trainer writes its state last.
        complete = [path.parent for path in self.folder.glob("checkpoint-*/trainer_state.json")]
        return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)

    def build_trainer(self, report: Report, stop: threading.Event) -> Any:
        """Return a Trainer that reports every epoch, with the micro-batches of the paper."""
        import transformers
        from torch.optim.lr_scheduler import LambdaLR

        from torchpisa.integrations.transformers import Trainer

        settings, finetuning = self.settings, self
        parts = split(len(self.parts.train), BATCHES, seed=settings.seed)
        sampler = RoundSampler(parts, settings.batch, seed=settings.seed)

        class RecipeTrainer(Trainer):
            """A Trainer whose micro-batches come from the parts of the data in turn."""

            def get_train_dataloader(self) -> Any:
                loader = torch.utils.data.DataLoader(
                    self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
                )
                return self.accelerator.prepare(loader)

        class EpochLog(transformers.TrainerCallback):
            """A line per whole epoch, checkpoints every few of them, and an early end."""

            whole = False

            def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                sampler.set_epoch(round(state.epoch))
                finetuning.start_clock()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_training_stop |= stop.is_set()

            def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                finetuning.stop_clock()
                self.whole = state.global_step % settings.rounds == 0
                every = finetuning.save_every
                due = bool(every) and round(state.epoch) % every == 0
                control.should_save = due and self.whole

            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
            ) -> None:
                if logs is None or "loss" not in logs or not self.whole:
                    return  # the summary at the end, or a part of an epoch
                line = finetuning.line(round(state.epoch), logs["loss"])
                finetuning.lines.append(line)
                state.log_history[-1]["recipe"] = [finetuning.lines, finetuning.texts]
                control.should_training_stop |= bool(line["diverged"])
                report(line)

        choice = settings.choice
        self.optimizer = optimizers.build(choice, self.model, settings.rounds)
        schedule = choice.schedule or optimizers.Schedule()

        def factor(step: int) -> float:
            return schedule.factor(step / settings.rounds, settings.epochs)

        gpu = self.device.type == "cuda"
        arguments = transformers.TrainingArguments(
            str(self.folder),
            per_device_train_batch_size=settings.batch,
            gradient_accumulation_steps=BATCHES,
            num_train_epochs=settings.epochs,
            max_grad_norm=0.0,
            bf16=gpu,
            use_cpu=not gpu,
            seed=settings.seed,
            logging_strategy="epoch",
            save_strategy="epoch" if self.save_every else "no",
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = RecipeTrainer(
            model=self.model,
            args=arguments,
            train_dataset=self.parts.train,
            data_collator=partial(recipes_data.collate, pad=self.codec.end),
            optimizers=(self.optimizer, LambdaLR(self.optimizer, factor)),
            callbacks=[EpochLog()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    # Measurements

    def start_clock(self) -> None:
        self._since = time.perf_counter()

    def stop_clock(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.elapsed += time.perf_counter() - self._since

    def line(self, epoch: int, loss: float | None) -> Line:
        """Return what to log after an epoch: losses, and the score of texts where some are due.

        `loss` is that of the training while it went on, the others are measured now. `elapsed` are
        the seconds of training.
        """
        validation, test = map(self.mean_loss, (self.parts.validation, self.parts.test))
        bound = DIVERGED * math.log(self.codec.vocabulary)
        diverged = any(not x <= bound for x in (loss, validation, test) if x is not None)
        gpu = self.device.type == "cuda"
        line: Line = {
            "epoch": epoch,
            "loss": finite_or_none(loss),
            "validation_loss": finite_or_none(validation),
            "test_loss": finite_or_none(test),
            "elapsed": round(self.elapsed, 3),
            "state_bytes": optimizers.state_bytes(self.optimizer) if epoch else 0,
            "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
            "diverged": diverged,
        }
        due = epoch in self.settings.sample_epochs and not diverged
        texts = self.write_texts(epoch) if due else None
        if self.scorer is not None:
            line[self.scorer.column] = None if texts is None else score_texts(self.scorer, texts)
        return line

    @torch.no_grad()
    def mean_loss(self, examples: Sequence[Example]) -> float:
        """Return the mean loss over all tokens of the texts, without dropout."""
        was_training = self.model.training
        self.model.eval()
        total, count = 0.0, 0
        for start in range(0, len(examples), TEST_BATCH):
            batch = recipes_data.collate(examples[start : start + TEST_BATCH], self.codec.end)
            targets = int((batch["labels"] != recipes_data.IGNORED).sum())
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            with self.precision():
                loss = self.model(**batch).loss
            total += loss.item() * targets
            count += targets
        self.model.train(was_training)
        return total / count

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        lower = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=lower)

    # Texts

    def write_texts(self, epoch: int) -> list[dict[str, str]]:
        """Let the model write instructions for the test recipes, save and return them."""
        examples = self.parts.test
        room = MODELS[self.settings.model].positions - self.settings.new_tokens
        written = self.continue_texts([example.prompt[-room:] for example in examples])
        texts = [
            {
                "ingredients": example.recipe.ingredients,
                "reference": example.recipe.instructions,
                "text": text,
            }
            for example, text in zip(examples, written, strict=True)
        ]
        self.texts[str(epoch)] = texts
        if self.texts_file is not None:
            self.texts_file.parent.mkdir(parents=True, exist_ok=True)
            self.texts_file.write_text(json.dumps(self.texts, indent=1) + "\n", encoding="utf-8")
        return texts

    @torch.no_grad()
    def continue_texts(self, prompts: Sequence[list[int]]) -> list[str]:
        """Return sampled continuations of prompts, up to the end token."""
        from transformers import GenerationConfig

        end = self.codec.end
        longest = max(map(len, prompts))
        ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        how = GenerationConfig(
            **{"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "use_cache": True},
            **{"max_new_tokens": self.settings.new_tokens},
            **{"pad_token_id": end, "eos_token_id": end, "bos_token_id": end},
        )
        was_training = self.model.training
        self.model.eval()
        devices = [torch.cuda.current_device()] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.precision():
            torch.manual_seed(self.settings.seed)
            written = self.model.generate(
                ids.to(self.device), attention_mask=mask.to(self.device), generation_config=how
            )
        self.model.train(was_training)
        texts = []
        for tokens in written[:, longest:].tolist():
            stop = tokens.index(end) if end in tokens else len(tokens)
            texts.append(self.codec.decode([t for t in tokens[:stop] if t < end]).strip())
        return texts


def require_data(
    settings: Sequence[Settings],
    *,
    device: str = "cpu",
    data: str | None = None,
    weights: Sequence[Path] = (),
    **options: Any,
) -> None:
    """Raise FileNotFoundError if recipes, GPT-2's tokens or weights are missing."""
    if settings:
        recipes_data.verify(data)
    for name in dict.fromkeys(run.model for run in settings):
        recipes_data.load_codec(MODELS[name].tokens, data)
        if MODELS[name].pretrained:
            weights_folders.find(name, weights)
    if settings and device != "cpu" and torch.cuda.device_count() > 1:
        raise ValueError(
            "Trainer would use every GPU it sees: set CUDA_VISIBLE_DEVICES to one of them, "
            f"got {torch.cuda.device_count()}"
        )


def missing_requirement(settings: Settings | None = None) -> str | None:
    """Return why this machine cannot do a run, or None."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed: pip install 'torchpisa[huggingface]'"
