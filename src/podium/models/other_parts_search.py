"""What the files of a model hold beside the text model that is trained, such as a vision tower.

    files of model.path   vision tower · layers for speculation · text model     config.json · preprocessor_config.json
                               │                                  ▼                   │               │
                               │                               trained                │               │
                               ▼                                  ▼                   ▼               ▼
    files that are saved  vision tower · layers for speculation · text model     config.json · preprocessor_config.json

Some models of text and images are loaded whole, and transformers writes their parts as they are. Of others transformers
loads the text model alone, and its files would be those of a text model. The other parts go from file to file here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import transformers
from torch import nn
from transformers.utils.hub import cached_file

from podium.models.config import ModelConfig
from podium.models.layout import model_layout
from podium.models.loading import plain_model
from podium.models.other_parts import NO_OTHERS, OtherParts
from podium.models.value_head import find_value_head
from podium.models.weight_files import StoredTensor, read_stored_tensors

_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_CONFIG: Final = "config.json"


def find_other_parts(model: nn.Module, config: ModelConfig) -> OtherParts:
    """Return the parts of the files of ``config.path`` that ``model``, which was loaded from it, does not have."""
    inner = plain_model(model)
    if not config.path or not isinstance(inner, transformers.PreTrainedModel):
        return NO_OTHERS
    full_config: Any = transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=False)
    if not any(_is_other(name) for name in full_config.sub_configs) and not inner._keys_to_ignore_on_load_unexpected:
        return NO_OTHERS
    texts = {name: content for name in _PROCESSORS if (content := _read_file(config.path, name)) is not None}
    stored = _read_tensors(config.path)
    ignored = [re.compile(pattern) for pattern in inner._keys_to_ignore_on_load_unexpected or ()]
    modules = {name for name, _ in inner.named_modules()}
    tensors = {
        name: stored[name]
        for name in stored
        if (any(pattern.search(name) for pattern in ignored) or any(fnmatchcase(name, p) for p in config.allow_tensors))
        and not _is_computed(name, modules, inner.base_model_prefix)
    }
    if type(full_config) is type(inner.config):
        return OtherParts(tensors, texts)
    composite = _composite(config.path, inner.config)
    if why := _explain_lost(model, tensors, stored, composite):
        names = ", ".join(name for name in full_config.sub_configs if _is_other(name))
        return OtherParts(
            {}, {}, f"only the text model is saved, without the parts {names} of {config.path}, because {why}"
        )
    return OtherParts(tensors, texts | {_CONFIG: composite or b""})


def _explain_lost(
    model: nn.Module, others: Mapping[str, Any], stored: Mapping[str, Any], composite: bytes | None
) -> str:
    """Return why the text model and the ``others`` would not be the whole again; "" if they would."""
    if not stored:
        return "its files are no safetensors"
    if composite is None:
        return "its config.json names no such text model"
    layout = model_layout(model)
    written = {part.name for parts in (layout or {}).values() for part in parts}
    tied = {"lm_head.weight"}  # some files hold it although it is the embedding's
    if layout is None or not written <= stored.keys() or stored.keys() - written - others.keys() - tied:
        return "transformers gives the text model's tensors other names than the files have"
    return ""


def freeze_other_parts(model: nn.Module) -> None:
    """Take the gradient from the parts of a model of text and images that a text does not reach.

    They would get no gradient, but weight decay.
    """
    inner = plain_model(model)
    if not isinstance(inner, transformers.PreTrainedModel) or not any(
        _is_other(name) for name in inner.config.sub_configs
    ):
        return
    reached = (inner.get_decoder(), inner.get_input_embeddings(), inner.get_output_embeddings(), find_value_head(inner))
    text = {id(parameter) for part in reached if part is not None for parameter in part.parameters()}
    for parameter in inner.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)


def _is_computed(name: str, modules: Set[str], prefix: str) -> bool:
    """Whether a tensor is a buffer of the model that is trained, such as a mask, which transformers computes today."""
    owner = name.rpartition(".")[0]
    return name.endswith((".inv_freq", ".masked_bias")) or not {owner, f"{prefix}.{owner}"}.isdisjoint(modules)


def _is_other(sub_config: str) -> bool:
    return "text" not in sub_config and sub_config not in ("decoder", "llm_config")


def _read_file(path: str, name: str) -> bytes | None:
    """Return a file of a model in a directory or on the hub; None if it has none of this name."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        file = cached_file(path, name, **quiet)
        return None if file is None else Path(file).read_bytes()
    except OSError:
        return None


def _read_tensors(path: str) -> dict[str, StoredTensor]:
    folder = Path(path)
    if not folder.is_dir():  # transformers has loaded it from the hub, so that it is in the cache
        config = cached_file(path, _CONFIG, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        if config is None:
            return {}
        folder = Path(config).parent
    return read_stored_tensors(str(folder))


def _composite(path: str, text: Any) -> bytes | None:
    """Return the configuration of the whole model with the data type of the ``text`` model that is trained."""
    content = json.loads(_read_file(path, _CONFIG) or b"{}")
    part = next(
        (entry for entry in content.values() if isinstance(entry, dict) and entry.get("model_type") == text.model_type),
        None,
    )
    if part is None:
        return None
    for fields in (content, part):
        fields.pop("torch_dtype", None)
        fields["dtype"] = str(text.dtype).removeprefix("torch.")
        if not text.tie_word_embeddings:
            fields["tie_word_embeddings"] = False
    return json.dumps(content, indent=2).encode() + b"\n"
