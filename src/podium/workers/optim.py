"""AdamW and the learning rate's schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from podium.errors import ConfigError
from podium.workers.config import OptimConfig

__all__ = ["build_optimizer", "learning_rate"]


def learning_rate(config: OptimConfig, step: int) -> float:
    """The rate of optimizer step ``step``, counted from 0. It depends on nothing else, so there is no state to save.

    Raises:
        ConfigError: a schedule that ends, and no ``total_steps``.
    """
    if config.lr_schedule != "constant" and not config.total_steps:
        raise ConfigError(
            f"optim.lr_schedule={config.lr_schedule!r} needs optim.total_steps, at which the rate reaches 0"
        )
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * (1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


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
