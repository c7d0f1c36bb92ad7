"""Texts that end a completion, and the tokens that complete them: for engines, and for the service.

A text may begin and end within tokens. The completion ends with the token that completes it, and keeps that token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from podium.rollout.sampling import Completion

_MARGIN: Final = 8
"""Characters by which the front of a decoded part may differ from the whole text: half a character, a lost space."""
_LOOK_EVERY: Final = 8  # tokens after which a watch looks, because decoding takes longer than drawing a few of them

Decode = Callable[[Sequence[int]], str]


def find_stop(text: str, stops: Sequence[str]) -> str:
    """Return that of ``stops`` which comes first in a text, of several at one place the longest; "" for none."""
    matches = [(position, -len(stop), stop) for stop in stops if (position := text.find(stop)) >= 0]
    return min(matches)[2] if matches else ""


def before_stop(text: str, stops: Sequence[str]) -> str:
    """What stands before the first of ``stops``."""
    return text[: min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)]


def write_completion(ids: Sequence[int], stop: str, tokenizer: Any) -> str:
    """Return the text of a completion as rewards grade it and people read it: without special tokens, and up to the
    text ``stop`` that ended it, "" for none."""
    text = str(tokenizer.decode([*ids], skip_special_tokens=True))
    return before_stop(text, [stop]) if stop else text


def ends_now(ids: Sequence[int], new: int, stops: Sequence[str], decode: Decode) -> bool:
    """Whether one of ``stops`` has come with the last ``new`` tokens. Of those before, only as many are decoded as the
    longest of ``stops`` may reach back."""
    reach, count = max(map(len, stops)) + _MARGIN, 0
    former_ids = ids[: len(ids) - new]
    while count < len(former_ids):
        count = min(len(former_ids), 2 * count or reach)
        if len(decode(former_ids[len(former_ids) - count :])) >= reach:
            break
    part = ids[len(former_ids) - count :]
    return _has(part, stops, decode) and (len(part) == len(ids) or _has(ids, stops, decode))


def count_to_stop(ids: Sequence[int], stops: Sequence[str], decode: Decode) -> int | None:
    """Return the number of tokens up to the one that completes one of ``stops``; None if none of them came."""
    if not stops or not _has(ids, stops, decode):
        return None
    counts = range(1, len(ids) + 1)
    return counts[bisect_left(counts, True, key=lambda count: _has(ids[:count], stops, decode))]


def cut_completion(completion: Completion, stops: Sequence[str], decode: Decode) -> Completion:
    """Return a completion up to the token that completes one of ``stops``, with that text; all of it if none came."""
    ids: list[int] = completion.token_ids.tolist()
    if (count := count_to_stop(ids, stops, decode)) is None:
        return completion
    kept, masks = completion.kept, completion.masks
    if kept is not None:
        kept = replace(kept, ids=kept.ids[: int(kept.offsets[count])], offsets=kept.offsets[: count + 1])
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        versions=completion.versions[:count],
        finish_reason="stop",
        kept=kept,
        masks=None if masks is None else masks[:count],
        top=None if completion.top is None else completion.top[:count],
        experts=None if completion.experts is None else completion.experts[: count - len(completion) or None],
        stop=find_stop(decode(ids[:count]), stops),
    )


class Watch:
    """Looks for texts that end a completion while it is drawn. Several tokens are decoded at once.

    Attributes:
        is_over: Whether one of the texts has come, as far as this has looked.
    """

    def __init__(
        self, stops: Sequence[str], decode: Decode, ids: Sequence[int] = (), look_every: int = _LOOK_EVERY
    ) -> None:
        self._stops, self._decode, self._ids, self._look_every = stops, decode, [*ids], look_every
        self._new, self.is_over = len(self._ids), False

    def add(self, ids: Sequence[int]) -> bool:
        """Add further tokens. Return whether one of the texts has come, as far as this has looked."""
        self._ids += ids
        self._new += len(ids)
        if self._new < self._look_every:
            return self.is_over
        new, self._new = self._new, 0
        self.is_over = self.is_over or ends_now(self._ids, new, self._stops, self._decode)
        return self.is_over

    def count_beyond(self) -> int:
        """Return the number of tokens after the one that completes a text."""
        count = count_to_stop(self._ids, self._stops, self._decode)
        return 0 if count is None else len(self._ids) - count


def _has(ids: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    text = decode(ids)
    return any(stop in text for stop in stops)
