"""Models of runs, which ``RUN``, ``RUN@STEP`` or ``RUN@best`` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from podium.config import build_config, parse_overrides, read_values
from podium.errors import ConfigError
from podium.runs.checkpoint_folders import StoredCheckpoints, TrainerState, files_of
from podium.runs.config import InferenceConfig
from podium.runs.files import STATE_FILE, step_of
from podium.runs.named_code import check_code
from podium.runs.named_files import find_current_values, is_needed, remarks
from podium.runs.run_files import RunFiles, count_configs
from podium.runs.run_reader import CONFIG, RunRecord, is_run

MAKES_MODEL: Final = ("model", "data.chat_template")
"""The section and the key that a checkpoint is exported with."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in the directory ``run``: a checkpoint, or the final model where ``checkpoint`` is None.

    ``overrides`` replace settings of the run, as on a command line.
    """

    run: Path
    checkpoint: Path | None
    overrides: Sequence[str] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The run's present configuration, as it was written. Raises ConfigError if one of its values is no section."""
        return self.read_values(CONFIG)

    def read_values(self, name: str) -> dict[str, Any]:
        """Return the values of one of the run's configurations, the file ``name``. Raises ConfigError as above."""
        file, content = self.run / name, RunFiles(self.run).read_small(name)
        values = read_values(InferenceConfig, file, self.overrides, content)
        for key, section in values.items():
            if not isinstance(section, dict):
                raise ConfigError(f"{file}: {key} = {str(section)[:80]!r}: expected a section")
        return values

    @cached_property
    def state(self) -> TrainerState | None:
        """The state of the run when it wrote the model; None for a final model whose step has no checkpoint."""
        if self.checkpoint is not None:
            return TrainerState.read(self.checkpoint)
        latest = StoredCheckpoints(RunFiles(self.run, "checkpoints")).latest()
        state = TrainerState.read(latest) if latest is not None else None
        return state if state is not None and RunRecord(self.run).end in (None, state.step) else None

    @cached_property
    def config_names(self) -> list[str]:
        """The files of the configurations that the run had until it wrote the model, the earliest first.

        The last one was in force then. Where no checkpoint says which one that was, it is taken to be config.yaml.
        """
        files, state = RunFiles(self.run), self.state
        count = count_configs(files) if state is None or state.configs is None else state.configs
        *earlier, last = (f"config.{number}.yaml" for number in range(1, count + 2))
        return [*earlier, last if files.kind(last) else CONFIG]

    @property
    def config(self) -> InferenceConfig:
        """The run's model and data, at the places where they are now.

        Raises:
            ConfigError: The base model, the tokenizer or the chat template is gone. Or the model needs code that this
                user has not allowed.
        """
        values, missing = find_current_values(self._sections, self.run)
        if gone := [line for key, line in missing.items() if is_needed(key, MAKES_MODEL)]:
            raise ConfigError("\n".join([*gone, f"podium export {self.run} --KEY PLACE uses a file at another place"]))
        config = build_config(InferenceConfig, values)
        check_code(self.run, config, [key for key, _ in parse_overrides(InferenceConfig, self.overrides)], ["model"])
        return config

    @property
    def _sections(self) -> dict[str, Any]:
        return self._select(self.values)

    @staticmethod
    def _select(values: Mapping[str, Any]) -> dict[str, Any]:
        sections = {field.name for field in fields(InferenceConfig)}
        return {name: value for name, value in values.items() if name in sections}

    def remarks(self) -> list[str]:
        """Remarks on the files of the model that have moved or changed since the run began."""
        values, _ = find_current_values(self._sections, self.run)
        return remarks(build_config(InferenceConfig, values), self.run, MAKES_MODEL)

    def check(self) -> None:
        """Check the settings, but not the files. Raises ConfigError."""
        build_config(InferenceConfig, self._sections)

    @property
    def stops(self) -> tuple[int | str, ...]:
        """The tokens and texts of ``sampling.stop_token_ids``, as the run had them when it wrote the model. Raises
        ConfigError."""
        values = self._select(self.read_values(self.config_names[-1]))
        return build_config(InferenceConfig, values).sampling.stop_token_ids

    @property
    def step(self) -> int:
        """The number of steps that the model has finished. Raises CheckpointError if its checkpoint is damaged."""
        if self.checkpoint is not None:
            return TrainerState.read(self.checkpoint).step
        if (end := RunRecord(self.run).end) is not None:
            return end
        latest = StoredCheckpoints(RunFiles(self.run, "checkpoints")).latest()
        return 0 if latest is None else TrainerState.read(latest).step

    @property
    def adapted(self) -> bool:
        """Whether adapters were trained."""
        return bool(self.values.get("model", {}).get("lora"))


def find_model(name: str, *, final: bool = True) -> StoredModel | None:
    """Return the model that ``name`` means; None if it is neither a run's nor a checkpoint's.

    Args:
        name: The directory of a run or of a checkpoint, or ``RUN@STEP``, ``RUN@best`` or ``RUN@latest``.
        final: Whether ``RUN`` means the run's final model, if it has one. Otherwise ``RUN`` means the latest
            checkpoint.

    Raises:
        ConfigError: The run has no such checkpoint, or no checkpoint yet. The message lists the checkpoints.
    """
    if (checkpoint := _checkpoint_at(Path(name).absolute())) is not None:
        return StoredModel(run=checkpoint.parent.parent, checkpoint=checkpoint)
    run, which = _parts(name)
    if not is_run(run):
        return None
    files = RunFiles(run)
    if final and not which and files.is_folder("model") and not _is_old(RunRecord(run)):
        return StoredModel(run=run, checkpoint=None)
    stored = StoredCheckpoints(files.folder("checkpoints"))
    checkpoints = f"{run} has {', '.join(path.name for path in stored.all()) or 'no checkpoint yet'}"
    if which.isdecimal():
        checkpoint = next((path for path in stored.all() if step_of(path.name) == int(which)), None)
    elif which in ("best", "latest"):
        checkpoint = stored.best() if which == "best" else stored.latest()
        if checkpoint is None and (latest := stored.latest()) is not None:
            TrainerState.read(latest)  # which says so where a state cannot be read
            raise ConfigError(
                f"{name}: no step of these checkpoints was evaluated: {checkpoints}; set eval.every to save.every"
            )
    elif which:
        raise ConfigError(f"{name}: expected RUN@STEP with a number, RUN@best or RUN@latest")
    else:
        checkpoint = stored.latest()
        if checkpoint is None:
            raise ConfigError(
                f"{name} has no final model and no checkpoint yet: resume the run (podium train … --resume {name}), or "
                "name a model's directory"
            )
    if checkpoint is None:
        raise ConfigError(f"{name}: there is no such checkpoint; {checkpoints}")
    return StoredModel(run=run, checkpoint=checkpoint)


def _checkpoint_at(path: Path) -> Path | None:
    """Return the path of the checkpoint at ``path``, which may be the link ``latest`` to one beside it."""
    target = RunFiles(path.parent).read_link(path.name) if path.name else None
    path = path.with_name(target) if target is not None and step_of(target) is not None else path
    return path if path.name and files_of(path).is_file(STATE_FILE) else None


def _parts(name: str) -> tuple[Path, str]:
    """The run and what stands after the last ``@``. A directory of that very name is a run itself."""
    run, sign, which = name.rpartition("@")
    return (Path(run), which) if sign and not Path(name).exists() else (Path(name), "")


def _is_old(run: RunRecord) -> bool:
    """Whether the run was resumed after it wrote its final model, and has not written another one."""
    return run.is_past_end(run.step) or not run.summary.get("model_path", True)
