"""Where the tokens of a service come from: an engine in the same process, or generators elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from podium_agents.service.session_recording import Sampled

if TYPE_CHECKING:
    from podium.rollout.engines.requests import PromptTokens, Tokens
    from podium.rollout.sampling import Completion, SamplingParams
    from podium_agents.service.admission import Admission
    from podium_agents.service.concurrency import Caller
    from podium_agents.service.constraints import Constraint

__all__ = ["Scored", "TokenSource", "read_sampled"]


@dataclass(frozen=True, slots=True)
class Scored:
    """How probable each of L tokens is after those before it.

    Attributes:
        logprobs: L natural logarithms.
        best: L ids, the most probable token at each place.
        best_logprobs: L natural logarithms, those of ``best``.
        top: L lists of the most probable tokens, each with its natural logarithm, where they were asked for.
        version: The version of the weights that say so.
    """

    logprobs: Sequence[float]
    best: Sequence[int]
    best_logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]] = ()
    version: int = 0


class TokenSource(Protocol):
    """Draws completions by token ids, many at a time.

    Attributes:
        admission: Lets sessions that begin there wait for memory.
    """

    admission: Admission

    @property
    def positions(self) -> int | None:
        """The most tokens of a prompt and its completion; None where any number is taken."""
        ...

    @property
    def in_flight(self) -> int:
        """The tokens that the requests in flight may still hold, prompts included."""
        ...

    @property
    def waiting(self) -> int:
        """The number of completions without a token so far, as far as this process knows."""
        ...

    @property
    def version(self) -> int:
        """The version of the weights, as far as this process knows."""
        ...

    @property
    def prompt_tokens(self) -> PromptTokens | None:
        """What became of the prompts' tokens so far; None where nobody counts it or another process does."""
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        session: str = "",
        tokens: bool = True,
        caller: Caller | None = None,
        constraint: Constraint | None = None,
        exact: bool = True,
    ) -> AsyncGenerator[Tokens | Sampled]:
        """Yield the tokens of a completion as they are drawn, and the whole completion at the end. Closing the iterator
        ends the request.

        Args:
            prompt: The ids that the model reads.
            params: How to draw; ``n`` is ignored.
            seed: Equal requests with equal seeds get equal completions.
            session: Name of the session. One generator draws all requests of a session, because it has cached their
                common beginning.
            tokens: Whether to yield tokens before the completion is finished. A source may yield none.
            caller: The request that wants the completion. Those of several requests take turns, where the source knows
                how.
            constraint: What may be drawn, if not everything.
            exact: Whether the completion may not depend on what else is drawn, not even by rounding. A source that
                knows no faster way takes no notice.

        Raises:
            ConfigError: The prompt does not fit the model.
            GenerationError: No token can be drawn.
        """
        ...

    def end_session(self, name: str) -> None:
        """Take note that no further call of a session comes. What is remembered of it may go."""
        ...

    async def score(
        self, ids: Sequence[int], *, first: int = 1, top: int = 0, temperature: float = 1.0, session: str = ""
    ) -> Scored:
        """Return the log-probabilities of a text's tokens from ``first`` on, and the ``top`` most probable tokens at
        each place that may be drawn. Nothing comes before token 0. One generator serves a session, as in ``stream``.

        Raises:
            ConfigError: This source gives no such log-probabilities, or the ids do not fit the model.
        """
        ...


def read_sampled(drawn: Completion) -> Sampled:
    """The engine's completion as plain numbers."""
    kept = None
    if drawn.kept is not None:
        kept = [drawn.kept.at(index).tolist() for index in range(len(drawn))]
    return Sampled(
        drawn.token_ids.tolist(), drawn.logprobs.tolist(), drawn.versions.tolist(), drawn.finish_reason, kept,
        drawn.masks, drawn.reused,
    )  # fmt: skip
