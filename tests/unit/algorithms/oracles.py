"""The papers' formulas in plain NumPy, row by row and token by token, and random batches to try them on.

Nothing here knows the code under test: float64, Python loops, no flat layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from podium.algorithms import AdvantageInputs

Array = NDArray[np.float64]


@dataclass
class Row:
    """One completion: its score, its group, and for each token mask, reward and value."""

    reward: float
    group: int
    mask: NDArray[np.bool_]
    token_rewards: Array
    values: Array
    bootstrap: float


def random_rows(seed: int, rows: int = 12) -> list[Row]:
    """Rows of 1 to 9 tokens: prompts, gaps in the mask, rows without any masked token, groups of one to many rows."""
    rng = np.random.default_rng(seed)
    made: list[Row] = []
    for _ in range(rows):
        length = int(rng.integers(1, 10))
        mask = rng.random(length) < 0.7
        mask[: int(rng.integers(0, length + 1)) // 2] = False
        made.append(
            Row(
                reward=float(rng.integers(0, 3)) / 2,
                group=int(rng.choice([40, -3, 7, 7, 7])),
                mask=mask,
                token_rewards=rng.normal(size=length),
                values=rng.normal(size=length),
                bootstrap=float(rng.normal()) if rng.random() < 0.3 else 0.0,
            )
        )
    return made


def to_inputs(rows: list[Row], dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """The same rows in the flat layout."""
    lengths = [len(row.mask) for row in rows]
    return AdvantageInputs(
        rewards_B=torch.tensor([row.reward for row in rows], dtype=dtype),
        group_B=torch.tensor([row.group for row in rows]),
        mask_N=torch.from_numpy(np.concatenate([row.mask for row in rows])),
        offsets_B1=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        token_rewards_N=torch.from_numpy(np.concatenate([row.token_rewards for row in rows])).to(dtype),
        values_N=torch.from_numpy(np.concatenate([row.values for row in rows])).to(dtype),
        bootstrap_B=torch.tensor([row.bootstrap for row in rows], dtype=dtype),
    )


def total_reward(row: Row) -> float:
    return row.reward + float(row.token_rewards[row.mask].sum())


def spread(rows: list[Row], per_row: list[float]) -> Array:
    return np.concatenate([np.where(row.mask, value, 0.0) for row, value in zip(rows, per_row, strict=True)])


def grpo(rows: list[Row], std: bool) -> Array:
    """DeepSeekMath, section 4.1.2: (r_i - mean(r)) / std(r); Dr. GRPO: r_i - mean(r)."""
    advantages: list[float] = []
    for row in rows:
        peers = np.array([total_reward(other) for other in rows if other.group == row.group])
        centered = total_reward(row) - peers.mean()
        if len(peers) < 2 or np.ptp(peers) == 0:
            advantages.append(0.0)
        else:
            advantages.append(centered / (peers.std(ddof=1) + 1e-6) if std else centered)
    return spread(rows, advantages)


def rloo(rows: list[Row]) -> Array:
    """Ahmadian et al.: r_i - 1/(k-1) sum over j != i of r_j."""
    advantages: list[float] = []
    for i, row in enumerate(rows):
        others = [total_reward(other) for j, other in enumerate(rows) if j != i and other.group == row.group]
        advantages.append(total_reward(row) - float(np.mean(others)) if others else 0.0)
    return spread(rows, advantages)


def token_rewards(row: Row) -> Array:
    """Rewards at the masked tokens, the score at the last of them."""
    rewards = row.token_rewards[row.mask].copy()
    if len(rewards):
        rewards[-1] += row.reward
    return rewards


def put_back(rows: list[Row], per_row: list[Array]) -> Array:
    out = [np.zeros(len(row.mask)) for row in rows]
    for row, target, values in zip(rows, out, per_row, strict=True):
        target[row.mask] = values
    return np.concatenate(out)


def rewards_to_go(rows: list[Row], gamma: float) -> Array:
    """G_t = r_t + gamma G_{t+1}."""
    per_row: list[Array] = []
    for row in rows:
        rewards, to_go = token_rewards(row), 0.0
        result = np.zeros_like(rewards)
        for t in reversed(range(len(rewards))):
            to_go = rewards[t] + gamma * to_go
            result[t] = to_go
        per_row.append(result)
    return put_back(rows, per_row)


def gae(rows: list[Row], gamma: float, lam: float) -> tuple[Array, Array]:
    """Schulman et al. 2016, equation 16 as the usual backward recurrence; advantages and returns."""
    advantages: list[Array] = []
    returns: list[Array] = []
    for row in rows:
        rewards, values = token_rewards(row), row.values[row.mask]
        following = np.append(values[1:], row.bootstrap)
        result, running = np.zeros_like(rewards), 0.0
        for t in reversed(range(len(rewards))):
            running = rewards[t] + gamma * following[t] - values[t] + gamma * lam * running
            result[t] = running
        advantages.append(result)
        returns.append(result + values)
    return put_back(rows, advantages), put_back(rows, returns)


def whitened(values: Array, mask: NDArray[np.bool_]) -> Array:
    chosen = values[mask]
    return np.where(mask, (values - chosen.mean()) / (chosen.std(ddof=1) + 1e-6), 0.0)


def ppo_objective(
    logp: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, bool]:
    """PPO equation 7 with DAPO's two bounds and, for negative advantages, the floor c A of the dual clip.

    Returns the objective (to maximize) and whether a bound decided it.
    """
    ratio = float(np.exp(logp - old))
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped * advantage)
    bound = clipped * advantage < ratio * advantage
    if dual is not None and advantage < 0 and objective < dual * advantage:
        return dual * advantage, True
    return objective, bound


def loss_weights(masks: list[NDArray[np.bool_]], mode: str, constant: float) -> Array:
    """The weight of each token from the words of the three modes."""
    rows = [mask for mask in masks if mask.any()]
    tokens = sum(int(mask.sum()) for mask in masks)
    weight = {
        "token-mean": lambda mask: 1 / tokens,
        "sequence-mean": lambda mask: 1 / (mask.sum() * len(rows)),
        "sequence-sum-constant": lambda mask: 1 / (constant * len(rows)),
    }[mode]
    return np.concatenate([np.where(mask, weight(mask) if mask.any() else 0.0, 0.0) for mask in masks])


@dataclass
class LossRow:
    """The tokens with loss of one row."""

    logprobs: Array
    old: Array
    advantages: Array

    @property
    def teacher(self) -> Array:
        """Log-probabilities under a teacher that is nobody else here."""
        return np.minimum(self.old + 0.7 * np.sin(9 * self.logprobs), -0.01)


def ppo_clip(rows: list[LossRow], low: float, high: float) -> tuple[list[Array], list[Array]]:
    """PPO equation 7 at each token: the loss, and its derivative by that token's log-probability."""
    losses: list[Array] = []
    slopes: list[Array] = []
    for row in rows:
        ratio = np.exp(row.logprobs - row.old)
        free, bounded = ratio * row.advantages, np.clip(ratio, 1 - low, 1 + high) * row.advantages
        losses.append(-np.minimum(free, bounded))
        slopes.append(np.where(free <= bounded, -free, 0.0))
    return losses, slopes


