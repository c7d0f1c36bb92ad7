"""AdamW and the learning rate's schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from podium.errors import ConfigError

__all__ = ["OptimConfig", "build_optimizer", "learning_rate"]

_SCHEDULES: Final = ("constant", "linear", "cosine")
_NON_FINITE: Final = ("skip", "error")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019) with warm-up and decay.

    Attributes:
        lr: peak learning rate.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the root of the latter, against division by zero.
        weight_decay: applied to matrices only, not to norms and biases.
        grad_clip: largest global gradient norm; 0 does not clip.
        warmup_steps: optimizer steps over which the rate rises linearly from ``lr / warmup_steps``.
        schedule: what follows: "constant", or "linear" or "cosine" down to 0 at ``total_steps``.
        total_steps: optimizer steps of the whole run, where "linear" and "cosine" end; 0: the trainer knows.
        non_finite: what a NaN or infinite gradient does: "skip" the step and count it, or "error".
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0
    schedule: str = "constant"
    total_steps: int = 0
    non_finite: str = "skip"

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ConfigError(f"optim.lr={self.lr}: a learning rate is not negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas={self.betas}: each is in [0, 1)")
        if self.schedule not in _SCHEDULES:
            raise ConfigError(f"optim.schedule={self.schedule!r}: choose one of {', '.join(_SCHEDULES)}")
        if self.schedule != "constant" and self.total_steps and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"optim.schedule={self.schedule!r} ends at optim.total_steps={self.total_steps}, which must exceed "
                f"warmup_steps={self.warmup_steps}"
            )
        if self.non_finite not in _NON_FINITE:
            raise ConfigError(f"optim.non_finite={self.non_finite!r}: choose one of {', '.join(_NON_FINITE)}")


def learning_rate(config: OptimConfig, step: int) -> float:
    """The rate of optimizer step ``step``, counted from 0. It depends on nothing else, so there is no state to save.

    Raises:
        ConfigError: a schedule that ends, and no ``total_steps``.
    """
    if config.schedule != "constant" and not config.total_steps:
        raise ConfigError(f"optim.schedule={config.schedule!r} needs optim.total_steps, at which the rate reaches 0")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * (1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that require gradients, with its state already there, so that a checkpoint can be read
    into it before the first step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
