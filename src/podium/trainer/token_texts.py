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

        >>> from podium.workers import char_tokenizer
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
            own = own if not own or text.startswith(own, place) else f" {own}"
            if parts or not text.startswith(own, place):
                parts.append(number)
                own = self._decode(parts)
                if own.endswith(_NO_CHARACTER) or not text.startswith(own, place):
                    own = ""
                    if len(parts) > _MOST_BYTES and place < len(text):
                        return None
                else:
                    parts = []
            lengths.append(len(own))
            place += len(own)
        if place < len(text) and lengths:  # the end of a text that stops within a token
            lengths[-1] += len(text) - place if self._decode(parts).startswith(text[place:]) else 0
            place = sum(lengths)
        return lengths if place == len(text) else None
