"""The example on real SuperNodes, with TLS and registered keys; processes are killed."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.federated.flower.deployment import Deployment, example_module
from tests.federated.flower.fake import imbalance_of
from torchpisa.federated import SISA, FullGradient, Simulation, accuracy
from torchpisa.federated.flower import files

CLIENTS = 10

pytestmark = pytest.mark.xdist_group("flower")  # they need both cores, one after the other


@pytest.fixture(scope="module")
def task():
    return example_module("federated_digits/task.py")


def alone(task, rounds):
    """The same training in one process."""
    contexts = [SimpleNamespace(node_config={"partition-id": i}) for i in range(CLIENTS)]
    simulation = Simulation(
        task.model(),
        [task.data(context) for context in contexts],
        SISA(sigma=0.3, rho=10.0, local=FullGradient(30)),
    )
    simulation.run(rounds, progress=False)
    return simulation


def test_equals_simulation_and_refuses_strangers(task, tmp_path):
    rounds = 20
    with Deployment(tmp_path, CLIENTS + 1) as deployment:
        deployment.superlink()
        for number in range(CLIENTS):
            deployment.register(number)
        for number in range(CLIENTS + 1):  # the last has a key that nobody knows
            deployment.node(number)
        deployment.train(rounds=rounds, deadline=100.0)
        deployment.reach(rounds, 240)
        stranger = deployment.log(f"node-{CLIENTS}")
    assert "Failed to activate SuperNode" in stranger
    assert "Receiving" not in stranger
    saved = files.load(tmp_path / "server.pt")
    assert sorted(saved["clients"]) == [str(number) for number in range(CLIENTS)]
    assert {accepted for _, accepted in saved["clients"].values()} == {rounds - 1}
    for name, expected in alone(task, rounds).server.weights.items():
        gap = (saved["server"]["weights"][name] - expected).norm() / expected.norm()
        assert gap <= 1e-5


def test_killed_clients_and_a_killed_server(task, tmp_path):
    rounds = 16
    chance = random.Random(5)
    victims = chance.sample(range(CLIENTS), 3)
    # The server is killed after round 7; the last rounds are for everybody.
    times = sorted(chance.choices([2, 3, 4, 5, 8, 9], k=3))
    with Deployment(tmp_path, CLIENTS) as deployment:
        deployment.superlink()
        for number in range(CLIENTS):
            deployment.register(number)
            deployment.node(number)
        deployment.train(rounds=rounds, deadline=20.0)
        events = [(time, "client") for time in times] + [(7, "server")]
        for time, kind in sorted(events):
            deployment.reach(time, 120)
            if kind == "server":
                deployment.kill("superlink")
                # It has no database, so nodes get new ids: what counts is the name of a client.
                deployment.superlink()
                for number in range(CLIENTS):
                    deployment.register(number)
                deployment.train(rounds=rounds, deadline=20.0)
            else:
                victim = victims.pop()
                deployment.kill(f"node-{victim}")
                deployment.node(victim)
        deployment.reach(rounds, 240)
    saved = files.load(tmp_path / "server.pt")
    assert len(saved["clients"]) == CLIENTS
    assert imbalance_of(saved, tmp_path / "memory") < 1e-5
    measure = accuracy(*task.digits(test=True))
    undisturbed = measure(alone(task, rounds).model)["accuracy"]
    network = task.model()
    network.load_state_dict(saved["server"]["weights"])
    with torch.no_grad():
        assert abs(measure(network)["accuracy"] - undisturbed) <= 0.5
    assert undisturbed > 90
