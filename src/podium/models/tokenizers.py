"""Tokenizers: those that transformers loads, and a small one of Podium with one token a character."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, cast

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from podium.errors import ConfigError
from podium.exceptions import read_text
from podium.hub import explain_offline, look_for_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHARACTERS_PREFIX: Final = "chars:"
"""A tokenizer setting with this prefix has an alphabet instead of a path: ``chars:0123456789+=``."""


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or hub name, or make one of ``chars:ALPHABET`` by :func:`char_tokenizer`.

    A tokenizer without a padding token gets its end-of-sequence token as one.

    Raises:
        ConfigError: There is nothing that transformers reads, or nothing but special tokens.
    """
    if source.startswith(CHARACTERS_PREFIX):
        return char_tokenizer(source.removeprefix(CHARACTERS_PREFIX))
    if not source:
        raise ConfigError(
            "model.tokenizer is empty: give a directory or hub name, or 'chars:ALPHABET' for one token a character"
        )
    look_for_hub(source)
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if not {*loaded.get_vocab().values()} - {*loaded.added_tokens_decoder}:  # made without any of its files
            raise ValueError("its files are missing, so that it has only special tokens")
    except Exception as error:
        origin = (
            f"in the directory {source}" if os.path.isdir(source) else f"on the hub at {source!r}, no directory here"
        )
        if offline := explain_offline(error):
            raise ConfigError(f"no tokenizer {source!r}: {offline}") from error
        reason = read_text(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(f"no tokenizer {origin}: {reason}; set model.tokenizer") from error
    tokenizer = cast("PreTrainedTokenizerBase", loaded)
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def char_tokenizer(alphabet: str, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token a character: ids 0 to 3 are <pad>, <bos>, <eos> and <unk>, then the alphabet.

    Encoding adds no special token, so that prompt and completion encode to the same ids apart and together. A character
    outside the alphabet becomes <unk>. ``AutoTokenizer`` loads what ``save_pretrained`` writes.

    Args:
        alphabet: The characters, white space included. Repeated ones count once.
        chat_template: A Jinja template, as transformers has them.

    Raises:
        ConfigError: The alphabet is empty.

    >>> tokenizer = char_tokenizer("0123456789+=")
    >>> tokenizer.encode("1+2="), tokenizer.decode([5, 14, 6])
    ([5, 14, 6, 15], '1+2')
    """
    if not alphabet:
        raise ConfigError(
            "the alphabet of a character tokenizer is empty; list its characters, e.g. 'chars:0123456789'"
        )
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {token: number for number, token in enumerate([*special.values(), *dict.fromkeys(alphabet)])}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    core.pre_tokenizer = cast(Any, pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated"))
    core.decoder = cast(Any, decoders.Fuse())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, padding_side="right", **special
    )
    tokenizer.chat_template = chat_template
    return tokenizer
