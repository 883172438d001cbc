"""Noise that keeps the sums, and what would destroy them is refused."""

import pytest
import torch
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

from tests.federated.flower.fake import (
    SETTING,
    app,
    federation,
    imbalance,
    model,
    start,
    strategy,
)
from torchpisa.federated import FedADMM, FedAvg, RobustSelection, Scaffold
from torchpisa.federated.flower import (
    GaussianNoise,
    NobodyTrainsError,
    arrays,
)
from torchpisa.federated.trust.privacy import PrivacyAccount


@pytest.mark.parametrize(
    "mod", [LocalDpMod(1.0, 1.0, 1.0, 0.1), fixedclipping_mod, adaptiveclipping_mod]
)
def test_mods_that_would_destroy_updates_are_refused(mod):
    name = getattr(mod, "__name__", "LocalDpMod")
    with pytest.raises(ValueError, match=rf"got {name}: .* Use privacy=GaussianNoise"):
        app(SETTING, mods=[mod])


def test_harmless_mods_are_taken():
    seen = []

    def client_folder(message, context, call_next):
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    start(federation(None, mods=[message_size_mod, client_folder]), strategy(), 1)
    assert sorted(seen) == ["query"] * 4 + ["train"] * 4


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, 4),
        lambda inner: DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.1, 4),
        lambda inner: DifferentialPrivacyClientSideFixedClipping(inner, 1.0, 1.0, 4),
        lambda inner: DifferentialPrivacyClientSideAdaptiveClipping(inner, 0.1, 4),
    ],
)
def test_wrappers_are_refused_by_name(wrap):
    wrapped = wrap(strategy())
    with pytest.raises(RuntimeError, match=type(wrapped).__name__) as error:
        wrapped.start(federation(None), arrays(model()), 1)
    assert "privacy=GaussianNoise" in str(error.value)


@pytest.mark.parametrize("algorithm", [SETTING, Scaffold(lr=0.1), FedAvg(lr=0.1)])
def test_blurred_updates_keep_the_sum(algorithm, tmp_path):
    kind = next(iter(algorithm.remember({"w": torch.zeros(1)})), None)
    grid = federation(tmp_path, algorithm=algorithm, privacy=GaussianNoise(0.05, 0.1))
    server = start(grid, strategy(algorithm=algorithm), 5)
    assert all(entry.absent == [] for entry in server.rounds)
    plain = start(federation(None, algorithm=algorithm), strategy(algorithm=algorithm), 5)
    name = "0.weight"
    assert not torch.equal(server.server.weights[name], plain.server.weights[name])
    if kind is not None:
        assert imbalance(server, tmp_path, kind) < 1e-5


def test_the_server_reports_epsilon_also_after_a_restart(tmp_path):
    privacy = GaussianNoise(0.05, 1.0)
    grid = federation(tmp_path / "clients", privacy=privacy)
    start(grid, strategy(tmp_path / "server.pt", privacy=privacy), 2)
    server = strategy(tmp_path / "server.pt", privacy=privacy)
    result = server.start(grid, arrays(model()), 5)
    assert all(entry.absent == [] for entry in server.rounds)
    sizes = {name: client.samples for name, client in server.clients.items()}
    account = PrivacyAccount(privacy)
    for _ in range(5):
        account.add({name: n / sum(sizes.values()) for name, n in sizes.items()})
    metrics = result.train_metrics_clientapp
    assert metrics[5]["epsilon"] == pytest.approx(account.epsilon)
    assert metrics[3]["epsilon"] < metrics[5]["epsilon"]


def test_epsilon_is_of_the_noise_that_clients_add():
    grid = federation(None, privacy=GaussianNoise(0.05, 0.1))
    with pytest.raises(NobodyTrainsError, match=r"privacy must be that of the server, Gauss.*1.0"):
        start(grid, strategy(privacy=GaussianNoise(0.05, 1.0)))
    with pytest.raises(ValueError, match="privacy must be None with robust"):
        strategy(privacy=GaussianNoise(0.05, 1.0), robust=RobustSelection())


def test_noise_is_refused_where_updates_hold_weights():
    algorithm = FedADMM(lr=0.1, rho=1.0)
    grid = federation(None, algorithm=algorithm, privacy=GaussianNoise(0.05, 0.1))
    with pytest.raises(NobodyTrainsError, match="whose updates can be clipped, got FedADMM"):
        start(grid, strategy(algorithm=algorithm))
    with pytest.raises(ValueError, match="whose updates can be clipped, got FedADMM"):
        strategy(algorithm=algorithm, privacy=GaussianNoise(0.05, 0.1))


def test_clip_and_noise():
    update = SETTING.start({"w": torch.zeros(10_000)}), torch.randn(10_000)
    message = type(SETTING.broadcast(update[0]))({"delta": {"w": update[1]}}, {})
    clipped = GaussianNoise(2.0, 0.0).apply(message).tensors["delta"]["w"]
    torch.testing.assert_close(clipped, update[1] * (2 / update[1].norm()))
    noise = GaussianNoise(2.0, 0.5).apply(message).tensors["delta"]["w"] - clipped
    assert float(noise.std()) == pytest.approx(1.0, rel=0.05)
    again = GaussianNoise(2.0, 0.5).apply(message).tensors["delta"]["w"] - clipped
    assert not torch.equal(noise, again)
    for options in ({"clip": 0, "noise": 1}, {"clip": 1, "noise": -1}):
        with pytest.raises(ValueError, match="must be a finite number"):
            GaussianNoise(**options)
