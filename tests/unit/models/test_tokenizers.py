from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from podium.errors import ConfigError
from podium.models import char_tokenizer, load_tokenizer
from podium.models.tokenizers import explain_other_encoding

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


def write_tokenizer(folder: Path, stored: Any, model_type: str, **settings: str) -> Path:
    folder.mkdir()
    stored.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def train_tokenizer(model: Any, **parts: Any) -> Any:
    """A tokenizer with 300 to 400 tokens, of which <s> and </s> are special."""
    stored: Any = Tokenizer(model)
    for name, part in parts.items():
        setattr(stored, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    stored.train_from_iterator(["Hello world, 123456 is a number. And 2024 is one, too."] * 20, trainer)
    return stored


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"tokenizer_class": "LlamaTokenizerFast"}),  # as DeepSeek-R1-Distill-Llama has it
        ("qwen2", {"tokenizer_class": "PreTrainedTokenizerFast"}),  # transformers replaces the class by Qwen's
        ("qwen3", {}),
        ("gemma3_text", {"tokenizer_class": "GemmaTokenizerFast"}),
    ],
)
def test_text_is_encoded_as_the_file_says_and_not_as_a_class_of_transformers_does(
    tmp_path: Path, model_type: str, settings: dict[str, str]
) -> None:
    three_digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    stored = train_tokenizer(
        models.BPE(),
        pre_tokenizer=pre_tokenizers.Sequence([three_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        decoder=decoders.ByteLevel(),
    )
    begin = stored.token_to_id("<s>")
    stored.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    template = "{{ messages[0].content }}"
    settings = {**settings, "bos_token": "<s>", "chat_template": template}
    text = "Hello world, 123456.\n  It's café"
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "model", stored, model_type, **settings)))
    assert tokenizer.encode(text) == stored.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "</s>")
    assert tokenizer.chat_template == template
    assert len(tokenizer) == stored.get_vocab_size()
    tokenizer.save_pretrained(str(tmp_path / "model"))  # as an export does, beside config.json
    again = load_tokenizer(str(tmp_path / "model"))
    assert again.encode(text) == stored.encode(text).ids
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    others = explain_other_encoding(str(tmp_path / "model"))
    assert bool(others) == (loaded.encode(text) != stored.encode(text).ids)
    assert not others or "PreTrainedTokenizerFast.from_pretrained" in others


def test_a_character_tokenizer_of_an_exported_qwen_keeps_its_spaces(tmp_path: Path) -> None:
    char_tokenizer("0123456789+= \n").save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert load_tokenizer(str(tmp_path)).encode(TEXT) == char_tokenizer("0123456789+= \n").encode(TEXT)
    assert "AutoTokenizer makes a Qwen2Tokenizer of it" in explain_other_encoding(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert explain_other_encoding(str(tmp_path)) == explain_other_encoding(str(tmp_path / "none")) == ""


def test_a_class_that_encodes_as_the_file_says_stays(tmp_path: Path) -> None:
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    stored = train_tokenizer(models.BPE(byte_fallback=True, fuse_unk=True), normalizer=spaces)
    folder = write_tokenizer(tmp_path / "llama", stored, "llama", tokenizer_class="LlamaTokenizerFast")
    tokenizer = load_tokenizer(str(folder))
    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(str(folder)))
    assert type(tokenizer).__name__ == "LlamaTokenizer"


def test_answers_keep_the_spaces_that_were_sampled(tmp_path: Path) -> None:
    """transformers 4 saves each tokenizer of one's own with a clean-up of spaces. Rewards compare what is decoded."""
    char_tokenizer("abc ,.'n!").save_pretrained(str(tmp_path))
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "clean_up_tokenization_spaces": True}))
    text = "a , b . ' ' c !"
    assert AutoTokenizer.from_pretrained(str(tmp_path)).decode(char_tokenizer("abc ,.'n!").encode(text)) != text
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    tokenizer.save_pretrained(str(tmp_path / "again"))
    assert AutoTokenizer.from_pretrained(str(tmp_path / "again")).decode(tokenizer.encode(text)) == text
