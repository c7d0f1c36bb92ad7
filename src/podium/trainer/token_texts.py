"""Which characters of a completion each of its tokens wrote."""

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

__all__ = ["TokenTexts"]

_NO_CHARACTER: Final = "\ufffd"  # what bytes decode to that are no whole character
_MOST_BYTES: Final = 4  # of a character in UTF-8, so also its most tokens


class TokenTexts:
    """Cuts completions into the texts of their tokens. Each id is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def lengths(self, ids: Sequence[int], text: str) -> list[int] | None:
        """Return how many characters of ``text`` each token wrote; None where ``text`` is not what the tokens say.

        Special tokens have 0. Of tokens that are parts of one character, the last has it.

        >>> from podium.models import char_tokenizer
        >>> TokenTexts(char_tokenizer("ab")).lengths([4, 5, 5, 2], "abb")
        [1, 1, 1, 0]
        """
        texts = [self._text(number) for number in ids]
        return [*map(len, texts)] if "".join(texts) == text else self._aligned(ids, texts, text)

    def _text(self, number: int) -> str:
        found = self._texts.get(number)
        if found is None:
            found = self._texts[number] = self._decode([number])
        return found

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _aligned(self, ids: Sequence[int], texts: Sequence[str], text: str) -> list[int] | None:
        """As ``lengths`` where tokens by themselves say something else: parts of characters, words without a space."""
        lengths: list[int] = []
        parts: list[int] = []
        place = 0
        for number, own in zip(ids, texts, strict=True):
            found = None if parts else _at(place, own, text)
            if found is None:
                parts.append(number)
                joint = self._decode(parts)
                found = 0 if joint.endswith(_NO_CHARACTER) else _at(place, joint, text) or 0
                if found:
                    parts = []
                elif len(parts) > _MOST_BYTES and place < len(text):
                    return None
            lengths.append(found)
            place += found
        rest = text[place:]
        if rest and parts and _at(0, rest, self._decode(parts), f" {self._decode(parts)}"):
            lengths[-1] += len(rest)  # the text stops within a token
            place = len(text)
        return lengths if place == len(text) else None


def _at(place: int, own: str, *texts: str) -> int | None:
    """The length that ``own``, or a space and ``own``, has at ``place`` of one of ``texts``; None if it is in none."""
    for text in texts:
        for written in (own, f" {own}"):
            if text.startswith(written, place):
                return len(written)
    return None
