"""Tianshou's agent: environments, networks, algorithm, and all of their state."""

import logging
import math
import pickle
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from tianshou.algorithm import A2C, PPO
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.data import Batch, Collector, CollectStats, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, VectorEnvNormObs
from tianshou.utils.net.common import ActorCritic, Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.torch_utils import policy_within_training_step
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from recipes.rl.config import Settings
from recipes.rl.optimizers import factory

__all__ = ["Agent", "make", "policy"]

CLASSES = {"ppo": PPO, "a2c": A2C}
HIDDEN = (64, 64)
BUFFER = 4096  # transitions, more than an update collects
TEST_SEED = 10_000  # added to a run's seed, for environments that no training sees


class Agent:
    """An agent in training.

    Args:
        settings: the settings of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        np.random.seed(settings.seed)  # Tianshou shuffles minibatches with it
        self.environments = vector(settings.environment, settings.environments)
        self.trials = vector(settings.environment, settings.episodes, learn=False)
        self.trials.set_obs_rms(self.environments.get_obs_rms())
        space = self.environments.action_space[0]
        critic = ContinuousCritic(preprocess_net=network(self.environments))
        self.policy = policy(self.environments, space)
        initialise(self.policy.actor, critic)
        self.algorithm = CLASSES[settings.algorithm](
            policy=self.policy,
            critic=critic,
            optim=factory(settings),
            **settings.algorithm_options,
        )
        self.collector = Collector[CollectStats](
            self.algorithm,
            self.environments,
            VectorReplayBuffer(BUFFER, settings.environments),
            exploration_noise=True,
        )
        self.environments.seed(seeds(settings.seed, settings.environments))
        self.collector.reset()

    def update(self) -> CollectStats:
        """Collect with the present weights, learn from that, and return what was collected."""
        with policy_within_training_step(self.policy):
            collected = self.collector.collect(n_step=self.settings.collect)
            self.algorithm.update(
                buffer=self.collector.buffer,
                batch_size=self.settings.minibatch,
                repeat=self.settings.repeat,
            )
        self.collector.reset_buffer(keep_statistics=True)
        return collected

    def evaluate(self) -> tuple[np.ndarray, np.ndarray]:
        """Play the episodes of an evaluation, from the same initial states every time.

        Actions are drawn, as in Tianshou's examples, by a generator of the evaluation's own, so the
        training goes on as if there had been none.

        Returns:
            reward and length of every episode.
        """
        seed, count = TEST_SEED + self.settings.seed, self.settings.episodes
        self.trials.seed(seeds(seed, count))
        rewards, lengths, playing = np.zeros(count), np.zeros(count, int), np.arange(count)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            observations, _ = self.trials.reset()
            while len(playing):
                drawn = self.policy(Batch(obs=observations, info={})).act
                actions = self.policy.map_action(drawn)
                observations, gained, terminated, truncated, _ = self.trials.step(actions, playing)
                rewards[playing] += gained
                lengths[playing] += 1
                going_on = ~(terminated | truncated)
                playing, observations = playing[going_on], observations[going_on]
        return rewards, lengths

    def finite(self) -> bool:
        """Return True if all weights are finite."""
        return all(bool(param.isfinite().all()) for param in self.algorithm.parameters())

    def state(self) -> dict[str, Any]:
        """Return all that is needed to continue bit by bit; between two updates only."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self.algorithm.lr_schedulers],
            # Tianshou leaves this out of its state_dict.
            "returns": vars(self.algorithm.ret_rms),
            "observations": vars(self.environments.get_obs_rms()),
            "environments": [env_state(worker.env) for worker in workers(self.environments)],
            "collector": {name: vars(self.collector)[name] for name in COLLECTOR},
            "episodes": [
                {name: vars(buffer)[name] for name in EPISODE}
                for buffer in self.collector.buffer.buffers
            ],
            "random": (torch.get_rng_state(), np.random.get_state()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.algorithm.load_state_dict(dict(state["algorithm"]))
        for each, saved in zip(self.algorithm.lr_schedulers, state["schedulers"], strict=True):
            each.load_state_dict(saved)
        vars(self.algorithm.ret_rms).update(state["returns"])
        vars(self.environments.get_obs_rms()).update(state["observations"])
        for worker, saved in zip(workers(self.environments), state["environments"], strict=True):
            load_env(worker.env, saved)
        vars(self.collector).update(state["collector"])
        for buffer, saved in zip(self.collector.buffer.buffers, state["episodes"], strict=True):
            vars(buffer).update(saved)
        torch_state, numpy_state = state["random"]
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)


