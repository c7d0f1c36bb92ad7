"""The reward functions of a run as one: each scores a completion, and the score is their weighted sum.

A function that returns None abstains: its term is left out of the sum. Where all abstain, there is no score. What was
returned becomes a grade, or the error that ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from podium.errors import ConfigError, RewardError
from podium.exceptions import describe_error, format_error, read_text
from podium.rewards.call_forms import CallError, CallForm, Item, Log, read_form
from podium.rewards.config import Grade, RewardConfig
from podium.rewards.resolve import RewardFn, name_of, resolve_reward

_LARGEST: Final = 3.4028234663852886e38  # of float32, in which rewards train
_PROBLEM: Final = 2_000  # characters; a result stays under the dispatcher's limit
_TRACEBACK: Final = 20_000
_TEXT: Final = 10_000
_NO_PARTS: Final[Mapping[str, float]] = MappingProxyType({})
_NO_EXTRA: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of one item.

    Attributes:
        score: The score; None if there is a problem, or if all functions abstained.
        parts: The named parts.
        extra: What functions logged as text.
        logged: The names of those parts that functions logged, and did not return.
        problem: What was wrong, as the end of a sentence that begins with "the reward".
        traceback: Where the reward raised.
        limit: The limit that the item ran over: "time", "memory" or "".
        error: What the reward raised, where it ran in this process.
    """

    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=lambda: _NO_PARTS)
    extra: Mapping[str, str] = field(default_factory=lambda: _NO_EXTRA)
    logged: frozenset[str] = frozenset()
    problem: str = ""
    traceback: str = ""
    limit: str = ""
    error: BaseException | None = None


class RewardFunctions:
    """The reward functions of a run.

    Args:
        rewards: The functions, or their names.
        weights: A weight for each; () gives each the weight 1.
        columns: The columns that every row of the data has; None where nobody knows them yet.
        steps: The number of steps of the run, which a function may ask for.
        optional: Whether it may be that nobody calls the functions, so that one that cannot be called is only noted.
        time_limit_s: The limit of grading a completion, in seconds.

    Attributes:
        forms: The functions with the ways in which they are called.
        extras: What they ask for beside text and row.
        is_async: Whether one of them is a coroutine function.
        notes: What a person should know of how they are called.

    Raises:
        ConfigError: A function does not exist, or has a parameter whose value nobody knows.
    """

    def __init__(
        self,
        rewards: Sequence[str | RewardFn],
        weights: Sequence[float] = (),
        columns: Collection[str] | None = None,
        steps: int = 0,
        *,
        optional: bool = False,
        time_limit_s: float = math.inf,
    ) -> None:
        loaded = [resolve_reward(reward) if isinstance(reward, str) else reward for reward in rewards]
        self.notes: list[str] = []
        names = self._name_parts([name_of(reward, short=True) for reward in rewards])
        self.forms = [read_form(reward, name, steps) for reward, name in zip(loaded, names, strict=True)]
        self.weights = tuple(weights) or (1.0,) * len(self.forms)
        self.extras = frozenset[str]().union(*(form.extras for form in self.forms))
        self.is_async = any(form.is_async for form in self.forms)
        for form in self.forms:
            if (least_s := math.ceil(form.least_limit_s)) > time_limit_s:
                raise ConfigError(
                    f"reward.time_limit_s = {time_limit_s:g}, and the reward {form.name} may take up to {least_s} s by "
                    f"its own limits: set --reward.time_limit_s {least_s}"
                )
        for form in self.forms if columns is not None else ():
            try:
                self.notes += form.check(columns or ())
            except ConfigError as error:
                if not optional:
                    raise
                self.notes.append(f"{error}. It is called, and then ends the run, where the environment gives no score")
        if lists := [form.name for form in self.forms if form.takes_lists]:
            self.notes.append(
                f"the reward {', '.join(lists)} takes lists of completions. Podium calls it with lists of one, so it "
                "cannot compare completions"
            )
        lone = [
            form.name
            for form in self.forms
            for plural in ("", "s")
            if {f"data_source{plural}", f"solution_str{plural}"} <= form.parameters.keys()
        ]
        if lone and columns is not None and "data_source" not in columns:
            self.notes.append(f"the data have no column data_source, so the reward {lone[0]} gets None for it")

    def _name_parts(self, names: Sequence[str]) -> list[str]:
        """Give each function a name of its own."""
        unique: list[str] = []
        for name in names:
            count = 2
            label = name
            while label in unique:
                label, count = f"{name}_{count}", count + 1
            unique.append(label)
        if changed := [label for label, name in zip(unique, names, strict=True) if label != name]:
            self.notes.append(
                f"several reward functions have the same name: in metrics and completions the later ones are called "
                f"{', '.join(changed)}"
            )
        return unique

    def add_up(self, values: Sequence[object], log: Log) -> Result:
        """Return the weighted sum of what the functions returned for one completion, with their parts."""
        total, parts, extra, is_scored = 0.0, dict[str, float](), dict(log.extra), False
        for form, weight, value in zip(self.forms, self.weights, values, strict=True):
            problem, score, own_parts, texts = _read_value(value)
            if problem:
                return self.blame(form, Result(problem=problem))
            if len(self.forms) == 1:
                parts, extra = {**parts, **own_parts}, {**extra, **texts}
            else:
                extra |= {f"{form.name}.{name}": text for name, text in texts.items()}
                parts |= {f"{form.name}.{name}": part for name, part in own_parts.items()}
                parts |= {} if score is None else {form.name: score}
            if score is not None:
                total, is_scored = total + weight * score, True
        logged = frozenset(log.parts.keys() - parts.keys())
        parts = {**log.parts, **parts}
        if not is_finite(total) or not all(map(is_finite, parts.values())):
            return Result(problem=f"has the score {total:g} with the parts {parts}"[:_PROBLEM])
        return Result(total if is_scored else None, parts, extra, logged)

    def blame(self, form: CallForm, result: Result) -> Result:
        """Name the function in a problem, if there are several."""
        if len(self.forms) == 1:
            return result
        problem = f"failed in {form.name}, which {result.problem}"
        return Result(problem=problem, traceback=result.traceback, limit=result.limit, error=result.error)


