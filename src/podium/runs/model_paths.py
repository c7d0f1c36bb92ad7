"""A run as the path of a model: ``model.path: runs/NAME``, ``RUN@STEP`` and ``RUN@best`` mean the model of that run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from podium.errors import ConfigError
from podium.runs.config import InferenceConfig
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import is_run

C = TypeVar("C", bound=InferenceConfig)

_KEYS: Final = (
    *(("model", "path"), ("model", "tokenizer"), ("critic", "path"), ("reward", "path")),
    ("algorithm", "options", "teacher"),
)


def resolve_models(config: C) -> C:
    """Return ``config`` with the directory of the model in place of each path that names a run or a checkpoint.

    Raises:
        ConfigError: The run has no such model, or the checkpoint holds adapters alone. The message names the key.
        CheckpointError: The checkpoint is damaged.
    """
    for section, key, *option in _KEYS:
        values: Any = getattr(config, section, None)
        name = getattr(values, key, None)
        for inner in option:
            name = name.get(inner) if isinstance(name, Mapping) else None
        if not name or not isinstance(name, str):
            continue
        try:
            folder = _find_folder(name)
        except ConfigError as error:
            raise ConfigError(f"{'.'.join((section, key, *option))} = {name!r}: {error}") from None
        if folder is not None:
            entry = {**getattr(values, key), option[0]: str(folder)} if option else str(folder)
            config = replace(config, **{section: replace(values, **{key: entry})})
    return config


def _find_folder(name: str) -> Path | None:
    """Return the directory of the model that ``name`` means; None where it names neither a run nor a checkpoint."""
    path, run = Path(name), Path(name.rpartition("@")[0] or name)
    if (path / "config.json").exists() or not (path.is_dir() or is_run(run)):
        return None
    from podium.runs.checkpoints import files_of  # the imports take a second
    from podium.runs.stored_models import find_model

    stored = find_model(name)
    if stored is None:
        return None
    if stored.checkpoint is None:
        return RunFiles(stored.run).check("model")
    policy = files_of(stored.checkpoint).check("policy")
    if not (policy / "config.json").is_file():
        raise ConfigError(
            f"this checkpoint holds adapters alone: podium export {name} --merge --to DIR writes the whole model; give "
            "that directory"
        )
    from podium.models.manifest import check_manifest

    check_manifest(policy)
    return policy
