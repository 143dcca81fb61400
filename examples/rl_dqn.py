"""Train a deep Q-network on CartPole, in several environments at once.

    pip install gymnasium
    python examples/rl_dqn.py

Stop it where you like and start the same command again: it goes on in the middle of every episode,
with the same replay buffer and the same random numbers.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.nn.functional import smooth_l1_loss

import flags
import trainckpt
from training_trace import Trace

ENVIRONMENTS, CAPACITY, BATCH, DISCOUNT = 4, 10_000, 64, 0.99
SEEDS_APART = 1_000_000  # more than the episodes of one environment


class Replayed(gym.Wrapper):
    """An environment whose state can be saved: the number of its episode, and the actions in it.

    Gymnasium has no way to save an environment. But an episode follows from the seed of its reset
    and from its actions, so a resume takes these actions again. That holds for every environment
    that draws from its own generator alone.
    """

    def __init__(self, env: gym.Env, first_seed: int) -> None:
        super().__init__(env)
        self.first_seed, self.episode = first_seed, -1
        self.actions: list[int] = []

    def reset(self, **_: Any) -> tuple[np.ndarray, dict]:
        """Begin the next episode, by a seed of its own."""
        self.episode, self.actions = self.episode + 1, []
        return self.env.reset(seed=self.first_seed + self.episode)

    def step(self, action: np.int64) -> tuple:
        """Take an action, and note it."""
        self.actions.append(int(action))
        return self.env.step(action)

    def replay(self, episode: int, actions: list[int]) -> np.ndarray:
        """Take these actions in this episode; gives the observation that they lead to."""
        self.episode, self.actions = episode, list(actions)
        seen, _ = self.env.reset(seed=self.first_seed + episode)
        for action in actions:
            seen, *_ = self.env.step(action)
        return seen


class Environments:
    """Vectorised environments, and what each of them showed last."""

    def __init__(self, seed: int) -> None:
        self.parts = [
            Replayed(gym.make("CartPole-v1"), seed + i * SEEDS_APART) for i in range(ENVIRONMENTS)
        ]
        # SAME_STEP: an episode that ends is reset within the step, so nothing waits for the next.
        self.vector = SyncVectorEnv(
            [lambda part=part: part for part in self.parts], autoreset_mode=AutoresetMode.SAME_STEP
        )
        self.seen = torch.from_numpy(self.vector.reset()[0])

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Give the observations before and after, the rewards, and 1.0 where a pole fell."""
        before = self.seen
        seen, rewards, fell, cut, info = self.vector.step(actions.numpy())
        after = seen.copy()
        for i in np.flatnonzero(fell | cut):
            after[i] = info["final_obs"][i]  # `seen` is of the next episode already
        self.seen = torch.from_numpy(seen)
        return before, *(torch.from_numpy(part).float() for part in (after, rewards, fell))

    def state_dict(self) -> dict[str, Any]:
        """The episode of each environment, and the actions in it."""
        return {"episodes": [(part.episode, list(part.actions)) for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the actions of each episode again."""
        pairs = zip(self.parts, state["episodes"], strict=True)
        self.seen = torch.from_numpy(np.stack([part.replay(*saved) for part, saved in pairs]))


class ReplayBuffer(nn.Module):
    """The newest transitions, in buffers: tracked like a model's, and restored in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(CAPACITY, width))
        self.register_buffer("after", torch.zeros(CAPACITY, width))
        self.register_buffer("action", torch.zeros(CAPACITY, dtype=torch.int64))
        self.register_buffer("reward", torch.zeros(CAPACITY))
        self.register_buffer("fell", torch.zeros(CAPACITY))
        self.register_buffer("added", torch.zeros((), dtype=torch.int64))  # since the beginning

    def add(self, **transitions: torch.Tensor) -> None:
        """Write one transition of each environment over the oldest ones."""
        places = (self.added + torch.arange(ENVIRONMENTS)) % CAPACITY
        for name, values in transitions.items():
            getattr(self, name)[places] = values
        self.added += ENVIRONMENTS

    def sample(self) -> torch.Tensor:
        """The places of a batch."""
        return torch.randint(min(int(self.added), CAPACITY), (BATCH,))


def network(width: int, actions: int) -> nn.Module:
    """Observations in (float32[batch, width]), the value of each action out."""
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, actions))


def main() -> None:
    """Build everything, resume if there is something to resume, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", metavar="URL", default="runs/rl_dqn")
    parser.add_argument("--steps", type=int, default=5000, help="of the optimizer (%(default)s)")
    parser.add_argument("--save-every", type=int, default=500, help="steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", metavar="DIR", help="record every step in this folder")
    args = parser.parse_args()
    flags.seed_everything(args.seed)
    environments = Environments(args.seed)
    width, actions = environments.seen.shape[1], environments.vector.single_action_space.n
    model = network(width, actions)
    target = copy.deepcopy(model).requires_grad_(requires_grad=False)
    replay = ReplayBuffer(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = Trace(args.trace, rank=0)

    with trainckpt.Checkpointer(
        args.run,
        model=model,
        target=target,
        replay=replay,
        environments=environments,
        optimizer=optimizer,
        every=f"{args.save_every} steps",
        keep_last=3,
    ) as ckpt:
        trace.attempt(ckpt)
        train(args, ckpt, model, target, replay, environments, optimizer, trace)
    trace.finish(
        ckpt,
        model=model,
        target=target,
        replay=replay,
        environments=environments,
        optimizer=optimizer,
    )


def train(args, ckpt, model, target, replay, environments, optimizer, trace) -> None:
    """Act once in each environment, then take one step on a batch of the replay buffer."""
    for step in range(ckpt.cursor.step, args.steps):
        ckpt.boundary()  # saves and stops happen here, where nothing is half done
        began = ckpt.cursor
        with torch.no_grad():
            best = model(environments.seen).argmax(dim=1)
        explores = torch.rand(ENVIRONMENTS) < max(0.05, 1 - step / 1000)
        action = torch.where(explores, torch.randint(2, (ENVIRONMENTS,)), best)
        before, after, reward, fell = environments.step(action)
        replay.add(before=before, action=action, after=after, reward=reward, fell=fell)

        places = replay.sample()
        with torch.no_grad():
            future = target(replay.after[places]).amax(dim=1) * (1 - replay.fell[places])
        wanted = replay.reward[places] + DISCOUNT * future
        values = model(replay.before[places]).gather(1, replay.action[places, None])[:, 0]
        loss = smooth_l1_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)
        flags.show_progress(step + 1, args.steps, loss.item())
        trace.micro_batch(began, places, loss.item())


if __name__ == "__main__":
    flags.exit_with_code(main)
