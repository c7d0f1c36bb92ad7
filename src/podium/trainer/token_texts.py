"""Finds the characters that each token of a completion wrote."""

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

_NO_CHARACTER: Final = "\ufffd"  # the character that incomplete bytes decode to
_MOST_BYTES: Final = 4  # bytes of a character in UTF-8, so also the most tokens of a character


class TokenTexts:
    """Cuts completions into the texts of their tokens. Each id is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def lengths(self, ids: Sequence[int], text: str) -> list[int] | None:
        """Return the number of characters of ``text`` that each token wrote; None if ``text`` differs from the texts of
        the tokens.

        Special tokens wrote 0. If several tokens are parts of one character, the last of them counts it.

        >>> from podium.models import char_tokenizer
        >>> TokenTexts(char_tokenizer("ab")).lengths([4, 5, 5, 2], "abb")
        [1, 1, 1, 0]
        """
        texts = [self._text(number) for number in ids]
        return [*map(len, texts)] if "".join(texts) == text else self._align(ids, texts, text)

    def _text(self, number: int) -> str:
        token_text = self._texts.get(number)
        if token_text is None:
            token_text = self._texts[number] = self._decode([number])
        return token_text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _align(self, ids: Sequence[int], texts: Sequence[str], text: str) -> list[int] | None:
        """As ``lengths``, for tokens whose texts differ when they are decoded alone: parts of characters, words without
        a space."""
        lengths: list[int] = []
        parts: list[int] = []
        position = 0
        for number, token_text in zip(ids, texts, strict=True):
            length = None if parts else _match_at(position, token_text, text)
            if length is None:
                parts.append(number)
                joint = self._decode(parts)
                length = 0 if joint.endswith(_NO_CHARACTER) else _match_at(position, joint, text) or 0
                if length:
                    parts = []
                elif len(parts) > _MOST_BYTES and position < len(text):
                    return None
            lengths.append(length)
            position += length
        rest = text[position:]
        if rest and parts and _match_at(0, rest, self._decode(parts), f" {self._decode(parts)}"):
            lengths[-1] += len(rest)  # the text stops within a token
            position = len(text)
        return lengths if position == len(text) else None


def _match_at(place: int, own: str, *texts: str) -> int | None:
    """Return the length of ``own``, or of a space and ``own``, if one of ``texts`` has it at ``place``; otherwise
    None."""
    for text in texts:
        for written in (own, f" {own}"):
            if text.startswith(written, place):
                return len(written)
    return None
