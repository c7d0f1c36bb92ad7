"""Where the directory of a run is, from its configuration alone.

A run may be the path of a model, too: ``model.path: runs/NAME``, ``RUN@STEP`` and ``RUN@best`` mean its model.
"""

import datetime
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from podium.config import build_config, config_to_dict, read_values
from podium.errors import ConfigError
from podium.functions import OF_SCRIPT
from podium.runs.config import InferenceConfig, PPOConfig, SFTConfig
from podium.runs.files import free_name
from podium.runs.named_files import align_values, find_again
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import CONFIG, RunRecord, check_run, flatten, is_run
from podium.secrecy import mask

C = TypeVar("C", bound=PPOConfig | SFTConfig)
M = TypeVar("M", bound=InferenceConfig)

_OF_MODELS: Final = (
    *(("model", "path"), ("model", "tokenizer"), ("critic", "path"), ("reward", "path")),
    ("algorithm", "options", "teacher"),
)
"""The keys whose paths are those of models."""
_FREE: Final = frozenset({"run", "save", "eval", "placement", "engine", "parallel"})  # not what is learned


def run_path(config: PPOConfig | SFTConfig, recipe: str) -> Path:
    """Return the directory of the run that ``config`` resumes or names. A run without a name has one that is free.

    Raises:
        ConfigError: The name leads out of ``run.dir``.
    """
    if config.run.resume:
        return Path(config.run.resume)
    if name := config.run.name:
        if ".." in Path(name).parts or not Path(name).parts or Path(name).is_absolute():
            raise ConfigError(
                f"run.name = {name!r} names no directory inside run.dir = {config.run.dir!r}: choose a plain name, and "
                "set run.dir to store the run elsewhere"
            )
        return Path(config.run.dir) / name
    stamp = f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{recipe}"
    return free_name(Path(config.run.dir) / stamp)


def resolve_resume(config: C) -> C:
    """Return ``config`` with the directory of the run in place of ``run.resume = auto``, or with "" for a new run.

    If the run of this name has no results and other settings, the new run takes its name. Files that the run was
    started with are found again if they or the run have moved. Paths of models that name runs become directories.

    Raises:
        ConfigError: A path names a run that has no such model; ``run.resume`` names no run; ``run.name`` is empty; the
            run of this name has other settings for training, which the message lists; or a file that the run was
            started with is gone.
    """
    config = resolve_models(config)
    if not config.run.resume:
        return config
    if config.run.resume != "auto":
        check_run(run := Path(config.run.resume))
        return find_again(config, run)
    if not config.run.name:
        raise ConfigError("run.resume = 'auto' resumes the run of run.name, if it is there: set run.name")
    config = replace(config, run=replace(config.run, resume=""))
    path = run_path(config, "")
    if not is_run(path):
        return config
    others = list_other_settings(config, path)
    if others and not RunRecord(path).has_results:
        return config
    if others:
        raise ConfigError(
            f"{path} cannot be resumed with other settings:\n  " + "\n  ".join(others) + "\nGive it the settings of "
            f"{path / CONFIG}, or choose another run.name for a new run"
        )
    return replace(config, run=replace(config.run, resume=str(path)))


def list_other_settings(
    config: PPOConfig | SFTConfig, path: Path, sections: Collection[str] | None = None
) -> list[str]:
    """Return a line for each setting of ``config`` that the run at ``path`` has otherwise.

    Args:
        sections: Only settings of these sections count; None means those by which a run learns, and its seed.
    """

    def counts(key: str) -> bool:
        section = key.partition(".")[0]
        return key == "run.seed" or section not in _FREE if sections is None else section in sections

    others = find_other_settings(config, path)
    return [
        f"{key} = {value!r}, and the run has {recorded!r}"
        for key, (value, recorded) in sorted(others.items())
        if counts(key)
    ]


def find_other_settings(config: PPOConfig | SFTConfig, path: Path, name: str = CONFIG) -> dict[str, tuple[Any, Any]]:
    """Return the settings of ``config`` that the file ``name`` of the run at ``path`` has otherwise: the value in
    ``config`` and that of the run, by key. None stands for a key that one of them does not have.

    Raises:
        ConfigError: The run's configuration has other keys or values than this version takes.
    """
    file = path / name
    stored = read_values(type(config), file, content=RunFiles(path).read_small(name))
    values = config_to_dict(build_config(type(config), stored, source=str(file)))
    expected = dict(flatten(mask(align_values(config_to_dict(config), values, path))))
    recorded = dict(flatten(values))
    return {
        key: (expected.get(key), recorded.get(key))
        for key in expected.keys() | recorded.keys()
        if expected.get(key) != recorded.get(key)
        and key != "run.resume"
        and not (OF_SCRIPT in str(expected.get(key)) and OF_SCRIPT in str(recorded.get(key)))  # edited between runs
    }


def resolve_models(config: M) -> M:
    """Return ``config`` with the directory of the model in place of each path that names a run or a checkpoint.

    Raises:
        ConfigError: The run has no such model, or the checkpoint holds adapters alone. The message names the key.
        CheckpointError: The checkpoint is damaged.
    """
    for section, key, *option in _OF_MODELS:
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
    from podium.runs.checkpoint_folders import files_of  # the imports take a second
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