# Attributes of Tianshou's collector and buffers that outlive an update.
COLLECTOR = ("_pre_collect_obs_RO", "_pre_collect_info_R", "_pre_collect_hidden_state_RH")
COLLECTOR += ("collect_step", "collect_episode", "collect_time")
EPISODE = ("_ep_return", "_ep_len")


# Environments


class WithoutInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that drops the details of rewards, which are not used and slow to copy."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**options)[0], {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {}


def make(environment: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Make one environment."""
    # By default MuJoCo writes its warnings to a file in the working folder.
    mujoco.set_mju_user_warning(logging.getLogger("mujoco").info)
    return WithoutInfo(gymnasium.make(environment, disable_env_checker=True, **options))


def vector(environment: str, count: int, learn: bool = True) -> VectorEnvNormObs:
    """Make several environments whose observations are normalised; `learn` adapts how."""
    environments = DummyVectorEnv([lambda: make(environment) for _ in range(count)])
    return VectorEnvNormObs(environments, update_obs_rms=learn)


def workers(environments: VectorEnvNormObs) -> Sequence[Any]:
    """Return the workers, one for each environment."""
    return environments.venv.workers


def seeds(seed: int, count: int) -> list[int]:
    """Return seeds, one for each environment."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count)]


def env_state(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """Return the state of an environment in the middle of an episode.

    MuJoCo's data as a whole: rewards and observations also depend on quantities that are derived
    from positions and velocities a step earlier.
    """
    base: Any = env.unwrapped
    return {
        "data": zlib.compress(pickle.dumps(base.data)),
        "random": base.np_random.bit_generator.state,
        "steps": time_limit(env)._elapsed_steps,
    }


def load_env(env: gymnasium.Env[Any, Any], state: dict[str, Any]) -> None:
    """Set an environment to a state of `env_state`."""
    base: Any = env.unwrapped
    mujoco.mj_copyData(base.data, base.model, pickle.loads(zlib.decompress(state["data"])))
    base.np_random.bit_generator.state = state["random"]
    time_limit(env)._elapsed_steps = state["steps"]


def time_limit(env: Any) -> TimeLimit:
    while not isinstance(env, TimeLimit):
        env = env.env
    return env


# Networks


def network(environments: VectorEnvNormObs) -> Net:
    shape = environments.observation_space[0].shape
    return Net(state_shape=shape, hidden_sizes=HIDDEN, activation=nn.Tanh)


def policy(environments: VectorEnvNormObs, space: gymnasium.Space[Any]) -> ProbabilisticActorPolicy:
    """Build a policy of Gaussian actions: a network gives the mean, a parameter the spread."""
    actor = ContinuousActorProbabilistic(
        preprocess_net=network(environments), action_shape=space.shape, unbounded=True
    )
    with warnings.catch_warnings():
        # Tianshou mistakes the actor, which is not bounded, for one that is.
        warnings.filterwarnings("ignore", "action_scaling and action_bound_method")
        return ProbabilisticActorPolicy(
            actor=actor,
            dist_fn=gaussian,
            action_space=space,
            action_scaling=True,
            action_bound_method="clip",
        )


def gaussian(parameters: tuple[Tensor, Tensor]) -> Distribution:
    return Independent(Normal(*parameters), 1)


def initialise(actor: ContinuousActorProbabilistic, critic: ContinuousCritic) -> None:
    """Initialise as Tianshou's examples do: orthogonal weights, first actions close to zero."""
    nn.init.constant_(actor.sigma_param, -0.5)
    for module in ActorCritic(actor, critic).modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, gain=math.sqrt(2))
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        for module in actor.mu.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(0.01)
