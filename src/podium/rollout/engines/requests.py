"""Records of the engine contract: requests go in, events come out."""

import math
from bisect import insort
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from podium.errors import GenerationError
from podium.rollout.engines.constraints import Constraint
from podium.rollout.sampling import Completion, KeptSet, SamplingParams

RequestId: TypeAlias = Hashable


@dataclass(frozen=True, slots=True, eq=False)
class RowOfBatch:
    """Id of one completion of ``Engine.generate``. It is equal to no other id."""

    index: int
    n: int

    def __str__(self) -> str:
        return f"completion {self.index % self.n} of prompt {self.index // self.n}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One completion that a caller asks for.

    Attributes:
        id: Name of the request in its events and in ``Engine.abort``. Requests in flight have different ids.
        prompt: Token ids, at least one.
        params: How tokens are drawn. ``params.n`` is ignored, because a request is one completion.
        seed: Signed integer of 64 bits. Equal requests with equal seeds get equal completions.
        priority: An engine begins requests of a higher priority first, and requests of equal priority in the order of
            arrival.
        stream: Whether the engine reports tokens before the completion is finished.
        reuse_completions: Whether an engine may build on keys and values that it computed while it drew an earlier
            completion. These differ from those of a fresh prompt by rounding: log-probabilities agree within 1e-5 in
            float32. An engine may always reuse what it computed for earlier prompts, because the results are the same.
        constraint: What may be drawn, if not everything. Only an engine that says so (``Engine.constrains``) takes it.
        session: Name of the session to which it belongs, as ``Engine.end_session`` gets it; "" for none.
        exact: Whether the completion may not depend on what else the engine draws, where the engine promises that at
            all. Without it rounding may differ, and a few requests on the CPU are drawn twice as fast.
    """

    id: RequestId
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    stream: bool = False
    reuse_completions: bool = True
    constraint: Constraint | None = None
    session: str = ""
    exact: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(self.prompt))  # compared and kept; a list might change

    def __str__(self) -> str:
        return str(self.id) if isinstance(self.id, RowOfBatch) else f"request {self.id!r}"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next tokens of a request with ``stream``. The event ``Finished`` repeats all of them. ``reused`` is that of
    the completion, which may be aborted before it is finished."""

    id: RequestId
    token_ids: list[int]
    logprobs: list[float]
    version: int
    reused: int = 0

    def without_last(self, count: int) -> "Tokens":
        """Return these tokens without the last ``count``."""
        last = len(self.token_ids) - count
        return Tokens(self.id, self.token_ids[:last], self.logprobs[:last], self.version, self.reused)


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole completion of a request. It is the last event of that request."""

    id: RequestId
    completion: Completion


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has no completion because of ``error``. It is the last event of that request."""

    id: RequestId
    error: Exception


@dataclass(frozen=True, slots=True)
class Aborted:
    """The request was aborted before it was finished. It is the last event of that request."""

    id: RequestId


Event: TypeAlias = Tokens | Finished | Failed | Aborted


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """What became of the tokens of prompts.

    Attributes:
        read: Tokens of all prompts that began.
        reused: Those whose keys and values the engine had already.
        evicted: Positions whose keys and values the engine forgot because memory was short.
    """

    read: int
    reused: int
    evicted: int


class SessionRoom(NamedTuple):
    """How much of open sessions an engine remembers between their turns: any ``sessions`` of them, and of others as
    many as have ``tokens`` together."""

    sessions: int
    tokens: int

    def holds(self, sessions: int, tokens: int) -> bool:
        """Whether ``sessions`` equally long sessions with ``tokens`` tokens in all are remembered."""
        return tokens * max(0, sessions - self.sessions) <= self.tokens * sessions


