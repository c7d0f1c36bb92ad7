"""From the name in a configuration to an advantage estimator, and from its result to one that can be trusted."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from podium.algorithms.advantages.gae import gae
from podium.algorithms.advantages.grpo import grpo
from podium.algorithms.advantages.reinforce_pp import reinforce_pp
from podium.algorithms.advantages.rloo import rloo
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.errors import ConfigError, DataError

if TYPE_CHECKING:
    from podium.algorithms.config import AlgorithmConfig

__all__ = [
    "ESTIMATORS",
    "AdvantageEstimator",
    "check_advantage_name",
    "compute_advantages",
    "needs_values",
    "resolve_advantage",
    "uses_values",
]

AdvantageEstimator: TypeAlias = "Callable[[AdvantageInputs, AlgorithmConfig], AdvantageOutputs]"
F = TypeVar("F", bound=Callable[..., AdvantageOutputs])


def uses_values(estimator: F) -> F:
    """Decorator for an estimator of your own that reads ``inputs.values_N``: the trainer then asks for a critic."""
    vars(estimator)["uses_values"] = True
    return estimator


ESTIMATORS: MappingProxyType[str, AdvantageEstimator] = MappingProxyType(
    {"grpo": grpo, "rloo": rloo, "reinforce_pp": reinforce_pp, "gae": uses_values(gae)}
)


def resolve_advantage(spec: str) -> AdvantageEstimator:
    """The estimator that ``spec`` names: one of ``ESTIMATORS``, ``"module:function"`` or ``"path/file.py:function"``.

    >>> resolve_advantage("grpo").__name__
    'grpo'

    Raises:
        ConfigError: nothing has that name; says which names come nearest.
    """
    check_advantage_name(spec)
    if spec in ESTIMATORS:
        return ESTIMATORS[spec]
    place, _, name = spec.rpartition(":")
    module = _load_file(Path(place).absolute(), spec) if place.endswith(".py") else _load_module(place, spec)
    estimator = getattr(module, name, None)
    if not callable(estimator):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = "is not a function" if hasattr(module, name) else "does not exist"
        raise ConfigError(f"{_subject(spec)}: {name!r} in {place} {what}{_nearest(name, functions)}")
    return cast("AdvantageEstimator", estimator)


def check_advantage_name(spec: str) -> None:
    """Check the form of ``spec`` without importing anything. Raises ConfigError."""
    place, colon, name = spec.rpartition(":")
    if spec not in ESTIMATORS and not (colon and place and name.isidentifier()):
        raise ConfigError(
            f"{_subject(spec)}: expected one of {', '.join(ESTIMATORS)}, or module:function, or path/file.py:function"
            + _nearest(spec, list(ESTIMATORS))
        )


def needs_values(spec: str) -> bool:
    """Whether the estimator reads a critic's values. Raises ConfigError as :func:`resolve_advantage` does."""
    return bool(getattr(resolve_advantage(spec), "uses_values", False))


def compute_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Run the estimator that ``config.advantage`` names, and check what it returns.

    Raises:
        ConfigError: the estimator cannot be found.
        DataError: it returned something else than finite ``[N]`` tensors that are 0 outside the mask.
    """
    outputs = resolve_advantage(config.advantage)(inputs, config)
    _check_outputs(outputs, inputs, f"advantage estimator {config.advantage!r}")
    return outputs


def _check_outputs(outputs: object, inputs: AdvantageInputs, who: str) -> None:
    if not isinstance(outputs, AdvantageOutputs):
        raise DataError(f"{who} returned {type(outputs).__name__}; expected AdvantageOutputs")
    columns = {"advantages_N": outputs.advantages_N}
    if outputs.returns_N is not None:
        columns["returns_N"] = outputs.returns_N
    for name, values_N in columns.items():
        shape = list(values_N.shape)
        if shape != [len(inputs.mask_N)]:
            raise DataError(
                f"{who} returned {name} of shape {shape}; expected one value a token, [{len(inputs.mask_N)}]"
            )
        if not bool(values_N.isfinite().all()):
            row = int(inputs.row_N[~values_N.isfinite()][0])
            raise DataError(f"{who} returned {name} that are not finite, first in row {row}: look at that row's reward")
        if bool((values_N[~inputs.mask_N] != 0).any()):
            raise DataError(
                f"{who} returned {name} that are not 0 outside mask_N; inputs.spread(values_B) sees to that"
            )


def _subject(spec: str) -> str:
    return f"algorithm.advantage = {spec!r}"


def _nearest(name: str, names: list[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def _load_module(place: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise  # the module is there and lacks something itself: its own traceback says what
        beside = [path.stem for path in Path.cwd().glob("*.py")]
        raise ConfigError(
            f"{_subject(spec)}: no module {error.name!r} on sys.path{_nearest(place, [*beside, *sys.modules])}; "
            "a file that is not installed goes by its path: path/file.py:function"
        ) from None


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        beside = [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"{_subject(spec)}: no file {path}{_nearest(str(path), beside)}")
    return _execute(path)


@cache
def _execute(path: Path) -> ModuleType:
    """Once a process: the estimator is looked up at every step."""
    loader = importlib.util.spec_from_file_location(f"podium_user_{path.stem}", path)
    if loader is None or loader.loader is None:  # only for names that Python cannot load; .py was checked
        raise ConfigError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module  # dataclasses and pickle look a function's module up there
    try:
        loader.loader.exec_module(module)
    except BaseException:
        del sys.modules[loader.name]
        raise
    return module