def call_rewards(functions: RewardFunctions, item: Item) -> Result:
    """Run the functions once and check what they return."""
    values: list[Any] = []
    log = Log()
    for form in functions.forms:
        value = _catch(lambda: form.read(_finish(form.call(item, log))))  # noqa: B023 - it is called at once
        if isinstance(value, Result):
            return functions.blame(form, value)
        values.append(value)
    return functions.add_up(values, log)


async def await_rewards(functions: RewardFunctions, item: Item, clock: Clock) -> Result:
    """Run the functions once, and await those that are to be awaited beside each other.

    What is awaited has the time limit of ``clock``.
    """
    values: list[Any] = []
    log = Log()
    for form in functions.forms:
        with clock.stopped():
            value = _catch(lambda: form.call(item, log))  # noqa: B023 - it is called at once
        if isinstance(value, Result):
            for waiting in values:
                if inspect.iscoroutine(waiting):
                    waiting.close()
            return functions.blame(form, value)
        values.append(value)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_await(form, value, clock)) for form, value in zip(functions.forms, values, strict=True)
        ]
    results = [task.result() for task in tasks]
    for form, value in zip(functions.forms, results, strict=True):
        if isinstance(value, Result):
            return functions.blame(form, value)
    return functions.add_up(results, log)


class Clock:
    """The time limit of what is awaited. Time in which a function blocks the event loop does not count."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._scopes: set[asyncio.Timeout] = set()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Run a block that blocks the event loop."""
        time = asyncio.get_running_loop().time
        began_s = time()
        yield
        for scope in self._scopes:
            if (when_s := scope.when()) is not None and not scope.expired():
                scope.reschedule(when_s + time() - began_s)

    async def finish(self, value: Awaitable[Any]) -> Any:
        """Await ``value``. Returns what comes of it, or the result of its failure."""
        try:
            async with asyncio.timeout(self.limit_s) as scope:
                self._scopes.add(scope)
                try:
                    return await value
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():  # by the time limit, or by the end of the loop
                        raise
                    return _failure(error)  # of something that the function cancelled itself
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # noqa: BLE001 - SystemExit too: a reward that leaves has failed
                    return _failure(error)
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            return Result(problem=f"ran over {self.limit_s:g} s", limit="time")


async def _await(form: CallForm, value: Any, clock: Clock) -> Any:
    """What comes of a function's value, which may be to await, or the result of its failure."""
    value = await clock.finish(value) if inspect.isawaitable(value) else value
    return value if isinstance(value, Result) else _catch(lambda: form.read(value))


def _catch(run: Callable[[], Any]) -> Any:
    """What ``run`` returns, or the result of what it raises."""
    try:
        return run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a reward that leaves is a reward that failed
        return _failure(error)


