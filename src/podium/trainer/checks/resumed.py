"""What a resume changes: the settings that differ from those with which the run has trained so far.

A resume takes new settings. Some of them have no effect, because the checkpoint has what they would set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from podium.algorithms.entropy import EntropyController
from podium.config import config_to_dict
from podium.errors import CheckpointError, ConfigError
from podium.runs.checkpoint_folders import TrainerState
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.measures import list_differing, select_measures
from podium.runs.paths import find_other_settings
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import CONFIG, flatten
from podium.telemetry.formatting import visible
from podium.telemetry.held_out import REWARD, Metric

_SHOWN: Final = 80  # characters of a value


def describe_changes(config: PPOConfig | SFTConfig, run: Path, checkpoint: Path | None) -> Iterator[str]:
    """Yield sentences on the settings of ``config`` that ``run`` had otherwise before this resume.

    The first sentence lists them. The others name those that have no effect, because ``checkpoint`` has what they would
    set, and those after which held-out figures do not compare with earlier ones. ``config.yaml`` is the one before the
    resume, or that of a resume which wrote no checkpoint.
    """
    name = CONFIG
    with suppress(CheckpointError):
        number = TrainerState.read(checkpoint).configs if checkpoint else None
        if number is not None and RunFiles(run).kind(earlier := f"config.{number + 1}.yaml"):
            name = earlier
    changes: dict[str, tuple[Any, Any]] = {}
    with suppress(ConfigError):  # of settings that only another version of Podium takes
        changes = find_other_settings(config, run, name)
    if not changes:
        return
    listed = (f"{key} = {_show(new)} (was {_show(old)})" for key, (new, old) in sorted(changes.items()))
    yield f"settings that differ from those before the resume: {', '.join(listed)}"
    for keys, sentence in _explain_unused(config, checkpoint).items():
        if used := _select(changes, keys):
            yield f"{', '.join(used)}: {sentence}"
    if measures := _list_measures(config, changes):
        yield (
            f"{', '.join(measures)}: held-out figures do not compare with those before the resume, among them "
            "the run's first and perhaps its best; podium eval evaluates a checkpoint with the new settings"
        )


def _list_measures(config: PPOConfig | SFTConfig, changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return the sections and keys among ``changes`` by which held-out figures are measured."""
    metric = Metric(REWARD) if isinstance(config, PPOConfig) else None  # None: whatever examples are measured by
    after = dict(flatten(config_to_dict(config)))
    before = {key: value for key, value in after.items() if key not in changes}
    for key, (_, old) in changes.items():
        if old is not None or not any(other.startswith(f"{key}.") for other in changes):  # null, and no mapping
            before[key] = old
    return list_differing([select_measures(settings, metric) for settings in (after, before)])


def _explain_unused(config: PPOConfig | SFTConfig, checkpoint: Path | None) -> dict[tuple[str, ...], str]:
    """Return why settings have no effect, by their sections and keys."""
    unused: dict[tuple[str, ...], str] = {
        ("run.name", "run.dir"): "no effect, because a resumed run stays in its directory"
    }
    if checkpoint is None:
        return unused
    unused[("run.seed",)] = "no effect on the order of the data, because the checkpoint holds that of the earlier seed"
    model: tuple[str, ...] = (
        ("model.seed",) if config.model.lora is not None else ("model.path", "model.config", "model.seed")
    )
    others = [role for role in ("reference",) if role in config.roles]
    also = f"; the {others[0]} has that of the setting" if others and config.model.lora is None else ""
    unused[model] = f"no effect on the policy, because the checkpoint holds its weights{also}"
    unused[("critic.path",)] = "no effect, because the checkpoint holds the critic's weights"
    unused[("eval.at_start",)] = "no effect, because the run is past its start"
    if isinstance(config, PPOConfig):
        choice = config.batch.choice
        if choice.skip_solved is not None or choice.curriculum != "none":
            unused[("reward.correct_at",)] = (
                "no effect on the running pass rates (batch.prompts) of the checkpoint, which are those by the earlier "
                "setting until a prompt is drawn again: a new run measures all of them by this one"
            )
        follows = "no effect, because the coefficient follows its target from the checkpoint's value on"
        if config.algorithm.kl_target is not None:
            unused[("algorithm.kl_coef",)] = follows
        if EntropyController.of(config.algorithm.entropy_coef).target is not None:
            unused[("algorithm.entropy_coef.start",)] = follows
    return unused


def _select(changes: Mapping[str, Any], keys: Collection[str]) -> list[str]:
    """Return those of ``keys`` that have changed, or in which a setting has changed."""
    return [prefix for prefix in keys if any(f"{key}.".startswith(f"{prefix}.") for key in changes)]


def _show(value: Any) -> str:
    text = visible(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
