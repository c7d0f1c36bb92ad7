"""Configuration of generation engines, and the way from an engine's name to the engine.

This module imports no torch before an engine is made, or the class of an engine is loaded that is not Podium's own.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import traceback
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import is_pydantic_dataclass

from podium.config import build_config, section
from podium.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from podium.rollout.engines.base import Engine

__all__ = ["EngineConfig", "VllmOptions", "check_engine", "engine_class", "find_engines", "generation_config"]
__all__ += ["make_engine"]

AUTO: Final = "auto"
S = TypeVar("S")


@section("engine")
class EngineConfig:
    """The engine that generates completions, and how much memory it may use."""

    name: str = AUTO
    """This engine generates completions: native (Llama, Mistral, Qwen 2 and 3, SmolLM3), transformers (any
    architecture), vllm (pip install "podium[vllm]"), or another installed engine. auto chooses native where it supports
    the model, and transformers otherwise."""
    max_sequences: int = Field(default=128, ge=1, le=65536)
    """The engine decodes at most this many completions at the same time."""
    cache_gib: float | None = Field(default=None, gt=0, le=65536)
    """The cache of keys and values takes at most this many GiB. null means a quarter of the device's free memory. The
    engine decodes fewer completions at the same time where max_sequences of them do not fit."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The engine computes in this data type. null means bfloat16 on accelerators, unless parallel.precision is float32,
    and model.dtype on the CPU. Another type than model.dtype needs a copy of the weights."""
    prefill_tokens: int = Field(default=8192, ge=1, le=10**9)
    """One forward pass of the engine takes at most this many prompt tokens."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """These options belong to the engine that engine.name names, which declares them."""

    def __post_init__(self) -> None:
        if self.name != AUTO and self.name not in find_engines():
            near = difflib.get_close_matches(self.name, [AUTO, *find_engines()], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"engine.name = {self.name!r}: expected {AUTO} or an installed engine: "
                f"{', '.join(sorted(find_engines()))}{hint}; an engine of your own is chosen by the name of its "
                "entry point in the group podium.engines, not by module:Class: see docs/engines.md"
            )

    def read_options(self, section: type[S]) -> S:
        """Return ``options`` as ``section``, which an engine declares as ``Engine.options``.

        Raises:
            ConfigError: An option is unknown, which names the nearest, has the wrong type or is out of its range.
        """
        try:
            return build_config(section, self.options, key="engine.options")
        except ConfigError as error:
            owner = f"engine.name = {self.name!r}" if self.name != AUTO else f"{section.__module__}.{section.__name__}"
            raise ConfigError(f"{owner}: {error}") from None


@section("engine.options")
class NativeOptions:
    """Options of the engine native."""

    cuda_graphs: bool = False
    """Decode steps are recorded as CUDA graphs and replayed: one graph for each number of rows (1, 2, 4, 8, ...) and of
    positions (128, 256, ...). A CPU runs the same steps without graphs. Off by default: no GPU has run this yet."""


@section("engine.options")
class VllmOptions:
    """Options of the engine vllm."""

    enforce_eager: bool | None = None
    """vLLM runs without CUDA graphs, which start slowly and take memory. null means true on a CPU, which has none, and
    false elsewhere."""
    max_model_len: int | None = Field(default=None, ge=1, le=10**9)
    """A prompt and its completion have at most this many tokens together. null means the model's positions, or as many
    as fit into the cache."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """vLLM spreads each layer over this many accelerators of the generator's slot, with a process for each. The model
    that new weights are written into is then in the memory of the CPU."""


OWN_OPTIONS: Final[Mapping[str, type | None]] = MappingProxyType(
    {AUTO: None, "native": NativeOptions, "transformers": None, "vllm": VllmOptions}
)
"""What Podium's own engines declare as ``Engine.options``, so that they are checked without importing torch."""


@functools.cache
def find_engines() -> Mapping[str, EntryPoint]:
    """The entry points of the group ``podium.engines``, by name.

    Raises:
        ConfigError: There is none, because the installation's metadata is older than its code.
    """
    entries = {entry.name: entry for entry in entry_points(group="podium.engines")}
    if not entries:
        raise ConfigError(
            "this installation of podium has no entry points in the group 'podium.engines', so its metadata is older "
            "than its code; install it again, in a checkout by: pip install -e ."
        )
    return entries


def check_engine(config: EngineConfig) -> None:
    """Check that the engine is installed, and its options. The class is loaded only if it is not Podium's own.

    Raises:
        ConfigError: As :func:`engine_class`; or an option is unknown, has the wrong type or is out of its range.
    """
    if config.name in OWN_OPTIONS:
        _check_package(config.name)
        declared = OWN_OPTIONS[config.name]
    else:
        declared = engine_class(config.name).options
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
        ConfigError: A package is not installed, the class does not exist, or it is not a whole engine.
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
            f"{subject} cannot be loaded: {where}{kind}{error}; mend that, or use engine.name=auto"
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
    """Return where the model has to be for :func:`make_engine`, in a process that owns ``device``.

    Raises:
        ConfigError: As :func:`engine_class`.
    """
    return device if config.name == AUTO else engine_class(config.name).model_device(config, device)


def generation_config(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Return ``config`` with the data type that null means on ``device``: on accelerators bfloat16, as in training."""
    return replace(config, dtype="bfloat16") if config.dtype is None and device.type != "cpu" else config


def make_engine(config: EngineConfig, model: nn.Module) -> Engine:
    """Make the engine that ``config`` names, reading ``model``.

    Where ``model`` is unsharded and of the dtype to generate in, the engine shares its parameters: whoever trains them
    calls ``refresh(version)`` after each update. Otherwise the engine holds a copy that ``refresh`` fills.

    Raises:
        ConfigError: As :func:`check_engine`; or the engine cannot run this model, which says why.
    """
    check_engine(config)
    config = generation_config(config, next(model.parameters()).device)
    reasons: dict[str, str] = {}
    for name, cls in _automatic() if config.name == AUTO else [(config.name, engine_class(config.name))]:
        reason = cls.supports(model)
        if reason is None:
            return cls(config, model)
        reasons[name] = reason
    if config.name == AUTO:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(f"engine.name is 'auto', and no installed engine can run this model: {listed}")
    others = ", ".join(name for name in find_engines() if name != config.name)
    raise ConfigError(
        f"engine.name is {config.name!r}, which cannot run this model: {reasons[config.name]}; use engine.name=auto or "
        f"one of {others}"
    )


def _check_package(name: str) -> None:
    """Check that the package of an engine that is an extra, and is named after that package, can be imported."""
    entry = find_engines().get(name)
    extras = entry.dist.metadata.get_all("Provides-Extra") or [] if entry and entry.dist else []
    if name in extras and find_spec(name) is None:
        raise ConfigError(
            f"engine.name = {name!r}: {name} is not installed: pip install 'podium[{name}]', or use engine.name=auto"
        )


def _automatic() -> list[tuple[str, type[Engine]]]:
    """The engines that "auto" chooses from, the first choice first."""
    engines: list[tuple[str, type[Engine]]] = []
    for name in find_engines():
        try:
            engines.append((name, engine_class(name)))
        except ConfigError:  # an engine without its packages is none to choose from
            continue
    return sorted((engine for engine in engines if engine[1].auto_rank > 0), key=lambda one: -one[1].auto_rank)
