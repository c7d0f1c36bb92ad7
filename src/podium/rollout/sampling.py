"""What is asked of a generator and what comes back: plain records, the same for every engine.

This module imports no torch.

Legend: L tokens of one completion, K ids kept over those L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from podium.config import section
from podium.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Completion", "FinishReason", "KeptSet", "RequestParams", "SamplingParams"]

FinishReason = Literal["stop", "length"]
TokenId = Annotated[int, Field(ge=0, le=10**9)]
if TYPE_CHECKING:
    StopToken = TokenId  # a configuration may have texts, and with_stop_tokens makes them RequestParams.stop
else:
    StopToken = TokenId | Annotated[str, Field(min_length=1, max_length=1000)]


@section("sampling")
class SamplingParams:
    """How completions are sampled.

    The logits are divided by ``temperature``; ``top_k`` keeps the k most probable tokens; ``top_p`` keeps the smallest
    set of the most probable remaining tokens whose share of the remaining mass reaches p; a token is drawn from what
    was kept. ``temperature=0`` takes the most probable token and ignores ``top_k`` and ``top_p``.
    """

    max_new_tokens: int = Field(ge=1, le=10**9)
    """A completion has at most this many tokens."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Logits are divided by this value before a token is drawn. 0 always takes the most probable token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Tokens are drawn from the smallest set of the most probable tokens that holds this share of the probability. 1
    keeps all tokens."""
    top_k: int = Field(default=0, ge=0, le=10**9)
    """Tokens are drawn from this many most probable tokens. 0 keeps all tokens."""
    stop_token_ids: tuple[StopToken, ...] = ()
    """A completion ends with the first of these tokens, or with the first of these texts, as in [</answer>]. A list
    without tokens means the end tokens of the tokenizer and the model.
    """
    n: int = Field(default=1, ge=1, le=65536)
    """Each prompt gets this many completions."""

    def to_request(self, **options: Any) -> RequestParams:
        """Return the same parameters with options that a request alone has."""
        return RequestParams(**{field.name: getattr(self, field.name) for field in fields(self)} | options)

    @property
    def min_p(self) -> float:
        """The share of the most probable token's probability that a token must reach; 0 keeps all tokens."""
        return 0.0

    @property
    def record_top(self) -> int:
        """The number of most probable tokens whose log-probabilities are recorded at each token."""
        return 0

    @property
    def record_experts(self) -> bool:
        """Whether the experts that a mixture of experts chose are recorded."""
        return False

    @property
    def filtered(self) -> bool:
        """Whether ``top_k``, ``top_p`` or ``min_p`` takes part, so that kept sets are recorded."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@section("sampling")
class RequestParams(SamplingParams):
    """How the completions of one request are sampled: a request may filter by more than a run does."""

    min_p: float = Field(default=0.0, ge=0, le=1)  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride] - a field for a property
    """Tokens whose probability is less than this share of the most probable token's are left out, before ``top_k`` and
    ``top_p`` choose among the rest."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these texts."""
    record_top: int = Field(default=0, ge=0, le=65536)  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride] - a field for a property
    """The log-probabilities of this many most probable tokens are recorded at each token. It does not go with
    ``top_k``, ``top_p`` or ``min_p``."""

    record_experts: bool = False  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride] - a field for a property
    """The experts that each layer of a mixture of experts chose for each token are recorded."""

    def __post_init__(self) -> None:
        if self.record_top and self.filtered:
            raise ConfigError(f"record_top = {self.record_top} with top_k, top_p or min_p: leave one of the two out")


@dataclass(frozen=True)
class KeptSet:
    """The tokens that top-k, top-p and min-p left to draw from, for each token of one completion.

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
            temperature and, where they were used, over the kept set and the mask. With temperature 0 it is that of the
            chosen token at temperature 1.
        finish_reason: ``"stop"`` (ended by a stop token or text) or ``"length"`` (``max_new_tokens`` reached).
        versions: int64 ``[L]``, the version of the weights that each token was drawn from.
        kept: the kept sets where top-k, top-p or min-p were used, else None.
        masks: The packed mask of the ids that each token was drawn from, in the form of
            :mod:`podium.rollout.engines.constraints`. It is None if no constraint restricted the ids. A kept set lies
            within its token's mask.
        reused: Number of the prompt's tokens whose keys and values the engine had already, where it counts them.
        top: float32 ``[L, 2 * J]`` for ``RequestParams.record_top`` J, else None: the log-probabilities of the J most
            probable tokens when each token was drawn, from the largest down, then their ids. Log-probabilities are -inf
            for those that a constraint forbids, and behind the last token of a vocabulary with fewer.
        experts: int16 ``[P + L - 1, C]`` for ``RequestParams.record_experts``, else None: the experts that the layers
            with experts chose, layer by layer, for the P tokens of the prompt and for all tokens but the last.
        stop: The text of ``RequestParams.stop`` that ended it, which its last token completes; "" for none.
    """

    token_ids: Tensor
    logprobs: Tensor
    finish_reason: FinishReason
    versions: Tensor
    kept: KeptSet | None = None
    masks: Sequence[bytes] | None = None
    reused: int = 0
    stop: str = ""
    top: Tensor | None = None
    experts: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)
