"""Which prompts of the native engine's queue go through the model together, and which requests are drawn alike."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import dropwhile, groupby, islice
from typing import NamedTuple, TypeAlias

from podium.rollout.engines.constraints import Guided
from podium.rollout.engines.requests import Request, RequestQueue
from podium.rollout.sampling import SamplingParams
from podium_native.decoder import Prefill
from podium_native.memory import Match

__all__ = ["Beginning", "Key", "Seen", "cut_texts", "drawing_of", "find_due", "guide_of", "key_of"]

Key: TypeAlias = tuple[Sequence[int], bool]
"""A prompt, and whether what decoding computed may serve it."""


class Seen(NamedTuple):
    """A prompt that went through the model, in row ``row`` of ``prefill``; ``exact`` of its positions as in a lane.

    ``computed`` of its tokens went through the model; 0 after the first request has them."""

    prefill: Prefill
    row: int
    exact: int
    computed: int


class Beginning(NamedTuple):
    """The first ``length`` positions of a prompt, the first ``exact`` as in a prefill, in a lane or in pages."""

    length: int = 0
    exact: int = 0
    lane: int = -1
    match: Match | None = None


@lru_cache(maxsize=1024)
def drawing_of(params: SamplingParams) -> SamplingParams:
    """``params`` without what does not change how a token is drawn."""
    filters = {} if params.filtered else {"top_p": 1.0, "top_k": 0}
    return replace(params, max_new_tokens=1, stop_token_ids=(), n=1, **filters)


def key_of(request: Request) -> Key:
    """What tells the request's prompt from others."""
    return request.prompt, request.reuse_completions


def guide_of(request: Request, vocabulary: int) -> Guided | None:
    """What says which of ``vocabulary`` ids may come next; None where all may."""
    if request.constraint is None:
        return None
    return request.constraint.begin(request.params.stop_token_ids, vocabulary)


def find_due(waiting: RequestQueue, last: Key, count: int) -> list[Key]:
    """Prompts after ``last`` of which all requests are among the next ``count``."""
    coming = list(islice(dropwhile(lambda key: key == last, map(key_of, waiting)), count + 1))
    return [key for key, _ in groupby(coming) if len(coming) <= count or key != coming[-1]]


def cut_texts(texts: Sequence[Sequence[int]], most_tokens: int) -> Iterator[slice]:
    """Cut ``texts``, in order, where a part padded to its longest would exceed ``most_tokens``; at least one each."""
    start, width = 0, 0
    for at, text in enumerate(texts):
        width = max(width, len(text))
        if at > start and width * (at + 1 - start) > most_tokens:
            yield slice(start, at)
            start, width = at, len(text)
    if start < len(texts):
        yield slice(start, len(texts))
