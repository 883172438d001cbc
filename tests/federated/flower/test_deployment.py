"""The example on real SuperNodes, with TLS and registered keys; processes are killed."""

import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.federated.flower.deployment import EXAMPLE, Deployment, example_module
from tests.federated.flower.fake import imbalance_of
from torchpisa.federated import SISA, FullGradient, Simulation, accuracy
from torchpisa.federated.flower import files

CLIENTS = 10

pytestmark = pytest.mark.xdist_group("flower")  # they need both cores, one after the other


@pytest.fixture(scope="module")
def task():
    return example_module("federated_digits/task.py")


def alone(task, rounds, clients=CLIENTS, **options):
    """The same training in one process."""
    contexts = [SimpleNamespace(node_config={"partition-id": i}) for i in range(clients)]
    simulation = Simulation(
        task.model(),
        [task.data(context) for context in contexts],
        SISA(sigma=0.3, rho=10.0, local=FullGradient(30)),
        **options,
    )
    simulation.run(rounds, progress=False)
    return simulation


def assert_close(saved, simulation):
    for name, expected in simulation.server.weights.items():
        gap = (saved["server"]["weights"][name] - expected).norm() / expected.norm()
        assert gap <= 1e-5


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
    assert_close(saved, alone(task, rounds))


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


def test_lies_do_not_reach_the_model(task, tmp_path):
    """NaN, 1e30 and a wrong shape over the wire: the rounds go on as if the client were absent."""
    rounds, clients = 6, 4
    app = shutil.copytree(EXAMPLE, tmp_path / "app")
    shutil.copy(Path(__file__).with_name("liar.py"), app / "federated_digits" / "client_app.py")
    with Deployment(tmp_path, clients) as deployment:
        deployment.superlink()
        for number in range(clients):
            deployment.register(number)
            deployment.node(number)
        deployment.train(app, rounds=rounds, clients=clients, deadline=100.0)
        deployment.reach(rounds, 120)
        said = deployment.log("superlink")
    lies = {1: "is not finite", 3: "more than the ceiling", 4: "must have shape"}
    found = re.findall(r"client '(\w+)'.* is rejected.*", said)
    assert found == ["1"] * len(lies), said
    for reason in lies.values():
        assert reason in said
    honest = [number for number in range(clients) if number != 1]
    expected = alone(
        *(task, rounds, clients),
        participation=lambda iteration: honest if iteration in lies else range(clients),
    )
    assert_close(files.load(tmp_path / "server.pt"), expected)
