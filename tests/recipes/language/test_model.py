"""The model: its size, its first loss, and what it may look at."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.shapes import gpt2
from recipes.language.model import (
    GPT2,
    NAMES,
    SIZES,
    Rotary,
    Sizes,
    build,
    build_by_name,
    count_parameters,
    load_weights,
    missing_requirement,
    save_weights,
    sizes_of,
)


def test_gpt2_has_124_million_parameters() -> None:
    sizes = SIZES["gpt2"]
    with torch.device("meta"):
        model = build(sizes, 0)
    assert sizes.rows == 50304
    count = sum(param.numel() for param in model.parameters())
    assert count == sizes.parameters == 123_568_128
    # GPT-2's without positions and vectors, with rows that are not used, and its query, key and
    # value apart.
    published = {shape.name: shape.size for shape in gpt2(768, 12) if len(shape.size) == 2}
    published["wte.weight"] = (50304, 768)
    del published["wpe.weight"]
    for layer in range(12):
        del published[f"h.{layer}.attn.c_attn.weight"]
        published |= {f"h.{layer}.attn.{name}.weight": (768, 768) for name in ("c_q", "c_k", "c_v")}
    assert {name: tuple(param.shape) for name, param in model.named_parameters()} == published


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_counted(name: str) -> None:
    if missing_requirement(name):
        pytest.skip(missing_requirement(name) or "")
    with torch.device("meta"):
        model = build_by_name(name, 0)
    assert sum(param.numel() for param in model.parameters()) == count_parameters(name)


def test_sizes_are_those_of_gpt2() -> None:
    assert [round(count_parameters(name) / 1e6) for name in ("gpt2-medium", "gpt2-xl")] == [
        354,
        1555,
    ]
    published = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-xl": 1_557_611_200}
    assert {name: count_parameters(f"transformers/{name}") for name in published} == published
    with pytest.raises(ValueError, match=r"must be one of tiny, gpt2-tiny, gpt2, .* got 'gpt3'"):
        sizes_of("gpt3")


@pytest.mark.parametrize("name", ["tiny", "transformers/tiny"])
def test_weights_are_saved_and_loaded(tmp_path: Path, name: str) -> None:
    if missing_requirement(name):
        pytest.skip(missing_requirement(name) or "")
    model, tokens = build_by_name(name, 3), torch.randint(256, (2, 65))
    first = model(tokens[:, :-1], tokens[:, 1:])
    assert first.item() == pytest.approx(math.log(256), abs=0.3)
    loaded = load_weights(save_weights(model, tmp_path, "run"))
    assert loaded.sizes.width == 64
    assert torch.equal(loaded(tokens[:, :-1], tokens[:, 1:]), first)
    assert torch.equal(loaded(tokens[:, :-1]).argmax(-1), model(tokens[:, :-1]).argmax(-1))


def test_plain_model_is_read_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = build_by_name("transformers/tiny", 0)
    save_weights(model, tmp_path, "run")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run")
    tokens = torch.randint(256, (1, 64))
    torch.testing.assert_close(theirs(tokens).logits, model(tokens))


def test_computing_blocks_again_changes_nothing() -> None:
    tokens = torch.randint(256, (2, 65))
    gradients = []
    for recompute in (False, True):
        model = trained()
        model.recompute = recompute
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_tiny_shapes() -> None:
    sizes = SIZES["tiny"]
    model = build(sizes, 0)
    assert sum(param.numel() for param in model.parameters()) == sizes.parameters
    tokens = torch.randint(256, (3, 64))
    assert model(tokens).shape == (3, 64, 256)
    assert model(tokens[:, :10], tokens[:, 1:11]).shape == ()
    assert Sizes(1, 1, 8, vocabulary=257, multiple=64).rows == 320


def test_first_loss_is_that_of_a_guess() -> None:
    sizes = SIZES["tiny"]
    tokens = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(0))
    loss = build(sizes, 0)(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_initialisation() -> None:
    sizes = SIZES["tiny"]
    params = {name: param.detach() for name, param in build(sizes, 1).named_parameters()}
    for name in ("wte.weight", "h.0.attn.c_q.weight", "h.1.mlp.c_fc.weight"):
        assert params[name].std() == pytest.approx(0.02, rel=0.1)
    for name in ("h.1.attn.c_proj.weight", "h.0.mlp.c_proj.weight"):
        assert not params[name].any()
    assert all(param.dim() == 2 for param in params.values())


def test_seed_decides_the_weights_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (build(SIZES["tiny"], seed).wte.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def trained() -> GPT2:
    """Return a model whose blocks do something: initially they are the identity."""
    model = build(SIZES["tiny"], 0)
    torch.manual_seed(0)
    for block in model.h:
        for layer in (block.attn.c_proj, block.mlp["c_proj"]):
            nn.init.normal_(layer.weight, std=0.1)
    return model


def test_no_token_sees_later_ones() -> None:
    model = trained()
    tokens = torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :12], after[:, :12], atol=1e-6)
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-3)


def test_rotation_tells_distances_only() -> None:
    rotary = Rotary(16, 8)
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 16, 8)
    products = rotary(q) @ rotary(k).T
    for distance in range(-15, 16):
        along = products.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-5)
    # By hand: pair (0, 4) turns by one radian per position, pair (3, 7) by a thousandth.
    assert rotary(k)[2, 0] == pytest.approx(
        float(k[2, 0] * math.cos(2) - k[2, 4] * math.sin(2)), abs=1e-6
    )
    assert rotary(k)[5, 7] == pytest.approx(
        float(k[5, 3] * math.sin(0.005) + k[5, 7] * math.cos(0.005)), abs=1e-6
    )


def test_order_of_earlier_tokens_matters() -> None:
    model = trained()
    tokens = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(1))
    swapped = tokens[:, [1, 0, *range(2, 20)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-5)


def test_a_block_by_hand() -> None:
    """Norm of queries and keys, each head alone, then the square of ReLU."""
    model, sizes = trained().double(), SIZES["tiny"]
    block, length, width = model.h[0], 7, 16  # of a head
    x = torch.randn(1, length, sizes.width, dtype=torch.float64)

    def scaled(y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + torch.finfo(y.dtype).eps).sqrt()

    seen = scaled(x)[0]
    heads = []
    for head in range(sizes.heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (
            seen @ getattr(block.attn, name).weight[rows].T for name in ("c_q", "c_k", "c_v")
        )
        scores = model.rotary(scaled(q)) @ model.rotary(scaled(k)).T / math.sqrt(width)
        later = torch.ones(length, length).triu(1).bool()
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v)
    middle = x[0] + torch.cat(heads, -1) @ block.attn.c_proj.weight.T
    inner = (scaled(middle) @ block.mlp["c_fc"].weight.T).clamp(min=0) ** 2
    expected = middle + inner @ block.mlp["c_proj"].weight.T
    assert torch.allclose(block(x, model.rotary)[0], expected, rtol=1e-10, atol=1e-12)
