"""The scorer: a reward model that is trained on preferences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor, nn

from podium.algorithms import TokenLoss
from podium.data import Batch, Jagged, fields
from podium.data.sampled_text import sum_rows
from podium.errors import CheckpointError, ConfigError
from podium.models.layout import ModelLayout
from podium.models.loading import plain_model
from podium.models.manifest import explain
from podium.models.model_files import ModelCopy
from podium.runtime import concat, endpoint, first, nothing, shard
from podium.telemetry import metrics
from podium.training.micro_batches import MicroBatch
from podium.workers.critic import ValueModel
from podium_preferences.written_scorer import check_ends, check_written, choose_padding, encode_probes, name_padding

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Scorer"]

_CONFIG = "config.json"


class Scorer(ValueModel):
    """Scores whole texts, and learns to. The directories that it writes are reward models of transformers: classifiers
    with one output, which reads the last token of a text.

    The arguments are those of :class:`Learner`.

    Raises:
        ConfigError: transformers has no classifier with this body.
    """

    has_bias = False
    is_causal = False  # a text is scored at its end

    def make_model(self) -> nn.Module:
        model = super().make_model()
        self._head = _find_head(plain_model(model))
        return model

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=concat(), readonly=True)
    def answer_values(self, batch: Batch) -> Batch:
        """Compute ``answer_values``, float64 ``[B]``: the score after the last token of each row of ``tokens``."""

        def compute(micro: MicroBatch) -> Mapping[str, Tensor]:
            return {fields.VALUES: self.values_of(micro)}

        scores = self.engine.evaluate(self._with_an_end(batch), compute, (fields.VALUES,))[fields.VALUES]
        return Batch({fields.ANSWER_VALUES: sum_rows(scores)})

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        """Make one optimizer step by the sum of ``-weight * score`` over all rows.

        Args:
            batch: ``tokens``, and ``loss_weights``, of which the sum over a row is its weight.

        Returns:
            Norm of the gradient before clipping, learning rate and number of skipped steps.
        """

        def compute(micro: MicroBatch) -> TokenLoss:
            return TokenLoss(-self.values_of(micro))

        applied = self.engine.step(self._with_an_end(batch), compute)
        return {
            metrics.GRAD_NORM: applied.grad_norm,
            metrics.LEARNING_RATE: applied.learning_rate,
            metrics.SKIPPED_STEPS: float(self.engine.skipped_count),
        }

    @endpoint(collect=nothing())
    def save_pretrained(self, path: str) -> None:
        """Write model and tokenizer to the directory ``path``, as ``AutoModelForSequenceClassification`` loads them.

        Raises:
            CheckpointError: The directory cannot be written, or transformers scores a text in another way than training
                does.
        """
        layout = self._layout
        if layout is None:
            raise CheckpointError(f"the weights of {type(plain_model(self.model)).__name__} cannot be written in parts")
        texts, rank, ranks = self._model_texts(None), self.ctx.rank, self.ctx.world_size
        model = ModelCopy(
            self.model, layout, texts, rank=rank, ranks=ranks, file_bytes=1 << 32, others=self.others, resumed=False
        )
        try:
            model.write(Path(path))
        except OSError as error:
            raise CheckpointError(f"cannot write the model to {path}: {explain(error)}") from error
        self._check_written(path)

    def _check_written(self, path: str) -> None:
        """Score a text with the classifier that all ranks have written."""
        row = self._probes[0] if self._probes else [1 if self._padding == 0 else 0]
        tokens = Jagged.from_rows([torch.tensor(row)])
        score = float(self.answer_values(Batch({fields.TOKENS: tokens})).dense(fields.ANSWER_VALUES)[0])
        self.engine.parallel.gather_objects(score)  # all ranks have written their files
        if self.ctx.rank == 0:
            check_written(path, row, score, self.engine.precision)

    @cached_property
    def _probes(self) -> list[list[int]]:
        """The ids of short conversations that the model has tokens for."""
        embedding = cast(Any, plain_model(self.model).get_input_embeddings()).weight
        rows = encode_probes(self.config.tokenizer_source)
        return [row for row in rows if max(row) < embedding.shape[0]]

    @cached_property
    def _padding(self) -> int | None:
        """The padding token of the classifier that is written."""
        return choose_padding(plain_model(self.model), self.config.tokenizer_source, self._probes)

    def _with_an_end(self, batch: Batch) -> Batch:
        """As the function. Raises DataError if a text ends with the padding token of the classifier."""
        check_ends(batch.jagged(fields.TOKENS).unbind(), self._padding)
        return _with_an_end(batch)

    @cached_property
    def _layout(self) -> ModelLayout | None:
        layout = super()._layout
        mine, theirs = self._head
        if layout is None:
            return None
        return {
            name: [part._replace(name=theirs) for part in parts] if name == mine else parts
            for name, parts in layout.items()
        }

    def _model_texts(self, within: str | None) -> Mapping[str, bytes]:
        texts = dict(super()._model_texts(within))
        if _CONFIG in texts:
            config = json.loads(texts[_CONFIG])
            labels: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
            name = _find_classifier(plain_model(self.model).config).__name__
            config |= {"architectures": [name], "tie_word_embeddings": False, **labels}
            config = name_padding(plain_model(self.model), config, self._padding)
            texts[_CONFIG] = json.dumps(config, indent=2).encode()
        return texts


def _find_classifier(config: PretrainedConfig) -> type[Any]:
    """Return transformers' class of a classifier for this configuration. Raises ConfigError if there is none."""
    known: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in known:
        raise ConfigError(
            f"transformers has no model for sequence classification of the type {config.model_type!r}, so that nobody "
            "could use the reward model: choose another model.path"
        )
    return cast("type[Any]", known[type(config)])


