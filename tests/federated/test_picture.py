"""The picture of a partition."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.federated.test_partition import TEN
from torchpisa.federated.partition import (
    dirichlet,
    iid,
)
from torchpisa.federated.picture import draw


def test_picture_is_written_and_always_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    parts = dirichlet(TEN + 90, 4, 0.5)
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(parts, TEN + 90, first, title="four clients")
    draw(parts, TEN + 90, str(second), title="four clients")
    assert first.read_bytes() == second.read_bytes()
    texts = [e.text for e in ElementTree.parse(first).iter() if e.tag.endswith("text")]
    totals = [str(size) for size in parts.sizes] + ["60"] * 10
    ticks = [*"0123", *(str(label) for label in range(90, 100))]
    assert sorted(map(str, texts)) == sorted([*totals, *ticks, "four clients", "client", "label"])


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (150, 3), (2, 120)])
def test_picture_of_few_and_of_many(clients: int, classes: int, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    labels = torch.arange(1500) % classes
    draw(iid(labels, clients), labels, tmp_path / "who.png")
    height, width, _ = image.imread(tmp_path / "who.png").shape
    assert max(height, width) <= 12 * 150  # inches at 150 dots


def test_picture_needs_a_label_per_sample(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"^labels must hold one label per sample"):
        draw(iid(TEN, 2), TEN[:5], tmp_path / "who.svg")
