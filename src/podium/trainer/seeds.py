"""Seeds: what is drawn depends on the run's seed, the step and the place, never on what was drawn before."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["completion_seeds", "row_order"]

_EVALUATION = -1


def completion_seeds(seed: int, step: int | None, prompts: int, n: int) -> Tensor:
    """One seed a completion of a step, int64 ``[prompts, n]``; ``step`` None is evaluation, the same at every step."""
    generator = _generator(seed, _EVALUATION if step is None else step, 0)
    return torch.from_numpy(generator.integers(0, 2**63 - 1, size=(prompts, n), dtype=np.int64))


def row_order(seed: int, step: int, epoch: int, rows: int) -> Tensor:
    """The order in which an epoch goes through a step's rows, int64 ``[rows]``."""
    return torch.from_numpy(_generator(seed, step, 1 + epoch).permutation(rows))


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([part % 2**32 for part in key])))
