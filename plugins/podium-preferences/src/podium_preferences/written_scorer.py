"""The classifier that a trained reward model is written as: its padding token, and the proof that it scores alike.

transformers' classifiers score a text at its last token that is not the padding token of their configuration. A text
that ends with this token would be scored one token earlier than in training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import transformers

from podium.errors import CheckpointError, ConfigError, DataError
from podium.models.loading import load_scorer
from podium.models.tokenizers import load_tokenizer
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.reward_encoder import RewardEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PROBES: Final = ("podium", "0 1")
_MOST_BYTES: Final = 1 << 32  # of a classifier that is read back to score the probe


def encode_probes(source: str) -> list[list[int]]:
    """Return the ids of two short conversations as a reward model with this tokenizer reads them. There are none
    without a tokenizer or where its template does not write them.

    Args:
        source: The tokenizer's directory or hub name, or "".
    """
    if not source:
        return []
    with suppress(ConfigError, DataError):
        encoder = RewardEncoder(load_tokenizer(source), DataConfig(), "the run")
        rows = [
            encoder.encode_answer(text, [{"role": "assistant", "content": text}], text + text, None) for text in _PROBES
        ]
        return [row for row in rows if row]
    return []


def choose_padding(model: PreTrainedModel, source: str, probes: Sequence[Sequence[int]]) -> int | None:
    """Return the padding token of the classifier: the model's, or else the tokenizer's, if no text ends with it. None
    if there is no such token; transformers then refuses to score several texts at once.

    Args:
        model: The model that is trained.
        source: Its tokenizer's directory or hub name, or "".
        probes: Conversations as the model reads them.
    """
    settings: Any = model.config.get_text_config()
    mine: int | None = settings.pad_token_id
    if mine is None:
        return None
    tokenizer: PreTrainedTokenizerBase | None = load_tokenizer(source) if source else None
    theirs: Any = None if tokenizer is None else tokenizer.pad_token_id
    stops: list[Any] = [settings.eos_token_id, getattr(model.generation_config, "eos_token_id", None)]
    stops.append(None if tokenizer is None else tokenizer.eos_token_id)
    ends = {row[-1] for row in probes}
    for stop in stops:
        ends.update(cast("list[int]", stop) if isinstance(stop, list) else [stop])
    rows = cast("torch.nn.Embedding", model.get_input_embeddings()).weight.shape[0]
    return next((token for token in (mine, theirs) if token not in ends and token is not None and token < rows), None)


def name_padding(model: PreTrainedModel, config: Mapping[str, Any], padding: int | None) -> dict[str, Any]:
    """Return the content of config.json with this padding token, also in the part of the language model."""
    named = {**config, "pad_token_id": padding}
    settings = model.config.get_text_config()
    for name, part in config.items():
        if isinstance(part, dict) and getattr(model.config, name, None) is settings:
            named[name] = {**cast("dict[str, Any]", part), "pad_token_id": padding}
    return named


def check_ends(rows: Sequence[torch.Tensor], padding: int | None) -> None:
    """Raise DataError if a text ends with the padding token."""
    if padding is not None and any(len(row) and int(row[-1]) == padding for row in rows):
        raise DataError(
            f"a text ends with token {padding}, which the written reward model takes for padding, so that it would "
            "score the text one token earlier: set pad_token_id in the model's config.json to another token or to "
            "null, or take the row out"
        )


def check_written(path: str, row: Sequence[int], score: float, precision: torch.dtype) -> None:
    """Check that transformers scores a text with the classifier of a directory as training does. Of a large model the
    configuration alone is read.

    Args:
        path: The directory of the classifier.
        row: The ids of the text.
        score: What the trained model gives.
        precision: The data type of its matrix products.

    Raises:
        CheckpointError: The text has another score.
    """
    settings = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    padding = cast(Any, settings.get_text_config()).pad_token_id
    if padding == row[-1]:
        raise CheckpointError(
            f"the reward model in {path} would score texts one token too early, because they end with its padding "
            f"token {padding}: set pad_token_id in its config.json to null"
        )
    if sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) > _MOST_BYTES:
        return
    try:
        classifier = load_scorer(path)
        with torch.no_grad():
            written = float(classifier(input_ids=torch.tensor([[*row]])).logits[0, 0])
    except (ConfigError, RuntimeError, ValueError, IndexError) as error:
        raise CheckpointError(f"the reward model in {path} cannot be used: {error}") from error
    dtypes = precision, next(classifier.parameters()).dtype
    allowed = 2 * max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    if not math.isclose(written, score, rel_tol=allowed, abs_tol=allowed):
        raise CheckpointError(
            f"the reward model in {path} scores a text with {written:g}, and training with {score:g}: do not use it, "
            "and report this as an error of Podium with the model's config.json"
        )
