"""Tokenizers: those that transformers loads, and a small one of Podium with one token a character."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, cast

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE
from transformers.utils.hub import cached_file

from podium.errors import ConfigError
from podium.exceptions import read_text
from podium.hub import explain_offline, look_for_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHARACTERS_PREFIX: Final = "chars:"
"""A tokenizer setting with this prefix has an alphabet instead of a path: ``chars:0123456789+=``."""
_SAMPLES: Final = (
    "Hello world, it's 1234567 at 12:30.",
    "def run(x):\n    return [x + 1, 'y']\n\n\n# 3.14159\n",
    "<b>A</b>\tB\r\nnaïve café, e\u0301, 你好。世界 Привет नमस्ते 🙂",
    "I'LL we've don't  two  spaces, CamelCase snake_case $x^2$",
)
"""Texts by which two tokenizers are compared. None begins with a space, which families read in two ways."""


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or hub name, or make one of ``chars:ALPHABET`` by :func:`char_tokenizer`.

    A tokenizer without a padding token gets its end-of-sequence token as one. Text is encoded as tokenizer.json says,
    and decoded as it was sampled, without transformers' clean-up of spaces.

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
        loaded = _keep_to_file(loaded, source)
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
    tokenizer.clean_up_tokenization_spaces = False  # which would take spaces out of answers, as before a comma
    return tokenizer


def explain_other_encoding(folder: str) -> str:
    """Say how to load the tokenizer that was saved in ``folder`` where AutoTokenizer makes another one of it, which
    encodes text otherwise than the run did; "" where AutoTokenizer's is the same, or the folder has none."""
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - whatever a stranger's files hold: nothing then encodes text otherwise
        return ""
    if _keep_to_file(loaded, folder) is loaded:
        return ""
    return (
        "the run encoded text as the model's tokenizer.json says, and AutoTokenizer makes a "
        f"{type(loaded).__name__} of it, which encodes text otherwise: load it with "
        "transformers.PreTrainedTokenizerFast.from_pretrained, and give token ids to libraries that use AutoTokenizer, "
        "as vLLM does"
    )


def _keep_to_file(loaded: Any, source: str) -> Any:
    """Return a tokenizer that encodes text as tokenizer.json says: ``loaded`` if it does, or the file as it is.

    transformers makes tokenizers of some classes anew from the vocabulary alone. It takes the class from the model's
    type or from tokenizer_config.json, and the file may split and normalize text in another way than the class does.
    """
    usual = transformers.PreTrainedTokenizerFast
    if type(loaded) is usual or not isinstance(loaded, usual):  # it is the file, or has none
        return loaded
    file = cached_file(
        source,
        FULL_TOKENIZER_FILE,
        local_files_only=True,  # those of the hub are in the cache now
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return loaded
    stored: Any = tokenizers.Tokenizer.from_file(file)
    stored.no_truncation()
    stored.no_padding()
    if all(_encode(loaded, text) == stored.encode(text, add_special_tokens=False).ids for text in _SAMPLES):
        return loaded
    names = ("bos_token", "eos_token", "pad_token")  # a class may know them where no file names them
    tokens = {name: getattr(loaded, name) for name in names}
    tokens = {name: token for name, token in tokens.items() if token and stored.token_to_id(token) is not None}
    return usual.from_pretrained(source, **tokens)


def _encode(tokenizer: Any, text: str) -> list[int] | None:
    """The ids of a text; None if the tokenizer has no token for a part of it, nor one for unknown parts."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # noqa: BLE001 - tokenizers raises no other
        return None


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
