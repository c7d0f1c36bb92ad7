"""Models: loaded from a directory or the hub, or made from scratch; adapters; and Hugging Face's format to save."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from podium.devices import parse_dtype
from podium.errors import CheckpointError, ConfigError
from podium.workers.config import LoraConfig, ModelConfig
from podium.workers.tokenizers import load_tokenizer

__all__ = ["load_model", "longest_text", "plain_model", "save_pretrained", "with_adapters"]


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load or make the model on ``device``, in eval mode. Where it has adapters, only they require gradients.

    Ranks with the same config hold the same weights, also those from scratch: ``config.seed`` decides, and torch's own
    generator is left as it was.

    Raises:
        ConfigError: There is no such model, ``model_type`` or field, or the adapters match no layer.
    """
    model = _from_scratch(config) if config.config else _from_path(config)
    if config.lora is not None:
        model = with_adapters(model, config.lora, config.seed)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()  # checkpointed blocks of frozen layers would otherwise cut the graph
    return model.to(cast(Any, device)).eval()


def longest_text(config: ModelConfig) -> int | None:
    """Return the most tokens, prompt and completion together, that the model has positions for; None if unknown.

    Raises:
        ConfigError: There is no such model, ``model_type`` or field.
    """
    if config.config:
        settings = _architecture(config)
    else:
        try:
            settings = AutoConfig.from_pretrained(config.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={config.path!r}: its configuration cannot be read: {error}") from error
    return getattr(settings.get_text_config(), "max_position_embeddings", None)


def plain_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model itself, without peft's wrapper."""
    inner = cast(Any, model)
    return cast(PreTrainedModel, inner.get_base_model() if hasattr(inner, "peft_config") else inner)


def save_pretrained(
    model: nn.Module, weights: Mapping[str, Tensor], path: str | Path, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write ``weights`` so that transformers' Auto classes load them.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    inner = plain_model(model)
    try:
        with _no_progress_bars():
            inner.save_pretrained(str(path), state_dict=dict(weights))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(path))
    except OSError as error:
        raise CheckpointError(f"cannot write the model to {path}: {error}") from error


def _from_path(config: ModelConfig) -> PreTrainedModel:
    try:
        with _no_progress_bars():
            return AutoModelForCausalLM.from_pretrained(
                config.path,
                dtype=parse_dtype(config.dtype),
                attn_implementation=config.attention_implementation,
            )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"model.path={config.path!r} cannot be loaded: {error}; give a directory written by save_pretrained, or a "
            "name on the hub"
        ) from error


def _from_scratch(config: ModelConfig) -> PreTrainedModel:
    settings = _architecture(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            return AutoModelForCausalLM.from_config(
                settings, dtype=parse_dtype(config.dtype), attn_implementation=config.attention_implementation
            )
        except (ValueError, ImportError) as error:
            raise ConfigError(f"model.config makes no causal language model: {error}") from error


def _architecture(config: ModelConfig) -> PretrainedConfig:
    fields = dict(config.config)
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.config.model_type={kind!r} is none that transformers knows{_nearest(str(kind), CONFIG_MAPPING)}"
        )
    tokenizer = load_tokenizer(config.tokenizer_source)
    known = {"bos_token_id", "eos_token_id", "pad_token_id"}
    fields = {
        "vocab_size": len(tokenizer),
        **{name: getattr(tokenizer, name) for name in known if getattr(tokenizer, name) is not None},
        **fields,
    }
    defaults = CONFIG_MAPPING[kind]()
    for name in fields:
        if not hasattr(defaults, name):
            raise ConfigError(f"model.config.{name} is no field of {kind!r}{_nearest(name, defaults.to_dict())}")
    try:
        settings = AutoConfig.for_model(kind, **fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.config does not fit {kind!r}: {error}") from error
    heads, shared = (getattr(settings, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        origin = "" if "num_key_value_heads" in fields else f", the default of {kind!r}"
        raise ConfigError(
            f"model.config.num_key_value_heads = {shared}{origin}: expected a divisor of num_attention_heads = {heads}"
        )
    return settings


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def with_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int) -> PreTrainedModel:
    """Return ``model`` with adapters, which alone require gradients.

    Raises:
        ConfigError: The targets match no layer, or a layer into which adapters cannot be merged.
    """
    import peft

    _check_targets(model, lora.targets)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return cast(PreTrainedModel, peft.get_peft_model(model, settings))
        except ValueError as error:
            raise ConfigError(f"model.lora: {error}") from error


def _check_targets(model: PreTrainedModel, targets: Iterable[str]) -> None:
    """Check that what adapters of these layers learn can be merged into the weights.

    Raises:
        ConfigError: It cannot; names the layer.
    """
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for target in targets:
        for name, layer in model.named_modules():
            if f".{name}".endswith(f".{target}"):
                if not isinstance(layer, nn.Linear | nn.Embedding | Conv1D):
                    reason = f"{name} is a {type(layer).__name__}, neither a linear layer nor an embedding"
                elif others := set(places[id(layer.weight)]) - {f"{name}.weight"}:
                    shared = ", ".join(sorted(other.removesuffix(".weight") for other in others))
                    reason = f"{name} shares its weight with {shared}, so that an adapter of one cannot be merged"
                else:
                    continue
                raise ConfigError(f"model.lora.targets: {reason}; leave {target} out")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers: the terminal has one bar, the trainer's."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
