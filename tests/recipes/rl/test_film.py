"""Films of trained agents, where MuJoCo finds a renderer."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tianshou", reason="needs Tianshou: pip install torchpisa[rl]")
pytest.importorskip("mujoco", reason="needs MuJoCo: pip install torchpisa[rl]")
pytest.importorskip("PIL", reason="needs pillow: pip install torchpisa[rl]")

from PIL import Image

from recipes.rl import film
from recipes.rl.config import PRESETS, settings
from recipes.rl.run import AgentTraining

pytestmark = pytest.mark.xdist_group("rl")  # see test_run.py


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quick = settings(PRESETS["quick"], "double_pendulum", "adam", 0)
    training = AgentTraining(dataclasses.replace(quick, environments=2))
    training.line()
    file = tmp_path_factory.mktemp("agents") / "agent.pt"
    training.save(file)
    return file


def test_strip_and_animation(checkpoint: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    try:
        film.make_filmable("InvertedDoublePendulum-v5", 32)
    except RuntimeError as error:
        pytest.skip(str(error))
    words = [str(checkpoint), "--size", "48", "--every", "1"]
    film.main([*words, "--out", str(tmp_path / "strip.png"), "--frames", "3"])
    assert "reward" in capsys.readouterr().out
    with Image.open(tmp_path / "strip.png") as image:
        strip = np.asarray(image)
    assert strip.shape == (48, 3 * 48, 3)
    parts = np.split(strip, 3, axis=1)
    assert not (parts[0] == parts[2]).all()  # it moves
    film.main([*words, "--out", str(tmp_path / "film.gif")])
    with Image.open(tmp_path / "film.gif") as image:
        assert image.n_frames > 2


def test_camera_follows_the_agent(monkeypatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    try:
        environment = film.make_filmable("HalfCheetah-v5", 32)
    except RuntimeError as error:
        pytest.skip(str(error))
    renderer = environment.unwrapped.mujoco_renderer
    assert renderer.model.camera(renderer.camera_id).name == "track"


def test_without_a_renderer_it_says_so(monkeypatch) -> None:
    def render(self):
        raise ImportError("no OpenGL")

    monkeypatch.setattr("gymnasium.envs.mujoco.MujocoEnv.render", render)
    with pytest.raises(RuntimeError, match=r"found no renderer .*no OpenGL.* set MUJOCO_GL"):
        film.make_filmable("InvertedDoublePendulum-v5", 32)


def test_wrong_arguments(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        film.main([str(tmp_path / "none.pt")])
    assert "CHECKPOINT must be a file that the recipe wrote" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        film.main([str(tmp_path / "none.pt"), "--size", "0"])
    assert "--size must be >= 1, got 0" in capsys.readouterr().err
