from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from podium.errors import ConfigError
from podium.models import char_tokenizer, load_tokenizer

TEXT = "12 +\n3=15"


def test_one_token_a_character_and_back() -> None:
    tokenizer = char_tokenizer("0123456789+= \n")
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_parts_encode_to_the_same_ids_apart_and_together() -> None:
    tokenizer = char_tokenizer("0123456789+=")
    assert tokenizer.encode("1+2=") + tokenizer.encode("3") == tokenizer.encode("1+2=3")


def test_an_unknown_character_becomes_one_unknown_token_and_special_tokens_are_recognised() -> None:
    tokenizer = char_tokenizer("01")
    assert tokenizer.encode("0é1<eos>") == [4, 3, 5, 2]
    assert tokenizer.decode([4, 2], skip_special_tokens=True) == "0"


def test_transformers_loads_what_was_saved_with_its_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    char_tokenizer("0123456789+= \n", chat_template=template).save_pretrained(str(tmp_path))
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)
    assert loaded.apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False) == "1+2="


def test_an_alphabet_as_a_setting_and_errors_that_name_the_setting(tmp_path: Path) -> None:
    assert load_tokenizer("chars:ab").encode("ba") == [5, 4]
    with pytest.raises(ConfigError, match="alphabet"):
        load_tokenizer("chars:")
    with pytest.raises(ConfigError, match=r"model\.tokenizer"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"model\.tokenizer is empty"):
        load_tokenizer("")


def test_a_model_without_the_files_of_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # for which transformers makes an empty one
    with pytest.raises(
        ConfigError, match=r"no tokenizer in the directory .*its files are missing.*set model\.tokenizer"
    ):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    tokenizer = char_tokenizer("01")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(str(tmp_path))
    assert load_tokenizer(str(tmp_path)).pad_token_id == 2
