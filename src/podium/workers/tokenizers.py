"""Tokenizers: those of a model directory, and a small one of our own with one token a character."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from podium.errors import ConfigError

__all__ = ["CHARACTERS_PREFIX", "char_tokenizer", "load_tokenizer"]

CHARACTERS_PREFIX: Final = "chars:"
"""A tokenizer setting that begins so names an alphabet instead of a path: ``chars:0123456789+=``."""


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub name, or ``chars:ALPHABET`` for :func:`char_tokenizer`.

    A tokenizer without a padding token gets its end-of-sequence token as one.

    Raises:
        ConfigError: nothing there that transformers reads.
    """
    if source.startswith(CHARACTERS_PREFIX):
        return char_tokenizer(source.removeprefix(CHARACTERS_PREFIX))
    if not source:
        raise ConfigError(
            "model.tokenizer is empty: give a directory or hub name, or 'chars:ALPHABET' for one token a character"
        )
    try:
        tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(source))
    except (OSError, ValueError, KeyError) as error:
        place = (
            f"in the directory {source}" if Path(source).is_dir() else f"on the hub at {source!r}, no directory here"
        )
        raise ConfigError(f"no tokenizer {place}: {str(error).rstrip('.')}; set model.tokenizer") from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def char_tokenizer(
    alphabet: str,
    *,
    chat_template: str | None = None,
    bos: str = "<bos>",
    eos: str = "<eos>",
    pad: str = "<pad>",
    unknown: str = "<unk>",
) -> PreTrainedTokenizerFast:
    """One token a character: ids 0 to 3 are pad, bos, eos and unknown, then the alphabet in order.

    Encoding adds no special token, so that prompt and completion encode to the same ids apart and together. A character
    outside the alphabet becomes ``unknown``. ``save_pretrained`` writes what ``AutoTokenizer`` loads.

    Args:
        alphabet: the characters, white space included; repeated ones count once.
        chat_template: a Jinja template, as transformers has them.

    Raises:
        ConfigError: the alphabet is empty.

    >>> tokenizer = char_tokenizer("0123456789+=")
    >>> tokenizer.encode("1+2="), tokenizer.decode([5, 14, 6])
    ([5, 14, 6, 15], '1+2')
    """
    if not alphabet:
        raise ConfigError(
            "the alphabet of a character tokenizer is empty; list its characters, e.g. 'chars:0123456789'"
        )
    vocabulary = {token: place for place, token in enumerate([pad, bos, eos, unknown, *dict.fromkeys(alphabet)])}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    core.pre_tokenizer = cast(Any, pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated"))
    core.decoder = cast(Any, decoders.Fuse())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    tokenizer.chat_template = chat_template
    return tokenizer
