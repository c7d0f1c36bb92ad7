"""Which of the ids that a model can sample stand for text.

Models often have more rows than their tokenizer has tokens, because sizes are rounded up: Qwen has 151,936 rows for
151,669 tokens. Vocabularies have holes, too. Nobody can read an id without a token, so that none is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from podium.errors import ConfigError
from podium.exceptions import read_text
from podium.models.loading import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.models.config import ModelConfig

TextIds: TypeAlias = tuple[int, tuple[int, ...]]
"""A limit, and holes below it: ids from the limit on, and the holes, stand for no text."""


def find_text_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> TextIds | None:
    """Return which of the model's ids stand for text, or None if all do.

    Ids of :func:`generation_ends` count as text, also if the tokenizer has no such token.

    Raises:
        ConfigError: There is no such model, or as :func:`generation_ends`.
    """
    vocabulary = vocabulary_size(model)
    named = {*tokenizer.get_vocab().values(), *generation_ends(model)}
    # A tokenizer may write two of its tokens alike, so that one of their ids is missing among those by token.
    unnamed = [id for id in range(vocabulary) if id not in named and not _has_token(tokenizer, id)]
    if not unnamed or len(unnamed) == vocabulary:
        return None
    limit = vocabulary
    while unnamed and unnamed[-1] == limit - 1:
        limit = unnamed.pop()
    return limit, tuple(unnamed)


def generation_ends(model: ModelConfig) -> list[int]:
    """Return the ids that end a completion by the model's generation_config.json; [] if it has no such file.

    Raises:
        ConfigError: The file cannot be read.
    """
    from transformers import GenerationConfig

    if not model.path:
        return []
    try:
        ids = GenerationConfig.from_pretrained(model.path).eos_token_id
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise TypeError(f"eos_token_id = {ids!r}")
    except OSError:  # a model need not have the file
        return []
    except Exception as error:
        raise ConfigError(f"{model.path}: its generation_config.json cannot be read: {read_text(error)}") from error
    return ids


def resolve_stops(
    stops: Iterable[int | str], tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the tokens and the texts of ``sampling.stop_token_ids``. A text that is an added token of its own, such as
    <|im_end|>, becomes that token."""
    added: dict[str, int] = cast("Any", tokenizer).get_added_vocab()  # transformers leaves this type open
    ids = [added.get(stop, stop) if isinstance(stop, str) else stop for stop in stops]
    numbers = tuple(stop for stop in ids if isinstance(stop, int))
    return numbers, tuple(dict.fromkeys(stop for stop in ids if isinstance(stop, str)))


def write_ends(settings: bytes, ends: Iterable[int | None], *, alone: bool = False) -> bytes:
    """Return the content of a generation_config.json by which transformers and vLLM end a completion at ``ends`` too,
    and not at the tokens of the model alone that this one was trained from.

    Args:
        settings: The content of the model's generation_config.json.
        ends: The tokens.
        alone: Whether ``ends`` replace the tokens of the model.
    """
    values = json.loads(settings)
    ids = values.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    wanted = [id for id in dict.fromkeys([*([] if alone else ids), *ends]) if id is not None]
    if {*wanted} == {*ids}:
        return settings
    return (json.dumps({**values, "eos_token_id": wanted}, indent=2) + "\n").encode()


def find_ids_beyond(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the tokens of the tokenizer that the model has no rows for, by id. Raises as :func:`find_text_ids`."""
    vocabulary = vocabulary_size(model)
    return {
        id: token for token, id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]) if id >= vocabulary
    }


def _has_token(tokenizer: PreTrainedTokenizerBase, id: int) -> bool:
    try:
        token = tokenizer.convert_ids_to_tokens(id)
    except (IndexError, KeyError, OverflowError, ValueError):
        return False
    return token is not None and (token != tokenizer.unk_token or id == tokenizer.unk_token_id)
