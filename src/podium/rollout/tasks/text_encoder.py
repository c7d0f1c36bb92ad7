"""Encode texts, and conversations of which only some spans are learned."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError, DataError
from podium.exceptions import describe_error
from podium.rollout.tasks.messages import half_pair
from podium.rollout.tasks.spans import Span, mask_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kept = tuple[str, list[tuple[int, int]]]
"""The text of a prompt, and the offsets of its tokens."""

_VAST: Final = 1_000_000  # characters: only texts of more are judged by their length before they are encoded


class TextEncoder:
    """Encodes texts with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def special(self) -> dict[str, int]:
        """The texts of the special tokens, and their ids."""
        return {token.content: at for at, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    def encode(self, texts: list[str], *, special: bool = False) -> list[list[int]]:
        """Return the ids of each text, with the tokenizer's first and last ones where ``special`` is True. A text that
        begins with the first ones, as a chat template wrote it, has them once.

        Raises:
            ConfigError: The tokenizer cannot encode a text.
            DataError: A text has a character that is none.
        """
        options = {"add_special_tokens": special, "return_attention_mask": False}
        encoded = self._encoding(texts, **options).get("input_ids", [])
        first = self._first if special else []
        repeats = 2 * first
        return [ids[len(first) :] if first and ids[: len(repeats)] == repeats else ids for ids in encoded]

    @cached_property
    def _first(self) -> list[int]:
        """The ids that the tokenizer puts before each text."""
        plain, whole = (self._tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[: next(starts, 0)] if plain else []

    def _encoding(self, texts: list[str], **options: Any) -> Any:
        try:
            return self._tokenizer(texts, **options) if texts else {}
        except Exception as error:
            halves = (f"{text[max(0, at - 20) : at + 20]!r}" for text in texts if (at := half_pair(text)) is not None)
            if (near := next(halves, None)) is None:
                reason = describe_error(error)
                raise ConfigError(
                    f"the tokenizer cannot encode {texts[0][:60]!r}: {reason}; set model.tokenizer"
                ) from error
            raise DataError(f"half of a surrogate pair, which is no text, stands near {near}; take it out") from None

    def encode_with_offsets(self, texts: list[str]) -> Any:
        """Return ids and offsets by the names of transformers. Raises as :meth:`encode`."""
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "return_attention_mask": False}
        return self._encoding(texts, **options)

    def encode_spans(
        self, text: str, spans: list[Span], ids: list[int], kept: Kept | None, *, marked: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Encode a conversation whose prompt has the ``ids``.

        Args:
            marked: Whether the template marks the spans, which may leave out a part of an answer.
            kept: The prompt's text, and the offsets of its tokens. Tokenizers read what stands between two special
                tokens by itself, so that only what follows the last one of the prompt is encoded again.

        Raises:
            DataError: The text in pieces has other characters than the whole.
        """
        joined: list[int] = []
        if self._tokenizer.is_fast:
            shared = begin = 0
            if kept is not None and len(kept[1]) == len(ids) and text.startswith(kept[0]):
                shared = self._last_special(kept, ids)
                begin = kept[1][shared][0] if shared else 0
            encoded = self.encode_with_offsets([text[begin:]])
            joined = [*ids[:shared], *encoded["input_ids"][0]]
            offsets = [(first + begin, last + begin) for first, last in encoded["offset_mapping"][0]]
            offsets = [*kept[1][:shared], *offsets] if kept and shared else offsets
            mask = mask_tokens(offsets, spans)
            read = min(len(ids), len(joined))  # a conversation may end before its last turn, which is not learned
            is_generated = read == len(joined) or any(s.start <= offsets[read][0] < s.stop for s in spans)
            if mask is not None and joined[:read] == ids[:read] and (marked or is_generated):
                return joined, mask
        done, pieces = 0, list[tuple[str, bool]]()
        for span in spans:
            pieces += [(text[done : span.start], False), (text[span.start : span.stop], span.learned)]
            done = span.stop
        tokens: list[int] = []
        mask = []
        for piece, (_, learned) in zip(self.encode([piece for piece, _ in pieces]), pieces, strict=True):
            tokens += piece
            mask += [learned] * len(piece)
        self.check_pieces(tokens, joined or self.encode([text])[0], text)
        return tokens, mask

    def check_pieces(self, pieces: list[int], whole: list[int], text: str) -> None:
        """Check that a text in pieces has the characters of the whole. Many tokenizers put a space before each text.

        Raises:
            DataError: It has others.
        """
        to_tokens = self._tokenizer.convert_ids_to_tokens
        decode = partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        read = (decode, lambda ids: "".join(map(str, to_tokens(ids))))
        if pieces != whole and all(reader(pieces) != reader(whole) for reader in read):
            raise DataError(
                f"the tokenizer merges the learned part of {text[:40]!r} with the text before it, and changes "
                "characters if the two are encoded separately: set data.chat_template to one with a special token or a "
                "new line before the answer"
            )

    def _last_special(self, kept: Kept, ids: list[int]) -> int:
        """Return the place of the last special token that the prompt's text has as such; 0 if there is none."""
        text, offsets = kept
        for at in reversed(range(len(ids))):
            if (name := self._special_names.get(ids[at])) and text.startswith(name, offsets[at][0]):
                return at
        return 0

    @cached_property
    def _special_names(self) -> dict[int, str]:
        return {token: name for name, token in self.special.items()}

    def is_vast(self, characters: int, tokens: int) -> bool:
        """Whether a text of so many characters has more than ``tokens`` tokens whatever they are. Encoding such a text
        would take minutes and gigabytes.
        """
        return characters > _VAST and characters > tokens * self.longest_token

    @cached_property
    def longest_token(self) -> int:
        """The most characters that one token of the vocabulary stands for."""
        return max(map(len, self._tokenizer.get_vocab()))
