"""From a name, ``module:function`` or ``path/file.py:function`` to the reward function itself."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

from podium.errors import ConfigError

__all__ = ["NAMED_REWARDS", "RewardFn", "resolve_reward"]

RewardFn = Callable[[str, Any], float | Mapping[str, float]]  # Any: a row may be declared as dict or Mapping
"""``reward(completion, row)``: the completion's text and the example's row, which has "prompt" and "answer" beside the
columns of the data. Returns a finite number, or a mapping of named finite numbers that has "score"."""

NAMED_REWARDS: Final[Mapping[str, str]] = {
    "exact": "podium.rewards.text:exact",
    "fraction": "podium.rewards.text:fraction",
    "gsm8k": "podium.rewards.gsm8k:gsm8k",
    "math": "podium.rewards.symbolic:mathematics",
    "reasoning_gym": "podium.rewards.gym:reasoning_gym",
}
"""The rewards that Podium brings, and where each lives."""


def resolve_reward(spec: str) -> RewardFn:
    """The function that ``spec`` names. Imports its module, in this process.

    Args:
        spec: one of :data:`NAMED_REWARDS`, ``package.module:function``, or ``path/to/file.py:function``, where a
            relative path is seen from the working directory and the file may import its neighbours.

    Raises:
        ConfigError: there is no such reward, module, file or function; names the nearest that exists. What the
            module itself raises while it is imported passes through.
    """
    place, colon, attribute = NAMED_REWARDS.get(spec, spec).rpartition(":")
    if not colon:
        raise ConfigError(_unknown(spec))
    if not place or not attribute:
        raise ConfigError(f"reward.name = {spec!r}: expected module:function or path/file.py:function")
    module = _load_file(Path(place), spec) if place.endswith(".py") else _import(place, spec)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"reward.name = {spec!r}: {place} has no {part!r}{_functions(module, part)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"reward.name = {spec!r}: {attribute} is {type(found).__name__}, and a reward is a function")
    return cast(RewardFn, found)


def _unknown(spec: str) -> str:
    names = list(NAMED_REWARDS)
    near = difflib.get_close_matches(spec, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"Podium has {', '.join(names)}."
    return f"reward.name = {spec!r}: no such reward; {hint} Your own is module:function or path/file.py:function"


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module is there, and something that it imports is not: its own traceback says more
        file = Path(*name.split(".")).with_suffix(".py")
        raise ConfigError(
            f"reward.name = {spec!r}: no module {error.name!r} on sys.path or in {Path.cwd()}; "
            f"for a file write its path, as in {file}:{spec.rpartition(':')[2]}"
        ) from None


def _load_file(path: Path, spec: str) -> ModuleType:
    path = path.expanduser().absolute()
    if not path.is_file():
        folder = path.parent
        names = sorted(other.name for other in folder.glob("*.py")) if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {folder / near[0]}?" if near else ""
        if not folder.is_dir():
            hint = f"; {folder} is no directory"
        raise ConfigError(f"reward.name = {spec!r}: no file {path}{hint}")
    name = f"podium_reward_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script: the file may import its neighbours
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"reward.name = {spec!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _functions(module: ModuleType, wanted: str) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    near = difflib.get_close_matches(wanted, names, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; it defines {', '.join(names)}" if names else "; it defines no function"