class RequestQueue:
    """The requests that an engine has not begun, in the order in which it should begin them.

    The engine's base class adds requests and removes those that were aborted; ``advance`` takes those that it begins.

    Attributes:
        longest: An upper bound of the positions that any of these requests may take.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.longest = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, requests: Iterable[Request]) -> None:
        """Add requests behind those of the same priority."""
        for request in requests:
            insort(self._requests, request, key=lambda one: -one.priority)
            self.longest = max(self.longest, len(request.prompt) + request.params.max_new_tokens)

    def next_turn(self) -> int:
        """Return a priority for the request of another caller, by which it takes turns with those that wait.

        A caller that sends many requests gives each a lower priority than the one before. The new request then comes
        after the next one of each of these, and before their further ones.
        """
        requests = self._requests
        return max(requests[0].priority - 1, requests[-1].priority) if requests else 0

    def take(self, count: int, alike: Callable[[Request], object] | None = None) -> list[Request]:
        """Remove and return the first ``count`` requests, or fewer.

        With ``alike``, only requests for which it returns the same value as for the first one are taken.
        """
        if alike is None:
            taken, self._requests = self._requests[:count], self._requests[count:]
            self.drop(())
        else:
            taken = [request for request in self._requests if alike(request) == alike(self._requests[0])][:count]
            self.drop({request.id for request in taken})
        return taken

    def drop(self, ids: Collection[RequestId]) -> None:
        """Remove those of the requests ``ids`` that are in the queue."""
        if ids:
            self._requests = [request for request in self._requests if request.id not in ids]
        if not self._requests:
            self.longest = 0


@torch.inference_mode(False)  # what is returned may take part in training, which inference tensors may not
def conclude(
    request: Request,
    token_ids_L: Tensor | np.ndarray,
    logprobs_L: Tensor | np.ndarray,
    versions: int | Tensor,
    kept: Sequence[Tensor] | None = None,
    masks: Sequence[bytes] | None = None,
    top: Sequence[Tensor] | None = None,
    experts: Tensor | None = None,
    *,
    reused: int = 0,
) -> Finished | Failed:
    """Return the last event of a request.

    Args:
        request: The request that the tokens were drawn for.
        token_ids_L: Ids of all tokens, int64 on the CPU, with the stop token if there was one.
        logprobs_L: Their log-probabilities, float32 on the CPU.
        versions: Version of the weights that drew each token, int64 ``[L]``, or one for all.
        kept: Where top-k, top-p or min-p were used, the ids kept for each token, most probable first.
        masks: Where a constraint restricted the ids, each token's mask.
        top: With ``RequestParams.record_top``, the row of ``Completion.top`` of each token.
        reused: ``Completion.reused``.
        experts: With ``RequestParams.record_experts``, ``Completion.experts``.
    """
    ids, logprobs = np.asarray(token_ids_L), np.asarray(logprobs_L)  # NumPy handles a single row faster than torch
    if not math.isfinite(logprobs.sum()):
        position = int((~np.isfinite(logprobs)).argmax())
        return Failed(
            request.id,
            GenerationError(
                f"the log-probability of token {position} of {request} is {logprobs[position]}: the model's logits "
                "are not finite; look at the last update's gradient norm and learning rate, or at the checkpoint"
            ),
        )
    kept_set = None
    if kept is not None:
        sizes = torch.tensor([0, *map(len, kept)], dtype=torch.int64)
        kept_set = KeptSet(torch.cat(list(kept)), sizes.cumsum(0))
    completion = Completion(
        token_ids=torch.from_numpy(ids.copy()),  # no view of a whole batch
        logprobs=torch.from_numpy(logprobs.copy()),
        finish_reason="stop" if int(ids[-1]) in request.params.stop_token_ids else "length",
        versions=torch.from_numpy(np.full(len(ids), versions)) if isinstance(versions, int) else versions,
        kept=kept_set,
        masks=masks,
        reused=reused,
        top=None if top is None else torch.stack(list(top)).cpu(),
        experts=experts,
    )
    return Finished(request.id, completion)
