"""The modules that worker processes need, by name, so that they can be imported there before they are imported here."""

from typing import Final

__all__ = ["PRELOAD"]

PRELOAD: Final = (
    "torch",
    "transformers",
    *(f"podium.workers.{role}" for role in ("policy", "reference", "critic", "reward_model", "estimator", "generator")),
)
"""Modules that worker processes import before their workers are made. The fork server of ``local`` imports them once
for all processes."""
