"""The page from one's own data to a running federation: its files and commands, as they are."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.federated.flower.deployment import EXAMPLE, ROOT, Deployment
from tests.federated.flower.fake import imbalance_of
from tests.federated.flower.ports import free_port, listens
from torchpisa.federated import durable_files

pytest.importorskip("sklearn")
pytestmark = pytest.mark.xdist_group("flower")

PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
SITES = ("north", "east", "south")


class Reader:
    """Somebody who does what the page says, on one machine, in a folder instead of `~`.

    Args:
        deployment: runs the commands of Flower.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.home = deployment.folder
        self.app = self.home / "app"
        self.ports = {"9093": str(free_port()), "9443": str(free_port())}
        (self.home / "federation").mkdir()
        (self.app / "clinics").mkdir(parents=True)
        (self.app / "clinics" / "__init__.py").touch()
        shutil.copy(EXAMPLE / "certificates.py", self.app)
        self.commands = []
        self.done = set()
        for language, title, text in BLOCK.findall(PAGE):
            if title.startswith("~/.flwr/"):
                (self.home / "home" / Path(title).name).write_text(self.here(text))
            elif title:
                (self.app / title).write_text(text)
            elif language == "bash":
                lines = text.replace("\\\n", " ").splitlines()
                self.commands += [" ".join(line.split()) for line in lines]

    def here(self, text: str) -> str:
        """Return a text of the page with the folder, machine and ports of this test."""
        text = text.replace("~/federation", str(self.home / "federation"))
        for port, free in self.ports.items():
            text = text.replace(port, free)
        return text.replace("SERVER", "127.0.0.1")

    def command(self, start: str) -> list[str]:
        """Return the one command of the page that starts so, split into its words."""
        (found,) = [command for command in self.commands if command.startswith(start)]
        self.done.add(found)
        return shlex.split(self.here(found))

    def python(self, start: str) -> str:
        """Run a command of Python to its end and return its output."""
        _, *rest = self.command(start)
        done = subprocess.run(
            [sys.executable, *rest], cwd=self.app, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def flwr(self, start: str) -> str:
        """Run the command line of Flower to its end and return its output."""
        _, *rest = self.command(start)
        return self.deployment.flwr(*(self.app if word == "." else word for word in rest))

    def start_server(self) -> None:
        """Start SuperLink and gate."""
        # Apps run in forks of a process that has imported torch, which the test starts itself.
        role, *rest = self.command("flower-superlink ")
        self.deployment.fork(role, "superlink", *rest, "--isolation", "process")
        self.deployment.wait(lambda: listens(int(self.ports["9093"])), "the SuperLink")
        if "gate" not in self.deployment.pids:
            words = self.command("python -m torchpisa.federated.flower gate ")
            self.deployment.fork("gate", "gate", *words[words.index("gate") + 1 :])
            self.deployment.wait(lambda: listens(int(self.ports["9443"])), "the gate")

    def start_site(self, number: int) -> None:
        """Start a site: the page has the command of the first."""
        role, *rest = self.command("flower-supernode ")
        site = SITES[number]
        words = [word.replace("north", site).replace("node-0", f"node-{number}") for word in rest]
        local = ("--isolation", "process", "--host", "127.0.0.1", "--port", "0")
        self.deployment.fork(role, site, *words, *local)

    def run(self) -> str:
        """Start a run and return its number."""
        said = ""

        def answered() -> bool:
            # A SuperLink on a busy machine listens before it answers.
            nonlocal said
            said = " ".join(self.flwr("flwr run . federation").split())
            return "SuperLink is unavailable" not in said

        self.deployment.wait(answered, "the SuperLink")
        started = re.search(r"Successfully started run (\d+)", said)
        assert started, said
        return started[1]

    def status(self, run: str) -> str:
        """Return what Flower lists of a run."""
        listed = self.flwr("flwr list federation").splitlines()
        return next(line for line in listed if run in line)


def test_the_page(tmp_path, nursery):
    with Deployment(tmp_path, 0, nursery) as deployment:
        reader = Reader(deployment)
        deployment.checkpoint = reader.home / "federation" / "server.pt"
        follow(reader, deployment)
    assert reader.done == set(reader.commands)


def follow(reader, deployment):
    reader.python("python sample.py")
    printed = reader.python("python try_it.py")
    assert f"```text\n{printed}```" in PAGE, printed
    assert "kept:" not in reader.python("python certificates.py")
    for name in ("test", *SITES):
        shutil.copy(reader.app / f"{name}.csv", reader.home / "federation")
    reader.start_server()
    for number in range(len(SITES)):
        said = reader.flwr(f"flwr supernode register ~/federation/keys/node-{number}.pub")
        assert "successfully" in said.lower(), said
        reader.start_site(number)
    run = reader.run()
    deployment.reach(1)
    assert run in reader.flwr("flwr list federation").replace("\n", "")
    assert reader.flwr("flwr supernode list federation").count("online") == len(SITES)
    deployment.kill("east")
    deployment.kill("superlink")
    reader.start_server()
    reader.start_site(1)
    run = reader.run()
    deployment.reach(3)
    said = reader.python("python -m torchpisa.federated.flower show")
    assert all(site in said for site in SITES), said
    assert "3 rounds" in said
    saved = durable_files.load(deployment.checkpoint)
    assert len(saved["clients"]) == len(SITES)
    assert gap(reader, saved) < 1e-5
    reader.python("python -m torchpisa.federated.flower export")
    measured = reader.python("python use_it.py")
    assert f"after round 3: {measured.strip()}" in deployment.log("superlink"), measured
    # The run that was killed counts as running for another minute.
    deployment.wait(lambda: "finished" in reader.status(run), "its end")
    assert "evict" in reader.python("python -m torchpisa.federated.flower evict")
    saved = durable_files.load(deployment.checkpoint)
    assert sorted(saved["clients"]) == ["east", "north"]
    assert gap(reader, saved) < 1e-5


def gap(reader, saved):
    """Return how far the server's sum is from that of the sites' duals."""
    together = reader.home / "memory"
    for site in saved["clients"]:
        shutil.copytree(reader.home / "federation" / site, together, dirs_exist_ok=True)
    return imbalance_of(saved, together)
