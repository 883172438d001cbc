"""The weights that fine-tuning begins with: a folder that `save_pretrained` of transformers wrote.

GPT-2's own, or those of this project's pretraining. Folders are told apart by the sizes in their
`config.json`.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from recipes.language.finetune.config import MODELS, Model

__all__ = ["DEFAULT_FOLDER", "describe", "find", "load", "quiet_transformers"]

DEFAULT_FOLDER = Path("runs/weights")


def find(model: str, folders: Iterable[Path]) -> Path:
    """Return the folder with weights for a model.

    Args:
        model: a name of `recipes.language.finetune.config.MODELS`.
        folders: of weights, or of such folders. Without any, `runs/weights`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: there are several.
    """
    given = list(folders)
    searched = given or [DEFAULT_FOLDER]
    sizes = MODELS[model]
    found = [
        folder
        for place in searched
        for folder in (place, *sorted(place.glob("*/")))
        if is_gpt2(folder, sizes)
    ]
    if not found:
        where = ", ".join(str(place.resolve()) for place in searched)
        raise FileNotFoundError(
            f"no weights of a GPT-2 of {model} ({sizes.layers} layers of width {sizes.width}) in "
            f"{where}. Name a folder that save_pretrained of transformers wrote, with config.json "
            "and model.safetensors: --weights FOLDER. GPT-2's own are openai-community/gpt2 and "
            "gpt2-medium on Hugging Face; recipes/language/finetune/README.md says how to pretrain "
            "some with this project"
        )
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise ValueError(f"--weights must name one folder for {model}, got {names}")
    return found[0]


def is_gpt2(folder: Path, sizes: Model) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return False
    shape = config.get("model_type"), config.get("n_layer"), config.get("n_embd")
    return shape == ("gpt2", sizes.layers, sizes.width)


def describe(folder: Path) -> str:
    """Return the folder's name and the beginning of the weights' SHA-256."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        with file.open("rb") as opened:
            while block := opened.read(2**22):
                digest.update(block)
    return f"{folder.resolve().name} ({digest.hexdigest()[:12]})"


def load(sizes: Model, folder: Path | None, vocabulary: int, dropout: float, seed: int) -> Any:
    """Return a GPT-2 in float32, on the CPU, with weights of a folder or random ones.

    Args:
        sizes: see `Model`.
        folder: of the weights; None for random ones.
        vocabulary: number of tokens.
        dropout: everywhere that GPT-2 has it.
        seed: of random weights.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    if folder is None:
        config = GPT2Config(
            **{"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width},
            **{"n_positions": sizes.positions, "vocab_size": vocabulary},
            **{"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1},
            **rates,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = GPT2LMHeadModel(config)
    else:
        model = GPT2LMHeadModel.from_pretrained(str(folder), dtype=torch.float32, **rates)
        if model.config.vocab_size < vocabulary:
            raise ValueError(
                f"weights must be for at least {vocabulary} tokens, got {model.config.vocab_size} "
                f"in {folder}"
            )
    model.config.use_cache = False  # for training; generation asks for it
    return model


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from reporting on weights that it loads or saves."""
    from transformers.utils import logging as reports

    before = reports.get_verbosity()
    bars = reports.is_progress_bar_enabled()
    reports.set_verbosity(logging.ERROR)
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(before)
        if bars:
            reports.enable_progress_bar()
