"""Settings of the model and its adapters. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from podium.config import section
from podium.errors import ConfigError


@section("model.lora")
class LoraConfig:
    """Low-rank adapters by peft. With them, only the adapters are trained."""

    rank: int = Field(default=16, ge=1, le=8192)
    """The adapters' matrices have this rank."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The adapters' update is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """This share of the adapters' inputs is set to zero during training. Reinforcement learning with several updates a
    step, or with a comparison of policy and generator, does not allow dropout.
    """
    targets: tuple[str, ...] = ()
    """The linear layers, experts and embeddings with these names get adapters. A layer that shares its weight with
    another one is refused, and so is a name that no layer has. An empty list means all linear layers, experts among
    them, except the output layer."""


@section("model")
class ModelConfig:
    """The model that is trained, and its tokenizer."""

    path: str = ""
    """The model is loaded from this directory, from the Hugging Face hub by this name, or from a run: runs/NAME (its
    final model, or else its latest checkpoint), RUN@STEP or RUN@best. Set either path or config."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """The model starts with random weights and this configuration: model_type, and the fields of the transformers
    configuration of that type. Vocabulary size and special token ids are taken from the tokenizer by default."""
    allow_tensors: tuple[str, ...] = ()
    """Tensors with these names may be missing from the files of model.path, unknown to the model or of another shape. *
    stands for any characters. Tensors that the files do not give are random."""
    tokenizer: str = ""
    """The tokenizer is loaded from this directory or hub name, or is made of single characters by chars:ALPHABET. An
    empty value means the tokenizer of model.path."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters have this data type. The optimizer's state and sums of gradients have float32, and parallel.precision
    sets the type of matrix products."""
    attention: str = Field(default="auto", min_length=1)
    """Transformers uses this attention implementation. auto means torch's scaled dot product attention (sdpa), or eager
    where the model needs what sdpa lacks, such as a soft cap."""
    dropout: bool | None = None
    """The model's own dropout and router noise act in updates. null means only in supervised fine-tuning, because noise
    would change the probability ratios of reinforcement learning: true is refused where they are compared, as is
    model.lora.dropout, which acts in both cases."""
    gradient_checkpointing: bool = False
    """The backward pass computes activations again instead of keeping them. A step takes about a third longer and needs
    much less memory."""
    seed: int = Field(default=0, ge=0, le=10**18)
    """Random weights and adapters are initialized from this seed."""
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.config):
            raise ConfigError(
                "give either model.path (a directory or hub name) or model.config (model_type and fields, from "
                f"scratch); got path={self.path!r} and {'a' if self.config else 'no'} config"
            )
        if self.config and not self.tokenizer:
            raise ConfigError("a model from scratch needs model.tokenizer: a directory, a hub name or 'chars:ALPHABET'")

    @property
    def tokenizer_source(self) -> str:
        """The argument for :func:`~podium.models.load_tokenizer`."""
        return self.tokenizer or self.path

    @property
    def plain(self) -> ModelConfig:
        """The same model for inference only: without adapters and gradient checkpointing."""
        return replace(self, lora=None, gradient_checkpointing=False)

    @property
    def attention_implementation(self) -> str | None:
        """The name for transformers, which chooses where it is None."""
        return None if self.attention == "auto" else self.attention
