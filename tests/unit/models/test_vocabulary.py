"""Ids that stand for no text: rows of a model beyond its tokenizer, holes, and tokens that the model has no row for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from podium.errors import ConfigError
from podium.models import ModelConfig
from podium.models.vocabulary import find_ids_beyond, find_text_ids
from podium.telemetry import Note, subscribe
from podium.trainer.checks.preflight import check_vocabulary

NAMES = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3}


def tokenizer_of(
    names: dict[str, int], special: Sequence[str] = (), added: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    core = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.add_tokens(list(added))
    return tokenizer


def model_of(vocabulary: int) -> ModelConfig:
    return ModelConfig(config={"model_type": "qwen3", "vocab_size": vocabulary}, tokenizer="chars:ab")


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary", "expected"),
    [
        (tokenizer_of(NAMES), 4, None),
        (tokenizer_of(NAMES), 10, (4, ())),
        (tokenizer_of({**NAMES, "c": 7}), 8, (8, (4, 5, 6))),
        (tokenizer_of({**NAMES, "c": 7}), 12, (8, (4, 5, 6))),
        (tokenizer_of({**NAMES, "c": 7}), 6, (4, ())),  # and "c" has no row
        (tokenizer_of(NAMES, special=["<a>"], added=["<b>"]), 6, None),  # added tokens come after the vocabulary
        (tokenizer_of(NAMES, special=["<a>"], added=["<b>"]), 9, (6, ())),
    ],
)
def test_rows_without_a_token_are_found(
    tokenizer: PreTrainedTokenizerBase, vocabulary: int, expected: tuple[int, tuple[int, ...]] | None
) -> None:
    assert find_text_ids(model_of(vocabulary), tokenizer) == expected


def test_two_tokens_that_are_written_alike_are_both_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(NAMES)
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda _: {"<unk>": 0, "</s>": 1, "a": 3})  # 2 is another "a"
    assert find_text_ids(model_of(4), tokenizer) is None


def test_an_end_of_the_models_own_is_drawn_although_the_tokenizer_lacks_it(tmp_path: Path) -> None:
    tokenizer_of(NAMES).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 10}))
    model = ModelConfig(path=str(tmp_path))
    assert find_text_ids(model, tokenizer_of(NAMES)) == (4, ())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 6]}))
    assert find_text_ids(model, tokenizer_of(NAMES)) == (7, (4, 5))


def test_a_tokenizer_that_is_larger_than_the_model_is_refused() -> None:
    tokenizer = tokenizer_of(NAMES, added=["<think>"])
    assert find_ids_beyond(model_of(3), tokenizer) == {3: "b", 4: "<think>"}
    with pytest.raises(ConfigError, match=r"2 tokens of the tokenizer, such as 'b' \(3\), are beyond .* of 3: .*set"):
        check_vocabulary(model_of(3), tokenizer, ())
    with pytest.raises(ConfigError, match=r"1 token of the tokenizer, such as '<think>' \(4\), is beyond"):
        check_vocabulary(model_of(4), tokenizer, ())
    check_vocabulary(model_of(5), tokenizer, (1,))


def test_special_tokens_without_a_row_are_noted_unless_they_end_a_completion() -> None:
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    tokenizer = tokenizer_of(NAMES, special=["<image>"])  # as Gemma 3 has one
    try:
        check_vocabulary(model_of(4), tokenizer, (1,))
    finally:
        unsubscribe()
    assert len(notes) == 1 and "'<image>' (4)" in notes[0] and "a text that contains one is refused" in notes[0]
    with pytest.raises(ConfigError, match=r"the stop token 4 .* never sampled, .*: the model has no row for it"):
        check_vocabulary(model_of(4), tokenizer, (1, 4))
    with pytest.raises(ConfigError, match=r"the stop token 6 .* never sampled, .*: it stands for no text"):
        check_vocabulary(model_of(8), tokenizer, (6,))
