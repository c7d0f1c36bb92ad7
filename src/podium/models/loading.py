"""Models: loaded from a directory or the hub, or made from scratch; and Hugging Face's format to save."""

from __future__ import annotations

import functools
import json
import logging
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import GENERATION_CONFIG_NAME, logging as transformers_logging

from podium.devices import parse_dtype, widen_kept_tensors
from podium.errors import CheckpointError, ConfigError
from podium.exceptions import read_text
from podium.hub import explain_offline, look_for_hub
from podium.models.adapters import with_adapters
from podium.models.attention import choose_attention
from podium.models.config import ModelConfig
from podium.models.manifest import refusal_of
from podium.models.progress import counting_transformers
from podium.models.tokenizers import load_tokenizer
from podium.models.weight_files import read_stored_tensors, read_stored_value_head
from podium.spelling import suggest_nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from podium.models.other_parts import OtherParts

_SHOWN: Final = 20  # names of tensors in a message, of each kind


_MOST: Final = {"layer": 100_000, "layers": 100_000, "vocab_size": 1 << 24}
"""The largest numbers that a configuration may have in fields which end so. The largest vocabularies have 10**6 ids."""


def load_model(
    config: ModelConfig, device: torch.device | str = "cpu", *, spared: Sequence[str] = ()
) -> PreTrainedModel:
    """Load or make the model on ``device``, in eval mode. Where it has adapters, only they require gradients.

    Ranks with the same config hold the same weights, also those from scratch: ``config.seed`` decides, and torch's own
    generator is left as it was.

    Args:
        spared: Patterns of names of tensors that need not fit, in addition to ``config.allow_tensors``.

    Raises:
        ConfigError: There is no such model, ``model_type`` or field, the adapters match no layer, or the files' tensors
            are not the model's.
    """
    model = _from_scratch(config) if config.config else _from_path(config, spared)
    if config.lora is not None:
        model = with_adapters(model, config.lora, config.seed)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    model = model.to(cast(Any, device)).eval()
    choose_attention(plain_model(model), config.attention)
    return model


