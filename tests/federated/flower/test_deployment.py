"""The example on real SuperNodes, with a gate, TLS and registered keys; processes are killed."""

import re
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.federated.flower.deployment import EXAMPLE, Deployment, example_module
from tests.federated.flower.fake import imbalance_of
from torchpisa.federated import SISA, FullGradient, Simulation, accuracy, durable_files
from torchpisa.federated.flower import checkpoint

CLIENTS = 3

pytestmark = pytest.mark.xdist_group("flower")  # one after the other, beside one other test


def test_runs_in_its_group(request):
    """Otherwise two workers start SuperNodes at once, which is too much for two cores."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@flower")


@pytest.fixture(scope="module")
def task():
    return example_module("federated_digits/task.py")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, nursery):
    """Yield a deployment for all trainings; each has its own checkpoint."""
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(folder, CLIENTS + 1, nursery, max_reply="64M") as deployment:
        deployment.superlink()
        deployment.nodes(CLIENTS)
        yield deployment


def train(deployment, name, rounds, app=EXAMPLE):
    """Train to the end; return the checkpoint, and what the server has logged meanwhile."""
    before = len(deployment.log("superlink"))
    deployment.train(app, checkpoint=f"{name}.pt", rounds=rounds, deadline=100.0)
    deployment.reach(rounds)
    return durable_files.load(deployment.checkpoint), deployment.log("superlink")[before:]


def app_with(client, folder):
    """Return a copy of the example with another client app."""
    app = shutil.copytree(EXAMPLE, folder / "app")
    shutil.copy(Path(__file__).with_name(client), app / "federated_digits" / "client_app.py")
    return app


def in_one_process(task, rounds, clients=CLIENTS, **options):
    """Run the same training as a simulation."""
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


def test_equals_simulation_and_strangers_stay_outside(task, shared):
    """A stranger has reached the gate and has ca.crt, which is public."""
    rounds = 6
    # To join with a key that nobody has registered,
    shared.node(CLIENTS, ready=False)
    # to register that key, and to run an app of one's own.
    shared.connection("stranger", shared.door)
    before = list_runs(shared)
    key = shared.secrets / f"node-{CLIENTS}.pub"
    registered = shared.flwr("supernode", "register", key, "stranger")
    started = shared.flwr("run", EXAMPLE, "stranger")
    codes = {path: post(shared, path) for path in CLOSED}
    saved, _ = train(shared, "undisturbed", rounds)
    shared.wait(lambda: "Failed to initialize" in shared.log(f"node-{CLIENTS}"), "the stranger")
    listed = shared.flwr("supernode", "list", "test")
    after = list_runs(shared)
    shared.kill(f"node-{CLIENTS}")
    assert "successfully" not in registered.lower()
    assert "Successfully started run" not in started
    assert codes == dict.fromkeys(CLOSED, 404)
    assert "SuperNode ID" not in shared.log(f"node-{CLIENTS}")
    assert listed.count("online") == CLIENTS, listed
    assert len(after) == len(before) + 1, after
    assert open_to(shared.port) == {"127.0.0.1"}
    assert sorted(saved["clients"]) == [str(number) for number in range(CLIENTS)]
    assert_close(saved, in_one_process(task, rounds))


def list_runs(deployment):
    return re.findall(r"│ \d{10,} ", deployment.flwr("list", "test"))


CLOSED = [
    "/v1/control/register-node",
    "/v1/control/start-run",
    "/v1/control/../control/start-run",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/register-node",
    "/v1/runtime/acquire-task",
    "/docs",
]


def post(deployment, path):
    """Return the status of a request to the gate."""
    trust = ssl.create_default_context(cafile=str(deployment.secrets / "ca.crt"))
    request = urllib.request.Request(f"https://127.0.0.1:{deployment.door}{path}", b"")
    try:
        return urllib.request.urlopen(request, context=trust, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


def open_to(port):
    """Return the addresses of this machine on which somebody listens at a port."""
    addresses = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        address, number = local.split(":")
        if state == "0A" and int(number, 16) == port:
            addresses.add(".".join(str(byte) for byte in bytes.fromhex(address)[::-1]))
    return addresses


def test_documented_superlinks_are_not_on_the_network():
    docs = EXAMPLE.parents[1] / "docs"
    pages = [EXAMPLE / "README.md", docs / "flower.md", docs / "deploy.md"]
    commands = [
        command
        for page in pages
        for command in re.findall(r"^flower-superlink(?:.*\\\n)*.*", page.read_text(), re.MULTILINE)
    ]
    assert len(commands) >= 3
    for command in commands:
        assert "--host 127.0.0.1" in command, command


def test_lies_do_not_reach_the_model(task, tmp_path, shared):
    """NaN, 1e30 and a wrong shape over the wire: the rounds go on as if the client were absent."""
    rounds = 6
    saved, said = train(shared, "lies", rounds, app_with("liar.py", tmp_path))
    lies = {1: "is not finite", 3: "more than the ceiling", 4: "must have shape"}
    rejected = re.findall(r"client '(\w+)'.* is rejected.*", said)
    assert rejected == ["1"] * len(lies), said
    for reason in lies.values():
        assert reason in said
    honest = [number for number in range(CLIENTS) if number != 1]
    expected = in_one_process(
        *(task, rounds),
        participation=lambda iteration: honest if iteration in lies else range(CLIENTS),
    )
    assert_close(saved, expected)


def test_junk_is_not_read_and_its_sender_is_put_aside(task, tmp_path, shared):
    """24 MB in every round, where 2,600 bytes are due; the gate lets it pass."""
    rounds = 4
    saved, said = train(shared, "junk", rounds, app_with("junk.py", tmp_path))
    assert said.count("the update of client '1' is rejected: the answer is larger than") == 2, said
    assert "client '1' is put aside for the rest of this run" in said
    honest = [number for number in range(CLIENTS) if number != 1]
    expected = in_one_process(task, rounds, participation=lambda iteration: honest)
    assert_close(saved, expected)


def test_second_run_and_a_stolen_name(shared):
    first = shared.train(checkpoint="stolen.pt", rounds=100_000, deadline=60.0)
    shared.reach(1)
    second = shared.train(checkpoint="stolen.pt", rounds=100_000, deadline=60.0)
    shared.wait(
        lambda: f"run {second} is refused: run {first}" in shared.log("superlink"),
        "the second run to be refused",
    )
    shared.flwr("stop", first, "test")
    shared.wait(lambda: not held_by_a_run(shared.checkpoint), "the first run to stop")
    # Before the next one starts, another node that is registered takes the name of client 2.
    shared.kill("node-2")
    shared.register(CLIENTS)
    shared.node(CLIENTS, partition=2)
    done = shared.iteration
    shared.train(checkpoint="stolen.pt", rounds=done + 4, deadline=10.0)
    shared.wait(
        lambda: "claims to be client '2', who has another key" in shared.log("superlink"),
        "the thief to be refused",
    )
    shared.node(2, ready=False)  # the real one is back
    shared.reach(done + 4)
    shared.kill(f"node-{CLIENTS}")
    assert "Receiving: train" not in shared.log(f"node-{CLIENTS}")
    saved = durable_files.load(shared.checkpoint)
    assert saved["server"]["iteration"] == done + 4
    assert len({client["key"] for client in saved["clients"].values()}) == CLIENTS
    assert imbalance_of(saved, shared.memory) < 1e-5


def held_by_a_run(file):
    """Return True if a run has the lock of a checkpoint."""
    try:
        with checkpoint.locked(file, "of a test"):
            return False
    except checkpoint.InUseError:
        return True


def test_late_updates_survive_a_killed_client_and_a_killed_server(tmp_path, shared):
    """Client 1 is slow: its updates count once each, with everybody alive, and whoever dies."""
    options = {"rounds": 1_000_000, "enough": 2, "staleness": 100_000, "deadline": 60.0}
    app, name = app_with("straggler.py", tmp_path), "late.pt"
    run = shared.train(app, checkpoint=name, **options)
    held = []

    def hold():
        """Wait until an update of client 1 is under way and others go on."""
        (shared.memory / "held").unlink(missing_ok=True)
        (shared.memory / "hold").touch()
        shared.wait((shared.memory / "held").exists, "client 1 to be late")
        held.append(int((shared.memory / "held").read_text()))
        shared.reach(held[-1] + 3)

    def release():
        (shared.memory / "hold").unlink()

    def wait_until_counted():
        said = f"the update of client '1' for round {held[-1] + 1} counts in round"
        shared.wait(lambda: said in shared.log("superlink"), "the late update to count")

    shared.reach(1)
    hold()
    release()
    wait_until_counted()
    hold()
    before = missed(shared)
    shared.kill("node-1")
    release()
    shared.wait(lambda: missed(shared) > before, "node 1 to be missed")
    shared.reach(shared.iteration + 2)
    shared.node(1, ready=False)
    wait_until_counted()
    hold()
    shared.kill("superlink")
    release()
    restart_superlink(shared)
    run = shared.train(app, checkpoint=name, **options)
    wait_until_counted()
    shared.reach(shared.iteration + 2)
    shared.flwr("stop", run, "test")
    shared.wait(lambda: not held_by_a_run(shared.checkpoint), "the run to stop")
    counted = re.findall(
        r"the update of client '1' for round (\d+) counts", shared.log("superlink")
    )
    for iteration in held:
        assert counted.count(str(iteration + 1)) == 1
    saved = durable_files.load(shared.checkpoint)
    assert saved["clients"]["1"]["accepted"] >= held[-1]
    assert imbalance_of(saved, shared.memory) < 1e-5


def missed(deployment):
    """Return how many nodes the SuperLink has missed."""
    return deployment.flwr("supernode", "list", "test").count("offline")


def restart_superlink(deployment):
    """Start the SuperLink again; it has no database, so nodes get new ids."""
    deployment.superlink()
    for number in range(CLIENTS):
        deployment.register(number)


def test_killed_clients_and_a_killed_server(task, shared):
    """The last one: it ends the SuperLink that the others have used."""
    rounds = 9
    victims = [2, 0]
    # The last rounds are for everybody.
    events = [(2, "client"), (4, "server"), (6, "client")]
    options = {"checkpoint": "killed.pt", "rounds": rounds, "deadline": 15.0}
    shared.train(**options)
    for iteration, kind in events:
        shared.reach(iteration)
        if kind == "server":
            shared.kill("superlink")
            restart_superlink(shared)  # what counts are names and keys
            shared.train(**options)
        else:
            victim = victims.pop()
            shared.kill(f"node-{victim}")
            shared.node(victim, ready=False)
    shared.reach(rounds)
    saved = durable_files.load(shared.checkpoint)
    assert len(saved["clients"]) == CLIENTS
    assert imbalance_of(saved, shared.memory) < 1e-5
    # All images of the clients' labels: those for the test alone are few.
    inputs, targets = (
        torch.cat(pair) for pair in zip(task.digits(True), task.digits(False), strict=True)
    )
    measure = accuracy(inputs[targets < CLIENTS], targets[targets < CLIENTS])
    undisturbed = measure(in_one_process(task, rounds).model)["accuracy"]
    network = task.model()
    network.load_state_dict(saved["server"]["weights"])
    with torch.no_grad():
        assert measure(network)["accuracy"] >= undisturbed - 1
    assert undisturbed > 90
