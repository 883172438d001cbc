"""Film a trained agent: `python -m recipes.rl.film CHECKPOINT.pt --out strip.png` (or .gif).

Takes a checkpoint of the recipe and plays an episode with the most likely actions. MuJoCo has to
find a renderer: without a screen, MUJOCO_GL=egl or MUJOCO_GL=osmesa says which.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.rl.run import load, missing_requirement

__all__ = ["load_agent", "main", "make_filmable", "play", "write_picture"]


def make_filmable(environment: str, size: int) -> Any:
    """Return an environment that can be filmed.

    Args:
        environment: its id in gymnasium.
        size: width and height of a frame in pixels.

    Raises:
        RuntimeError: MuJoCo found no renderer.
    """
    from recipes.rl.agent import make

    # The camera that follows the agent; where there is none, as for a pendulum, it stands still.
    options = {"render_mode": "rgb_array", "camera_name": "track"}
    env = make(environment, **options, width=size, height=size)
    env.reset()
    try:
        env.render()
    except Exception as error:  # OpenGL's libraries raise many kinds
        raise RuntimeError(
            f"MuJoCo found no renderer ({error!r}); without a screen, set MUJOCO_GL to egl or "
            "osmesa and install its library"
        ) from error
    return env


def load_agent(state: dict[str, Any]) -> Any:
    """Return the agent of a checkpoint, as `recipes.rl.run.load` returned it.

    Call it before `make_filmable`: Triton, which optimizers import, crashes where Mesa has loaded
    its LLVM.
    """
    from recipes.rl.agent import Agent

    agent = Agent(state["settings"])
    agent.load(state["agent"])
    agent.policy.deterministic_eval = True
    return agent


def play(agent: Any, environment: Any, every: int, seed: int) -> tuple[list[Any], float]:
    """Play an episode.

    Args:
        agent: from `load_agent`.
        environment: from `make_filmable`.
        every: steps from one frame to the next.
        seed: seed of the episode.

    Returns:
        the frames, as arrays, and the reward of the episode.
    """
    statistics = agent.environments.get_obs_rms()
    observation, _ = environment.reset(seed=seed)
    frames, total, steps, over = [], 0.0, 0, False
    while not over:
        if steps % every == 0:
            frames.append(environment.render())
        action = agent.policy.compute_action(statistics.norm(observation))
        observation, reward, terminated, truncated, _ = environment.step(np.atleast_1d(action))
        total, steps, over = total + float(reward), steps + 1, terminated or truncated
    return frames, total


def write_picture(frames: Sequence[Any], path: Path, count: int, pause: float) -> None:
    """Write a strip of `count` frames, or all of them as an animation if the file is a .gif.

    Args:
        frames: as `play` returned them.
        path: the file of the picture.
        count: frames of a strip, evenly spread over the episode.
        pause: seconds between frames of an animation.
    """
    from PIL import Image

    if path.suffix == ".gif":
        first, *others = (Image.fromarray(frame) for frame in frames)
        options = {"append_images": others, "duration": round(1000 * pause), "loop": 0}
        first.save(path, save_all=True, **options)
        return
    chosen = np.linspace(0, len(frames) - 1, min(count, len(frames))).round().astype(int)
    Image.fromarray(np.concatenate([frames[at] for at in chosen], axis=1)).save(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m recipes.rl.film", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a file from the folder of --checkpoints")
    parser.add_argument("--out", type=Path, help="a .png or a .gif; default: CHECKPOINT.png")
    parser.add_argument("--frames", type=int, default=8, help="of a strip; default %(default)s")
    parser.add_argument("--every", type=int, default=5, help="steps per frame; default %(default)s")
    parser.add_argument("--size", type=int, default=160, help="in pixels; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the episode; default %(default)s")
    args = parser.parse_args(argv)
    for name in ("frames", "every", "size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    if not args.checkpoint.is_file():
        parser.error(f"CHECKPOINT must be a file that the recipe wrote, got {args.checkpoint}")
    reason = missing_requirement()
    if reason is not None:
        sys.exit(reason)
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    state = load(args.checkpoint)
    agent = load_agent(state)
    try:
        environment = make_filmable(state["settings"].environment, args.size)
    except RuntimeError as error:
        sys.exit(str(error))
    frames, reward = play(agent, environment, args.every, args.seed)
    path = args.out or args.checkpoint.with_suffix(".png")
    write_picture(frames, path, args.frames, args.every * environment.unwrapped.dt)
    print(f"{path}  reward {reward:.0f}")


if __name__ == "__main__":
    main()