def load_scorer(path: str, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load a frozen sequence-classification model with one output on ``device``, in eval mode and its own data type.

    On torch's meta device the model has no weights, and none are read.

    Raises:
        ConfigError: The model does not exist, does not have exactly one output, or its files lack tensors.
    """
    _look_at(path)
    try:
        settings = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        if settings.num_labels != 1:
            raise ConfigError(
                f"reward.path = {path!r} has {settings.num_labels} outputs (num_labels in config.json): expected a "
                "model for sequence classification with 1"
            )
        if str(device) == "meta":
            with torch.device("meta"):
                dtype = getattr(settings, "dtype", None) or torch.float32
                return transformers.AutoModelForSequenceClassification.from_config(settings, dtype=dtype)
        with _silence_transformers(), counting_transformers(), torch.random.fork_rng(devices=[]):
            loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True, trust_remote_code=False
            )
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ConfigError(f"reward.path = {path!r} cannot be loaded: {_reason(error)}") from error
    model, report = loaded
    if absent := sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]):
        raise ConfigError(
            f"reward.path = {path!r} is no reward model: its files lack {', '.join(absent[:_SHOWN])}, or have them in "
            "another shape; give a model for sequence classification"
        )
    model.config.use_cache = False
    model = model.to(device).eval().requires_grad_(False)
    choose_attention(model, "auto")
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks, found by the names that transformers declares."""
    names = set(getattr(plain_model(model), "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def lay_out(config: ModelConfig, *, spared: Sequence[str] = ()) -> PreTrainedModel:
    """Lay the model out on torch's meta device, without adapters and weights, and check the headers of its files.

    Only safetensors files in a directory are checked, as far as their tensors are not quantized.

    Raises:
        ConfigError: As :func:`load_model`, which takes the same arguments.
    """
    with torch.device("meta"):
        if config.config:
            return _from_scratch(config)
        _look_at(config.path)
        _check_adapters(config, (Path(config.path) / "adapter_config.json").exists())
        untied = _find_untied(config, spared)
        try:
            outline = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=False, **untied),
                dtype=parse_dtype(config.dtype),
                attn_implementation=config.attention_implementation,
            )
        except Exception as error:
            raise _unreadable(config, "its configuration cannot be read", error) from error
        stored = read_stored_tensors(config.path)
        if not stored or getattr(outline.config, "quantization_config", None) is not None:
            return outline
        checked = (name for name in stored if not _matches(name, (*config.allow_tensors, *spared)))
        empty = {name: torch.empty(stored[name].shape) for name in checked}
    with _silence_transformers():
        model, report = type(outline).from_pretrained(
            None,
            config=outline.config,
            state_dict=empty,
            device_map="meta",
            dtype=parse_dtype(config.dtype),
            attn_implementation=config.attention_implementation,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_tensors(config, report, spared)
    return model


def position_limit(config: ModelConfig, *, generated: bool = False) -> int | None:
    """Return the most tokens, prompt and completion together, that the model has positions for; None if unknown.

    Args:
        generated: Whether the text is generated token by token, which must not pass the :func:`longrope_threshold`.

    Raises:
        ConfigError: There is no such model, ``model_type`` or field.
    """
    settings = _settings(config)
    most = getattr(settings.get_text_config(), "max_position_embeddings", None)
    turn = longrope_threshold(settings) if generated else None
    return most if turn is None else min(turn, most or turn)


def vocabulary_size(config: ModelConfig) -> int:
    """Return the number of tokens that the model knows. Raises ConfigError as :func:`position_limit` does."""
    return _settings(config).get_text_config().vocab_size


def layer_widths(config: ModelConfig) -> tuple[int, int]:
    """Return the number of values of a hidden state, and of a feed-forward layer inside; 0 where the model has none.
    Raises ConfigError as :func:`position_limit` does."""
    settings = _settings(config).get_text_config()
    return getattr(settings, "hidden_size", 0) or 0, getattr(settings, "intermediate_size", 0) or 0


def _settings(config: ModelConfig) -> PretrainedConfig:
    with _without_docstrings():
        if config.config:
            return _architecture(config)
        _look_at(config.path)
        try:
            return transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=False)
        except Exception as error:
            raise _unreadable(config, "its configuration cannot be read", error) from error


@contextmanager
def _without_docstrings() -> Iterator[None]:
    """Let transformers import configurations without writing their docstrings during the block.

    To write one, transformers imports generation and with it most of what models need, which takes longer than torch.
    """
    writer: Any = sys.modules.get("transformers.utils.auto_docstring")
    usual = getattr(writer, "auto_class_docstring", None)
    if usual is None:  # another version of transformers: right, and slower
        yield
        return
    writer.auto_class_docstring = _as_it_is
    try:
        yield
    finally:
        writer.auto_class_docstring = usual


def _as_it_is(cls: type, **_: object) -> type:
    return cls


def longrope_threshold(settings: PretrainedConfig) -> int | None:
    """Return the length, in tokens, of the longest text that ``longrope`` rotates by its factors for short texts.

    Longer texts get other factors at all of their positions, and so do shorter rows beside them. None means that the
    model rotates a text in one way, however long.
    """
    parameters: Any = getattr(settings.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *parameters.values()]  # some models have a table for each kind of layer
    turns = [
        kind["original_max_position_embeddings"]
        for kind in kinds
        if isinstance(kind, Mapping)
        and kind.get("rope_type") == "longrope"
        and "original_max_position_embeddings" in kind
    ]
    return min(turns, default=None)


def plain_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model itself, without peft's wrapper."""
    inner = cast(Any, model)
    return cast("PreTrainedModel", inner.get_base_model() if hasattr(inner, "get_base_model") else inner)


def save_pretrained(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    others: OtherParts | None = None,
) -> None:
    """Write ``weights`` so that transformers' Auto classes load them, and beside them the ``others`` of the files that
    the model was loaded from.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    inner = plain_model(model)
    try:
        with _silence_transformers(), _generation_settings_apart(inner, Path(path)):
            inner.save_pretrained(str(path), state_dict=dict(weights))
        _share_weights(Path(path))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(path))
        if others is not None:
            others.add_to(Path(path))
    except (OSError, SafetensorError) as error:
        reason = refusal_of(error) or read_text(error)
        raise CheckpointError(f"cannot write the model to {path}: {reason}") from error


def _share_weights(folder: Path) -> None:
    """Let everybody read the weights who may read the configuration beside them. safetensors gives its files to the
    user alone, whatever the umask is."""
    with suppress(OSError):  # a file system without permissions
        mode = stat.S_IMODE((folder / "config.json").stat().st_mode)
        for file in folder.glob("*.safetensors"):
            file.chmod(mode)


def checkpoint_layers(model: nn.Module) -> None:
    """Let the backward pass compute the layers' activations again. Transformers itself does so in training mode only,
    in which dropout acts.

    Raises:
        ConfigError: transformers names no layers of this model.
    """
    layers = decoder_layers(model)
    if not layers:
        name = type(plain_model(model)).__name__
        raise ConfigError(f"model.gradient_checkpointing: transformers names no layers of {name}; set it to false")
    config = plain_model(model).config
    usual = config._attn_implementation
    for layer in layers:
        layer.forward = _checkpoint_forward(layer.forward, config, usual)


def _checkpoint_forward(forward: Callable[..., Any], config: Any, usual: str | None) -> Callable[..., Any]:
    """Return ``forward`` with activations that are computed again, by the attention implementation of the first time.

    The backward pass of packed rows comes after :func:`.packed_attention` has ended.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        implementation = config._attn_implementation
        if implementation != usual:
            kwargs["context_fn"] = lambda: (nullcontext(), attention_implementation(config, implementation))
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


@contextmanager
def attention_implementation(config: Any, name: str) -> Iterator[None]:
    """Let a model with this configuration use another attention implementation during the block."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def _from_path(config: ModelConfig, spared: Sequence[str]) -> PreTrainedModel:
    _look_at(config.path)
    untied = _find_untied(config, spared)
    with _silence_transformers(), counting_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # for tensors that are allowed to be missing
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                config.path,
                dtype=parse_dtype(config.dtype),
                attn_implementation=config.attention_implementation,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
                **untied,
            )
        except Exception as error:
            remedy = "give a directory written by save_pretrained, or a name on the hub"
            raise _unreadable(config, "cannot be loaded", error, remedy) from error
    model, report = loaded
    _check_adapters(config, hasattr(model, "peft_config"))
    _check_tensors(config, report, spared)
    _note_untied(model)
    return model


def _find_untied(config: ModelConfig, spared: Sequence[str]) -> dict[str, bool]:
    """A head of one output is tied to nothing, whatever the configuration of the language model says."""
    head = read_stored_value_head(config.path)
    return {"tie_word_embeddings": False} if any(_matches(name, spared) for name in head) else {}


def _note_untied(model: PreTrainedModel) -> None:
    """Correct a configuration that ties the output layer to the embedding, although the files have two different ones.

    transformers then leaves both as they are. Copies of the model are built from its configuration.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embedding is not None and head.weight is not embedding.weight:
        for settings in (model.config, model.config.get_text_config()):
            settings.tie_word_embeddings = False


def _check_adapters(config: ModelConfig, there: bool) -> None:
    if there:
        raise ConfigError(
            f"model.path={config.path!r} holds adapters (adapter_config.json), which are not trained further: merge "
            "them into their model (peft's merge_and_unload), save that without adapter_config.json, and give its "
            "directory"
        )


def _unreadable(config: ModelConfig, what: str, error: Exception, remedy: str = "") -> ConfigError:
    return ConfigError(f"model.path={config.path!r}: {what}: {_reason(error)}" + (f"; {remedy}" if remedy else ""))


def _look_at(path: str) -> None:
    """Look for the hub if ``path`` is no path. Raises ConfigError for a config.json with too many layers or ids, or
    with a kernel of the hub."""
    look_for_hub(path)
    try:
        fields = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers says what is wrong
    if isinstance(fields, dict):
        _check_fields(cast("dict[str, Any]", fields), f"{path}/config.json: ")


def _check_fields(fields: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for numbers of layers and ids of which lists would be made until memory is full, and for code
    that transformers would fetch."""
    for name, value in fields.items():
        if str(name).endswith("_implementation") and "/" in json.dumps(value):
            raise ConfigError(
                f"{where}{name} = {value!r} names a kernel of the hub, whose code Podium does not run: remove the entry"
            )
        if isinstance(value, Mapping):
            _check_fields(cast("Mapping[str, Any]", value), f"{where}{name}.")
        elif isinstance(value, int):
            most = next((most for ending, most in _MOST.items() if str(name).endswith(ending)), value)
            if value > most:
                raise ConfigError(f"{where}{name} = {value}: expected at most {most}")


_NO_DOCSTRINGS: Final = (
    "Python runs without docstrings here, which transformers needs: start it without -OO, and set PYTHONOPTIMIZE to at "
    "most 1"
)


def _reason(error: Exception) -> str:
    if "trust_remote_code" in read_text(error):
        return (
            "it needs Python code of its own, which Podium does not run; choose a model that transformers has code for"
        )
    if match := re.search(r"Unrecognized configuration class <class '[\w.]*\.(\w+)'>", read_text(error)):
        return (
            f"transformers has no language model for a {match[1]}; choose a model of text, or one of text and images "
            "that transformers loads as a language model, such as Gemma 3 or Qwen3.5"
        )
    if "does not support an attention implementation" in read_text(error):
        return "the model has no attention of the kind that model.attention names; use auto or eager"
    reason = explain_offline(error) or " ".join(read_text(error).split()) or type(error).__name__
    return f"{reason}; {_NO_DOCSTRINGS}" if sys.flags.optimize > 1 else reason


def _check_tensors(config: ModelConfig, report: Mapping[str, Any], spared: Sequence[str]) -> None:
    """Check transformers' report of a load: the files have the model's tensors, in their shapes, and no others."""
    shapes = {
        name: f"{name} (files {list(stored)}, model {list(wanted)})"
        for name, stored, wanted in report["mismatched_keys"]
    }
    kinds = {
        "missing from the files": dict.fromkeys(report["missing_keys"]),
        "unknown to the model": dict.fromkeys(report["unexpected_keys"]),
        "of another shape": shapes,
    }
    wrong: list[str] = []
    for kind, tensors in kinds.items():
        names = sorted(name for name in tensors if not _matches(name, (*config.allow_tensors, *spared)))
        if names:
            listed = ", ".join(tensors[name] or name for name in names[:_SHOWN])
            wrong.append(f"{kind} ({len(names)}): {listed}{', ...' if len(names) > _SHOWN else ''}")
    if wrong:
        raise ConfigError(
            f"model.path={config.path!r}: the tensors of the files are not those of config.json: {'; '.join(wrong)}; "
            "give files and config.json of one model, or name the tensors that may differ in model.allow_tensors"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _from_scratch(config: ModelConfig) -> PreTrainedModel:
    settings = _architecture(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model = transformers.AutoModelForCausalLM.from_config(
                settings, dtype=parse_dtype(config.dtype), attn_implementation=config.attention_implementation
            )
        except Exception as error:
            raise ConfigError(f"model.config makes no causal language model: {_reason(error)}") from error
    widen_kept_tensors(model)
    return model


def _architecture(config: ModelConfig) -> PretrainedConfig:
    fields = dict(config.config)
    kind = fields.pop("model_type", None)
    known_kinds = transformers.CONFIG_MAPPING
    if kind not in known_kinds:
        hint = suggest_nearest(str(kind), known_kinds)
        raise ConfigError(f"model.config.model_type = {kind!r}: transformers has no such model type{hint}")
    tokenizer = load_tokenizer(config.tokenizer_source)
    token_ids = {"bos_token_id", "eos_token_id", "pad_token_id"}
    fields = {
        "vocab_size": len(tokenizer),
        **{name: getattr(tokenizer, name) for name in token_ids if getattr(tokenizer, name) is not None},
        **fields,
    }
    _check_fields(fields, "model.config.")
    defaults = known_kinds[kind]()
    for name in fields:
        if not hasattr(defaults, name):
            raise ConfigError(f"model.config.{name} is no field of {kind!r}{suggest_nearest(name, defaults.to_dict())}")
    try:
        settings = transformers.AutoConfig.for_model(kind, **fields)
    except Exception as error:
        raise ConfigError(f"model.config does not fit {kind!r}: {_reason(error)}") from error
    _check_kept(settings, {name: value for name, value in fields.items() if name in config.config})
    for name in ("vocab_size", "hidden_size", "num_attention_heads"):  # transformers gives every kind these names
        if isinstance(size := getattr(settings.get_text_config(), name, None), int) and size < 1:
            raise ConfigError(f"model.config.{name} = {size}: expected at least 1")
    heads, shared = (getattr(settings, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        origin = "" if "num_key_value_heads" in fields else f", the default of {kind!r}"
        raise ConfigError(
            f"model.config.num_key_value_heads = {shared}{origin}: expected a divisor of num_attention_heads = {heads}"
        )
    return settings


def _check_kept(settings: PretrainedConfig, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field in place of which transformers has put another value. null means its default."""
    for name, value in fields.items():
        if not _is_kept(settings, {name: value}):
            written = settings.to_dict()
            related = ", ".join(f"{other} = {written[other]!r}" for other in written if name in other and name != other)
            raise ConfigError(
                f"model.config.{name} = {value!r}: transformers makes it {written.get(name)!r} for "
                f"{settings.model_type!r}{related and f', with {related}'}; change the fields that decide it, or leave "
                f"{name} out"
            )


def _is_kept(kept: Any, value: Any) -> bool:
    """Whether ``kept`` says what ``value`` does, or more, however transformers spells it."""
    if isinstance(value, Mapping):
        if isinstance(kept, transformers.PretrainedConfig):
            written = kept.to_dict()  # not all fields can be read as attributes where layers differ
            return all(
                _is_kept(written[name] if name in written else getattr(kept, name, None), part)
                or _is_kept(vars(kept).get(name), part)
                for name, part in value.items()
            )
        if not isinstance(kept, Mapping):
            return False
        parts = {str(name): part for name, part in kept.items()}
        if all(str(name) in parts and _is_kept(parts[str(name)], part) for name, part in value.items()):
            return True
        return any(_is_kept(part, value) for part in parts.values())  # that of the layers to which it applies
    if isinstance(value, list | tuple) and isinstance(kept, list | tuple):
        if len(value) != len(kept) or all(map(_is_kept, kept, value)):
            return len(value) == len(kept)
        rename = getattr(transformers.configuration_utils, "remap_legacy_layer_types", list)
        return all(isinstance(part, str) for part in value) and rename(value) == list(kept)  # types of layers
    if isinstance(kept, torch.dtype):
        return str(kept) == f"torch.{value}"
    return value is None or kept == value


@contextmanager
def _generation_settings_apart(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Write the generation settings of ``model`` into ``folder`` as they are. transformers loads settings that
    contradict one another, such as a temperature without ``do_sample``, and refuses to write them."""
    settings: Any = model.generation_config
    model.generation_config = transformers.GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
    if model.can_generate():
        settings.to_json_file(str(folder / GENERATION_CONFIG_NAME), keys_to_pop=["compile_config"])


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Switch off transformers' progress bars, because the terminal has one bar, the trainer's, and its report of a
    load, which :func:`_check_tensors` reads."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    reporter = logging.getLogger("transformers.modeling_utils")
    reporter.addFilter(_is_no_report)
    try:
        yield
    finally:
        reporter.removeFilter(_is_no_report)
        if shown:
            transformers_logging.enable_progress_bar()


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()
