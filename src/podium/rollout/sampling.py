"""What is asked of a generator and what comes back: plain records, the same for every engine.

Legend: L tokens of one completion, K ids kept over those L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from podium.errors import ConfigError

__all__ = ["Completion", "FinishReason", "KeptSet", "SamplingParams"]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are drawn.

    The logits are divided by ``temperature``; ``top_k`` keeps the k most probable tokens; ``top_p`` keeps the smallest
    set of the most probable remaining tokens whose share of the remaining mass reaches p; a token is drawn from what
    was kept. ``temperature=0`` takes the most probable token and ignores ``top_k`` and ``top_p``.

    Attributes:
        max_new_tokens: the longest completion, in tokens.
        temperature: at least 0.
        top_p: share of the mass to keep, in (0, 1]; 1 keeps all.
        top_k: how many tokens to keep; 0 keeps all.
        stop_token_ids: a completion ends with the first of these, which is part of it.
        n: completions a prompt.

    Raises:
        ConfigError: a value outside its range, named.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "a finite number, at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all)"),
            "n": (self.n >= 1, "at least 1"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"sampling.{name} is {getattr(self, name)!r}; expected {expected}")

    @property
    def filtered(self) -> bool:
        """Whether ``top_k`` or ``top_p`` takes part, so that kept sets are recorded."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class KeptSet:
    """The tokens that top-k and top-p left to draw from, for each token of one completion.

    Attributes:
        ids: int64 ``[K]``; for token t the kept ids are ``ids[offsets[t]:offsets[t + 1]]``, most probable first.
        offsets: int64 ``[L + 1]``.
    """

    ids: Tensor
    offsets: Tensor

    def at(self, position: int) -> Tensor:
        """The ids kept when token ``position`` was drawn, int64."""
        start, stop = self.offsets[position : position + 2].tolist()
        return self.ids[start:stop]


@dataclass(frozen=True)
class Completion:
    """One sampled completion, on the CPU.

    Attributes:
        token_ids: int64 ``[L]``, L at least 1; a stop token, where one ended it, is the last.
        logprobs: float32 ``[L]``, natural logarithm of the probability with which each token was drawn: after the
            temperature and, where top-k or top-p were used, over the kept set. With temperature 0 it is that of the
            chosen token at temperature 1.
        finish_reason: ``"stop"`` (ended by a stop token) or ``"length"`` (``max_new_tokens`` reached).
        versions: int64 ``[L]``, the version of the weights that each token was drawn from.
        kept: the kept sets where top-k or top-p were used, else None.
    """

    token_ids: Tensor
    logprobs: Tensor
    finish_reason: FinishReason
    versions: Tensor
    kept: KeptSet | None = None

    def __len__(self) -> int:
        return len(self.token_ids)
