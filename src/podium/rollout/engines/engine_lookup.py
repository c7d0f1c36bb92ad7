"""Find the engine that a name stands for, and make it.

This module imports no torch before an engine is made, or the class of an engine is loaded that is not Podium's own.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import is_pydantic_dataclass

from podium.errors import ConfigError
from podium.exceptions import read_text
from podium.extras import library_command
from podium.installed import has_library
from podium.rollout.engines.config import AUTO, OWN_OPTIONS, RECORDS, EngineConfig, find_engines

if TYPE_CHECKING:
    import torch
    from torch import nn

    from podium.rollout.engines.base import Engine


def check_engine(config: EngineConfig, recorded: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check that the engine is installed, and its options. The class is loaded only if it is not Podium's own.

    Raises:
        ConfigError: As :func:`engine_class`; or an option is unknown, has the wrong type or is out of its range; or the
            engine does not serve the fields of ``RequestParams`` in ``recorded``, which options of the algorithm need.
    """
    if config.name in OWN_OPTIONS:
        _check_package(config.name)
        declared = OWN_OPTIONS[config.name]
    else:
        declared = engine_class(config.name).options
    recordable = RECORDS.get(config.name)
    if missing := {*recorded} - (
        engine_class(config.name).records if recorded and recordable is None else recordable or set()
    ):
        raise ConfigError(
            f"engine.name = {config.name!r} with algorithm.options.{recorded[min(missing)]}: this engine does not "
            "record what that needs; use the engine transformers, or leave the option out"
        )
    if declared is not None:
        config.read_options(declared)
    for name, value in config.options.items() if declared is None else ():
        reason = "set engine.name to the engine that has it" if config.name == AUTO else "this engine has no options"
        raise ConfigError(
            f"engine.name = {config.name!r}: unknown key engine.options.{name} (value {value!r}): {reason}"
        )


def engine_class(name: str) -> type[Engine]:
    """Load the class of an installed engine.

    Raises:
        ConfigError: A package is not installed, the class does not exist, or it lacks methods of an engine.
    """
    from podium.rollout.engines.base import Engine

    _check_package(name)
    entry = find_engines()[name]
    subject = f"engine.name = {name!r}: {entry.value}"
    try:
        engine_class: Any = entry.load()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is this function's
        lines = [f"{frame.filename}:{frame.lineno}: " for frame in frames if "importlib" not in frame.filename]
        where = lines[-1] if lines else ""
        kind = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
        raise ConfigError(
            f"{subject} cannot be loaded: {where}{kind}{read_text(error)}; repair its package, or use engine.name=auto"
        ) from error
    if not (inspect.isclass(engine_class) and issubclass(engine_class, Engine)):
        raise ConfigError(f"{subject} is no engine: expected a subclass of podium.rollout.engines.Engine")
    if missing := sorted(engine_class.__abstractmethods__):
        raise ConfigError(f"{subject} does not implement {', '.join(missing)}, which every engine does")
    if engine_class.options is not None and not is_pydantic_dataclass(engine_class.options):
        raise ConfigError(
            f"{subject} has options = {engine_class.options!r}, which is no section: decorate the class with "
            '@section("engine.options") from podium.config'
        )
    return engine_class


def model_device(config: EngineConfig, device: torch.device) -> torch.device:
    """Return the device on which :func:`make_engine` needs the model, in a process that owns ``device``.

    Raises:
        ConfigError: As :func:`engine_class`.
    """
    return device if config.name == AUTO else engine_class(config.name).model_device(config, device)


def choose_dtype(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Return ``config`` with its data type filled in: null means bfloat16 on accelerators, as in training."""
    return replace(config, dtype="bfloat16") if config.dtype is None and device.type != "cpu" else config


def make_engine(config: EngineConfig, model: nn.Module) -> Engine:
    """Make the engine that ``config`` names, reading ``model``.

    Where ``model`` is unsharded and of the dtype to generate in, the engine shares its parameters: whoever trains them
    calls ``refresh(version)`` after each update. Otherwise the engine holds a copy that ``refresh`` fills.

    Raises:
        ConfigError: As :func:`check_engine`; or the engine cannot run this model. The message says why.
    """
    check_engine(config)
    config = choose_dtype(config, next(model.parameters()).device)
    reasons: dict[str, str] = {}
    for name, cls in _automatic() if config.name == AUTO else [(config.name, engine_class(config.name))]:
        reason = cls.supports(model)
        if reason is None:
            return cls(config, model)
        reasons[name] = reason
    if config.name == AUTO:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(f"engine.name is 'auto', and no installed engine can run this model: {listed}")
    others = ", ".join(sorted(name for name in find_engines() if name != config.name))
    raise ConfigError(
        f"engine.name is {config.name!r}, which cannot run this model: {reasons[config.name]}; use engine.name=auto or "
        f"one of {others}"
    )


def _check_package(name: str) -> None:
    """Check that the library after which an engine is named, such as vllm, can be imported."""
    entry = find_engines().get(name)
    command = library_command(entry, name) if entry else ""
    if command and not has_library(name):
        raise ConfigError(f"engine.name = {name!r}: {name} is not installed: {command}, or use engine.name=auto")


def _automatic() -> list[tuple[str, type[Engine]]]:
    """The engines that "auto" chooses from, the first choice first."""
    engines: list[tuple[str, type[Engine]]] = []
    for name in find_engines():
        try:
            engines.append((name, engine_class(name)))
        except ConfigError:  # an engine without its packages is none to choose from
            continue
    return sorted((engine for engine in engines if engine[1].auto_rank > 0), key=lambda one: -one[1].auto_rank)
