"""What ``podium eval`` and ``podium sample`` share: from the path of a run or a model to a configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.trainer import InferenceConfig

__all__ = ["inference_config", "inference_parser"]


def inference_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that both commands take."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} MODEL [--SECTION.KEY VALUE ...] [options]",
        description=description,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a run's directory (its final model and its settings), a model, or a hub name"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML with any of the settings")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def inference_config(model: str, path: str | None, overrides: Sequence[str]) -> InferenceConfig:
    """The configuration to use ``model`` with: that of its run where it is one, then ``path``, then ``overrides``.

    Raises:
        ConfigError: a run without a final model, a directory that is neither run nor model, or wrong settings.
    """
    from podium.trainer import InferenceConfig, build_config, read_values

    values: dict[str, Any] = {}
    run = Path(model) / "config.yaml"
    if run.is_file():
        known = {field.name for field in dataclasses.fields(InferenceConfig)}
        values = {name: section for name, section in read_values(InferenceConfig, run).items() if name in known}
        values.get("sampling", {}).pop("n", None)  # that is of training: here one completion answers a prompt
        final = Path(model) / "model"
        if not final.is_dir():
            raise ConfigError(
                f"{model} has no final model yet: resume the run (podium train … --resume {model}), or name a model's "
                "directory"
            )
        values["model"] = {"path": str(final)}
    else:
        _check_model(Path(model))
    given = read_values(InferenceConfig, path, overrides)
    for name, section in given.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    values.setdefault("model", {}).setdefault("path", model)
    return build_config(InferenceConfig, values)


def _check_model(path: Path) -> None:
    """A hub name looks like a path; one below a directory that is here is meant as a path."""
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ConfigError(f"{path} is no run (it has no config.yaml) and no model (it has no config.json)")
    elif path.exists() or path.is_absolute() or (len(path.parts) > 1 and Path(path.parts[0]).is_dir()):
        raise ConfigError(f"no run and no model at {path}")