def _find_head(model: transformers.PreTrainedModel) -> tuple[str, str]:
    """Return the names of the head's weight, here and in transformers' classifier. Raises ConfigError if the two have
    other tensors in common than all others."""
    _find_classifier(model.config)
    with torch.device("meta"):
        classifier: Any = transformers.AutoModelForSequenceClassification.from_config(_with_one_label(model.config))
    mine, theirs = {*model.state_dict()}, {*classifier.state_dict()}
    if len(mine - theirs) != 1 or len(theirs - mine) != 1:
        raise ConfigError(
            f"the tensors of {type(model).__name__} are not those of {type(classifier).__name__}, so that it cannot be "
            f"written as a reward model: they differ in {', '.join(sorted(mine ^ theirs)[:4])}; choose another "
            "model.path"
        )
    return (mine - theirs).pop(), (theirs - mine).pop()


def _with_one_label(config: PretrainedConfig) -> PretrainedConfig:
    values = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
    return type(config).from_dict({**values, "num_labels": 1})


def _with_an_end(batch: Batch) -> Batch:
    """Add a token to each row, before which the score is that of the row. It alone has loss, and the row's weight.

    The model never sees the added token, because a row's last token is no input.
    """
    tokens = batch.jagged(fields.TOKENS)
    lengths_B = tokens.lengths + 1
    end_N = torch.zeros(int(lengths_B.sum()), dtype=torch.bool)
    end_N[lengths_B.cumsum(0) - 1] = True
    ids_N = torch.zeros(len(end_N), dtype=torch.int64).masked_scatter(~end_N, tokens.values.long())
    longer = Jagged.from_lengths(ids_N, lengths_B)
    columns: dict[str, Jagged] = {fields.TOKENS: longer, fields.LOSS_MASK: longer.like(end_N)}
    if fields.LOSS_WEIGHTS in batch:
        weights_B = sum_rows(batch.jagged(fields.LOSS_WEIGHTS)).float()
        columns[fields.LOSS_WEIGHTS] = longer.like(torch.zeros(len(end_N)).masked_scatter(end_N, weights_B))
    return Batch(columns)
