"""Which characters of a completion each token wrote, for tokenizers of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from podium.trainer.token_texts import TokenTexts


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte, ids 0 to 255 in no order, and <end>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def words() -> PreTrainedTokenizerFast:
    """Words with their space in front, which is not decoded of the first one: as SentencePiece has it."""
    vocabulary = {"▁one": 0, "▁two": 1, "▁": 2, "th": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def cut(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str | None = None) -> list[int] | None:
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True)) if text is None else text
    return TokenTexts(tokenizer).lengths(ids, text)


@pytest.mark.parametrize("text", ["", "abc", "é", "a你b好", "👩‍🚀x", "naïve\n\x1b[0m"])
def test_of_the_bytes_of_a_character_the_last_has_it(text: str) -> None:
    tokenizer = byte_level()
    ids = cast("list[int]", tokenizer.encode(text, add_special_tokens=False))
    expected = [length for letter in text for length in [*[0] * (len(letter.encode()) - 1), 1]]
    assert cut(tokenizer, ids) == expected
    assert cut(tokenizer, [*ids, 256]) == [*expected, 0]


@pytest.mark.parametrize("end", [1, 2])
def test_a_completion_that_ends_within_a_character_keeps_its_sum(end: int) -> None:
    tokenizer = byte_level()
    ids = [*cast("list[int]", tokenizer.encode("ab你", add_special_tokens=False))[: 2 + end]]
    found = cut(tokenizer, ids)
    assert found is not None
    assert found[:2] == [1, 1]
    assert sum(found) == len(str(tokenizer.decode(ids)))


def test_a_space_that_a_token_has_only_after_another_is_its_own() -> None:
    tokenizer = words()
    assert tokenizer.decode([0, 1, 3, 0]) == "one twoth one"
    assert cut(tokenizer, [0, 1, 3, 0]) == [3, 4, 2, 4]


def test_a_text_that_stops_within_a_token_ends_there() -> None:
    tokenizer = words()
    assert cut(tokenizer, [0, 1], "one t") == [3, 2]


@pytest.mark.parametrize("text", ["something else", "one twoX", ""])
def test_another_text_has_no_lengths(text: str) -> None:
    found = cut(words(), [0, 1], text)
    assert found is None or sum(found) == len(text)


def test_each_id_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    asked: list[list[int]] = []
    decode = cast("Callable[..., str]", tokenizer.decode)

    def counted(ids: list[int], **options: bool) -> str:
        asked.append(ids)
        return decode(ids, **options)

    ids = cast("list[int]", tokenizer.encode("abab", add_special_tokens=False))
    monkeypatch.setattr(tokenizer, "decode", counted)
    texts = TokenTexts(tokenizer)
    for _ in range(3):
        assert texts.lengths(ids, "abab") == [1, 1, 1, 1]
    assert len(asked) == 2