def _finish(value: Any) -> Any:
    """What a function returned, or what comes of it where it is to be awaited although the function does not say so."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _failure(error: BaseException) -> Result:
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # frees what filled the memory
        return Result(problem="raised MemoryError", limit="memory")
    if isinstance(error, CallError):
        return Result(problem=read_text(error)[:_PROBLEM])
    problem = f"raised {describe_error(error)}".rstrip(": ")[:_PROBLEM]
    return Result(problem=problem, traceback=_trace(error)[-_TRACEBACK:], error=error)


def _read_value(value: object) -> tuple[str, float | None, Mapping[str, float], Mapping[str, str]]:
    """Read what a function returned: a problem or "", the score or None if the function abstains, the named parts
    beside the score, and what a mapping has beside numbers, as text."""
    if value is None:
        return "", None, _NO_PARTS, _NO_EXTRA
    if isinstance(value, float) or not isinstance(value, Mapping):
        number = _number(value)
        return "" if number is not None else f"returned {_show(value)}", number, _NO_PARTS, _NO_EXTRA
    parts: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, part in value.items():
        number = _number(part)
        if number is not None:
            parts[str(name)] = number
        elif part is not None and (name == "score" or isinstance(part, float | int | complex)):
            return f"returned {_show(part)} as part {str(name)[:60]!r}", None, _NO_PARTS, _NO_EXTRA
        elif part is not None:
            texts[str(name)] = _shorten(str(part))
    if "score" not in value:
        names = ", ".join(map(repr, value)) or "nothing"
        return f'returned a mapping without "score" (it has {names})'[:_PROBLEM], None, _NO_PARTS, _NO_EXTRA
    return "", parts.pop("score", None), parts, texts


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} … ({len(text):,} characters)"


def is_finite(value: object) -> bool:
    """Return whether a value is a float that is finite in float32 too."""
    return isinstance(value, float) and abs(value) <= _LARGEST


def _number(value: object) -> float | None:
    """Return a float that is finite in float32 too, or None if ``value`` is no such number."""
    is_complex = (
        str(getattr(value, "dtype", "")).rpartition(".")[2].startswith("complex")
    )  # of which NumPy takes a part
    if isinstance(value, str | bytes) or is_complex or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - it has __float__
    except Exception:  # noqa: BLE001 - tensors of many elements, overflow, a user's own class: no number, whatever it says
        return None
    return number if is_finite(number) else None


def _show(value: object) -> str:
    try:
        return f"{repr(value)[:60]} ({type(value).__name__})"
    except Exception:  # noqa: BLE001 - a user's own class, whose text may raise anything
        return f"an object of {type(value).__name__}"


_OURS: Final = frozenset({__file__, inspect.getfile(CallForm)})


def _trace(error: BaseException) -> str:
    """Return the traceback of ``error`` without the frames of Podium that call the reward."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return format_error(error, trace)


def make_grade(
    result: Result, config: RewardConfig, label: str, item: str, remedy: str = "", *, is_sum: bool
) -> Grade | RewardError:
    """Return the grade of a completion, or the error that its reward's failure is.

    Args:
        result: What the reward returned, or why it did not.
        label: The reward, as errors call it.
        item: The completion, as errors call it.
        remedy: What else to say of a failure.
        is_sum: Whether the score is the sum of several rewards.
    """
    if not result.problem and result.score is None:
        return Grade(math.nan, result.parts, abstained=True, extra=result.extra, logged=result.logged)
    if not result.problem and result.score is not None:
        correct = config.is_correct(result.score, is_sum=is_sum)
        return Grade(result.score, result.parts, correct, extra=result.extra, logged=result.logged)
    problem = result.problem
    if over_memory := result.limit == "memory" and config.memory_gib is not None:
        problem = f"ran over {config.memory_gib:g} GiB of memory (reward.memory_gib)"
    if result.limit == "time" or over_memory or config.on_error == "score":
        correct = None if is_sum and config.correct_at is None else False
        return Grade(config.failure_score, correct=correct, error=problem, timed_out=result.limit == "time")
    error = RewardError(
        f"{item}: the reward {label} {problem}; expected a finite number, or a mapping of named finite numbers with "
        '"score": repair the reward, or set reward.on_error to score, which gives such items '
        f"{config.failure_score:g} and goes on{remedy}{show_traceback(result)}"
    )
    error.__cause__ = result.error
    return error


def show_traceback(result: Result) -> str:
    """Return the end of a message that has the traceback of a reward; "" without one."""
    return f"\n\nIn the reward:\n{result.traceback.rstrip()}" if result.traceback else ""
