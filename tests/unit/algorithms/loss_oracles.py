"""The papers' losses in plain NumPy: rows of tokens in, the loss of each token and the slope of the sum of losses out.

A slope is the derivative of the sum of all losses by the log-probability of a token, worked out by hand. Nothing here
knows the code under test.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.unit.algorithms.oracles import Array, LossRow

Losses = tuple[list[Array], list[Array]]


def by_token(rows: list[LossRow], formula: Callable[[float, float, float], tuple[float, float]]) -> Losses:
    """Apply ``formula(logp, old, A) -> (loss, slope)`` to each token."""
    losses: list[Array] = []
    slopes: list[Array] = []
    for row in rows:
        pairs = [formula(*token) for token in zip(row.logprobs, row.old, row.advantages, strict=True)]
        losses.append(np.array([loss for loss, _ in pairs]))
        slopes.append(np.array([slope for _, slope in pairs]))
    return losses, slopes


def gmpo(rows: list[LossRow], low: float, high: float) -> Losses:
    """-(prod_t clipped ratio)^(1 / n) A, for rows of one advantage; the clip is one-sided, by the sign of A."""
    losses: list[Array] = []
    slopes: list[Array] = []
    for row in rows:
        advantage, ratio = row.advantages[0], np.exp(row.logprobs - row.old)
        clipped = np.minimum(ratio, np.exp(high)) if advantage > 0 else np.maximum(ratio, np.exp(-low))
        mean = float(np.prod(clipped) ** (1 / len(ratio)))
        losses.append(np.full(len(ratio), -mean * advantage))
        slopes.append(np.where(clipped == ratio, -mean * advantage, 0.0))  # n tokens bear it, each moves it by 1 / n
    return losses, slopes


def cispo(rows: list[LossRow], low: float, high: float) -> Losses:
    """MiniMax-M1, equations 4 and 5: -sg(clip(r)) A log p."""

    def formula(logp: float, old: float, advantage: float) -> tuple[float, float]:
        weight = min(max(np.exp(logp - old), 1 - low), 1 + high)
        return -weight * advantage * logp, -weight * advantage

    return by_token(rows, formula)


def sapo(rows: list[LossRow], pos: float, neg: float) -> Losses:
    """-4 / tau sigma(tau (r - 1)) A; its slope is -4 sigma (1 - sigma) r A."""

    def formula(logp: float, old: float, advantage: float) -> tuple[float, float]:
        tau, ratio = (pos if advantage > 0 else neg), np.exp(logp - old)
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage

    return by_token(rows, formula)


def dppo(rows: list[LossRow], low: float, high: float, kind: str) -> Losses:
    """-M r A, where M is 0 if the divergence is too large and the ratio moves further in the direction of A."""

    def formula(logp: float, old: float, advantage: float) -> tuple[float, float]:
        p, q = np.exp(logp), np.exp(old)
        binary = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
        divergence = abs(p - q) if kind == "tv" else binary
        blocked = (advantage > 0 and p > q and divergence > high) or (advantage < 0 and p < q and divergence > low)
        loss = 0.0 if blocked else -p / q * advantage
        return loss, loss

    return by_token(rows, formula)


def kl_cov(rows: list[LossRow], share: float, coef: float) -> Losses:
    """Cui et al.: -r A, plus coef |log r| at the tokens of the highest covariance."""
    logp, advantages = (np.concatenate([getattr(row, name) for row in rows]) for name in ("logprobs", "advantages"))
    covariance = (logp - logp.mean()) * (advantages - advantages.mean())
    chosen = set(np.argsort(-covariance)[: max(int(share * len(logp)), 1)].tolist())
    losses: list[Array] = []
    slopes: list[Array] = []
    start = 0
    for row in rows:
        log_ratio = row.logprobs - row.old
        marked = np.array([start + t in chosen for t in range(len(log_ratio))])
        losses.append(-np.exp(log_ratio) * row.advantages + coef * marked * np.abs(log_ratio))
        slopes.append(-np.exp(log_ratio) * row.advantages + coef * marked * np.sign(log_ratio))
        start += len(log_ratio)
    return losses, slopes


def dro(rows: list[LossRow], beta: float) -> Losses:
    """-A log p + beta / 2 (log p - log q)^2."""
    return by_token(
        rows,
        lambda logp, old, advantage: (
            -advantage * logp + beta / 2 * (logp - old) ** 2,
            -advantage + beta * (logp - old),
        ),
    )


def teacher_kl(rows: list[LossRow]) -> Losses:
    """Importance sampling with the advantage log q - log p_old, of the teacher q: its derivative is the loss itself."""
    losses = [np.exp(row.logprobs - row.old) * (row.old - row.teacher) for row in rows]
    return losses, losses


def teacher_top(logits: Array, taught: Array, top: int, *, forward: bool) -> tuple[Array, Array]:
    """GKD (Agarwal et al. 2024) over the teacher's first ids and the rest: the divergence, and its slope by the logits.

    With r the ratio by outcome and s_v the slope by p_v, the chain rule of softmax gives p_v (s_v - sum p s)."""
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits, taught))
    inside = np.zeros_like(p)
    np.put_along_axis(inside, np.argsort(-q, 1)[:, :top], 1.0, 1)
    rest_p, rest_q = (np.maximum(1 - (x * inside).sum(1, keepdims=True), 1e-6) for x in (p, q))
    r, rest = np.where(inside, p / q, 1.0), rest_p / rest_q
    if forward:
        value = -(inside * q * np.log(r)).sum(1) - (rest_q * np.log(rest))[:, 0]
        slope = -inside * q / p + inside * (rest_q / rest_p) * (rest_p > 1e-6)
    else:
        value = (inside * p * np.log(r)).sum(1) + (rest_p * np.log(rest))[:, 0]
        slope = inside * (np.log(r) + 1) - inside * (np.log(rest) + 1) * (rest_p > 1e-6)
    return value, p * (slope - (p * slope).sum(1, keepdims=True))


def reinforce(rows: list[LossRow]) -> Losses:
    """Williams 1992: -A log p."""
    return by_token(rows, lambda logp, _, advantage: (-advantage * logp, -advantage))
