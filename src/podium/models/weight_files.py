"""The safetensors files of a model's directory, read by their headers alone. This module imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from safetensors import SafetensorError, safe_open

from podium.errors import ConfigError
from podium.exceptions import read_text

WHOLE: Final = "model.safetensors"
"""The file of a model in one file."""
INDEX: Final = "model.safetensors.index.json"
"""The file that names the files of a model in several, and their tensors."""
_LANGUAGE_HEADS: Final = ("lm_head", "embed_out")
_VALUE_HEADS: Final = ("score", *_LANGUAGE_HEADS)  # the first is transformers' name in a model for classification


class StoredTensor(NamedTuple):
    """A tensor in a file: the file, and the tensor's shape."""

    file: Path
    shape: list[int]


def read_stored_tensors(path: str, key: str = "model.path") -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of the directory ``path`` by name.

    The result is empty where ``path`` is a name on the hub, or the directory has no such files.

    Args:
        path: The directory of a model.
        key: The configuration key that holds ``path``, for messages.

    Raises:
        ConfigError: A file is missing or corrupt.
    """
    files = _files(Path(path), key) if path else []
    tensors_by_name: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                names = tensors.keys()  # safetensors' file is no mapping, and cannot be iterated over
                file_tensors = {name: StoredTensor(file, tensors.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{key} = {path!r}: {file.name} cannot be read: {_explain(file, error)}") from None
        if twice := sorted(tensors_by_name.keys() & file_tensors.keys()):
            raise ConfigError(
                f"{key} = {path!r}: {twice[0]} is in two files, {tensors_by_name[twice[0]].file.name} and "
                f"{file.name}, and only one of them can be right; copy the model's files again"
            )
        tensors_by_name |= file_tensors
    return tensors_by_name


def _explain(file: Path, error: Exception) -> str:
    """Say why safetensors cannot read a file, and the remedy. It calls a file missing that it may not open."""
    try:
        file.open("rb").close()
    except FileNotFoundError:
        return "no such file; copy the file again"
    except OSError as refusal:
        return f"{refusal.strerror}; let this user read it, or copy it as a user who may"
    return f"{read_text(error)}; copy the file again"


def read_stored_value_head(path: str) -> dict[str, StoredTensor]:
    """Return the weight and bias of a critic's head, which has one output, by name; empty where there is none."""
    stored = read_stored_tensors(path)
    for head in _VALUE_HEADS:
        if f"{head}.weight" in stored and stored[f"{head}.weight"].shape[0] == 1:
            return {name: stored[name] for name in (f"{head}.weight", f"{head}.bias") if name in stored}
    return {}


def find_replaced_heads(path: str) -> list[str]:
    """Return patterns of the names of the head's tensors, which a critic replaces or reads by itself."""
    return [*(f"{head}.*" for head in _LANGUAGE_HEADS), *read_stored_value_head(path)]


def _files(folder: Path, key: str) -> list[Path]:
    index = folder / INDEX
    if (folder / WHOLE).exists() or not index.exists():
        return [file for file in [folder / WHOLE] if file.exists()]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key} = {str(folder)!r}: {INDEX} cannot be read: {error!r}; copy the file again") from None