def gspo(rows: list[LossRow], low: float, high: float) -> tuple[list[Array], list[Array]]:
    """GSPO equations 5 and 7 for rows of one advantage: each token bears its row's loss.

    The slopes are of the row's loss times the row's length, spread evenly, as equation 5 weighs rows alike.
    """
    losses: list[Array] = []
    slopes: list[Array] = []
    for row in rows:
        length, advantage = len(row.logprobs), row.advantages[0]
        ratio = np.exp((row.logprobs - row.old).sum() / length)
        free, bounded = ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage
        losses.append(np.full(length, -min(free, bounded)))
        slopes.append(np.full(length, -free if free <= bounded else 0.0))
    return losses, slopes


def clip_cov(
    rows: list[LossRow],
    share: float,
    low: float,
    high: float,
    draw: Callable[[int], list[int]],
    clip: tuple[float, float] = (1.0, 1.0),
) -> tuple[list[Array], list[Array]]:
    """Clip-Cov, section 4.2: ``max(floor(share N), 1)`` tokens with a covariance in range give nothing, others the loss
    of PPO. Tokens that PPO clips are not in range, as in the authors' code.

    ``draw(n)`` puts 0 to n - 1 in random order; the tokens in range are numbered by their covariance.
    """
    logprobs, advantages = (np.concatenate([getattr(row, name) for row in rows]) for name in ("logprobs", "advantages"))
    losses, slopes = ppo_clip(rows, *clip)
    flat = np.concatenate(losses) != np.concatenate([-np.exp(row.logprobs - row.old) * row.advantages for row in rows])
    covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    inside = sorted((c, i) for i, c in enumerate(covariance) if low <= c <= high and not flat[i])
    chosen = {inside[place][1] for place in draw(len(inside))[: max(int(share * len(covariance)), 1)]}
    start = 0
    for loss, slope in zip(losses, slopes, strict=True):
        left_out = [t for t in range(len(loss)) if start + t in chosen]
        loss[left_out] = slope[left_out] = 0.0
        start += len(loss)
    return losses, slopes
