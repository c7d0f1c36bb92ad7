"""Tasks that reasoning-gym generates: the sources ``reasoning_gym:TASK`` of ``data.train``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

from podium.errors import ConfigError
from podium.extras import install_command
from podium.spelling import suggest_nearest
from podium.telemetry import Note, emit

__all__ = ["generate_rows"]

_PREFIX: Final = "reasoning_gym:"
_RESERVED: Final = ("seed", "size")
_BLOCK: Final = 1000  # problems of a dataset object; some tasks prepare all of them when the object is made
_PATIENCE_S: Final = 10.0  # seconds of generating before a note says what takes so long


def generate_rows(spec: str, options: Mapping[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield problems without end. The same seed gives the same problems. Problems repeat as often as the task repeats
    them.

    A process generates each problem once, so that training and held-out sides can be picked from one series. A row has
    the task's question, answer and metadata, and "task_options".

    Raises:
        ConfigError: There is no such task or option (the message names the nearest), the task refuses its options, or
            reasoning-gym is not installed.
    """
    _check(spec, options)
    try:
        series = _series(spec, json.dumps(options, sort_keys=True), seed)
    except TypeError as error:
        raise ConfigError(
            f"data.options = {dict(options)!r}: expected plain values, as YAML has them: {error}"
        ) from None
    return series.rows()


def _check(spec: str, options: Mapping[str, Any]) -> None:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"{spec} needs reasoning-gym, which cannot be imported ({error}): {install_command('tasks')} "
            "(pycosat, which it needs, is built by a C compiler)"
        ) from error
    task = spec.removeprefix(_PREFIX)
    registry: dict[str, Any] = reasoning_gym.factory.DATASETS
    if task not in registry:
        near = suggest_nearest(task, registry, prefix=_PREFIX, count=3, likeness=0.5)
        hint = near or f"; it has {len(registry)}"
        raise ConfigError(f"{spec}: reasoning-gym {reasoning_gym.__version__} has no task {task!r}{hint}")
    names = [field.name for field in dataclasses.fields(registry[task][1]) if field.name not in _RESERVED]
    for name in options:
        if name not in names:
            hint = suggest_nearest(name, names) or f"; it has {', '.join(names)}"
            why = " (Podium sets it)" if name in _RESERVED else ""
            raise ConfigError(f"data.options.{name}: {spec} has no such option{why}{hint}")


@lru_cache(maxsize=8)
def _series(spec: str, options: str, seed: int) -> _Series:
    return _Series(spec, json.loads(options), seed)


class _Series:
    """The problems that were drawn so far of one task, one set of options and one seed."""

    def __init__(self, spec: str, options: dict[str, Any], seed: int) -> None:
        self._spec = spec
        self._options = options
        # Problem i of seed s is problem i + 1 of seed s - 1 in most tasks, so neighboring seeds are sent far apart.
        self._start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest())
        self._drawn: list[dict[str, Any]] = []
        self._fresh = self._draw()
        self._spent_s = 0.0

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        number = 0
        while True:
            if number == len(self._drawn):
                self._drawn.append(self._time_generation())
            yield f"{self._spec}, problem {number}", self._drawn[number]
            number += 1

    def _time_generation(self) -> dict[str, Any]:
        started = time.perf_counter()
        row = next(self._fresh)
        before = self._spent_s
        self._spent_s += time.perf_counter() - started
        if before < _PATIENCE_S <= self._spent_s:
            each_ms = self._spent_s / (len(self._drawn) + 1) * 1e3
            emit(
                Note(
                    f"{self._spec} takes {each_ms:.0f} ms to generate a problem, and has made "
                    f"{len(self._drawn) + 1}; lower data.train_items or eval.items to need fewer"
                )
            )
        return row

    def _draw(self) -> Iterator[dict[str, Any]]:
        import reasoning_gym

        task = self._spec.removeprefix(_PREFIX)
        block = 0
        while True:
            try:
                dataset = reasoning_gym.create_dataset(
                    task, seed=self._start + block * _BLOCK, size=_BLOCK, **self._options
                )
            except (AssertionError, TypeError, ValueError) as error:
                reason = str(error) or type(error).__name__
                raise ConfigError(f"data.options = {self._options!r}: {self._spec} refuses them: {reason}") from error
            with suppress(IndexError):  # word_ladder, for one, ends a dataset at a problem that it cannot make
                for index in range(_BLOCK):
                    yield {**dataset[index], "task_options": self._options}
            block += 1
