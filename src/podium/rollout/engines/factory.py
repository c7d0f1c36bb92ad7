"""From a configuration and a model to the engine that generates."""

from __future__ import annotations

from torch import nn

from podium.errors import ConfigError
from podium.rollout.engines.base import Engine
from podium.rollout.engines.config import AUTO, EngineConfig, installed_engines

__all__ = ["engine_class", "make_engine"]


def make_engine(config: EngineConfig, model: nn.Module) -> Engine:
    """Make the engine that ``config`` names, reading ``model``.

    Where ``model`` is unsharded and of the dtype to generate in, the engine shares its parameters: whoever trains them
    calls ``refresh(version)`` after each update. Otherwise the engine holds a copy that ``refresh`` fills.

    Raises:
        ConfigError: The engine cannot run this model, or its package is not installed; says why.
    """
    if config.name != AUTO:
        cls = engine_class(config.name)
        reason = cls.supports(model)
        if reason is None:
            return cls(config, model)
        others = [name for name in installed_engines() if name != config.name]
        raise ConfigError(
            f"engine.name is {config.name!r}, which cannot run this model: {reason}; use engine.name=auto or one of "
            f"{', '.join(others)}"
        )
    reasons: list[str] = []
    for name, cls in _automatic():
        reason = cls.supports(model)
        if reason is None:
            return cls(config, model)
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f"engine.name is 'auto', and no installed engine can run this model: {'; '.join(reasons)}")


def engine_class(name: str) -> type[Engine]:
    """Load the class of an installed engine.

    Raises:
        ConfigError: A package that it needs is not installed; names the extra.
    """
    try:
        return installed_engines()[name].load()
    except ImportError as error:
        raise ConfigError(
            f"engine.name is {name!r}, which cannot be loaded ({error}): pip install 'podium[{name}]', or use "
            "engine.name=auto"
        ) from error


def _automatic() -> list[tuple[str, type[Engine]]]:
    """The engines that "auto" chooses from, the first choice first."""
    found: list[tuple[str, type[Engine]]] = []
    for name in installed_engines():
        try:
            found.append((name, engine_class(name)))
        except ConfigError:  # an engine without its packages is none to choose from
            continue
    ranked = [one for one in found if one[1].auto_rank > 0]
    return sorted(ranked, key=lambda one: -one[1].auto_rank)
