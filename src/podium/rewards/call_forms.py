"""The forms of reward functions: how each is recognized by its signature, and called.

    (completion, row)                                            Podium's. The row is a mapping of the columns
    (completion, COLUMN, …)                                      the same with columns of the data by name
    (completions, prompts, COLUMN, …)                            TRL's, which is called with lists of one completion
    (data_source, solution_str, ground_truth, extra_info)        verl's
    (data_sources, solution_strs, ground_truths, extra_infos)    verl's of a batch, called with lists of one completion

Each parameter gets its value by its name. A function with a parameter whose value nobody knows is refused, because it
would otherwise compare the completion with something else than the answer, and score 0 without an error.
"""

from __future__ import annotations

import copy
import inspect
import keyword
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from podium.annotations import signature_of
from podium.errors import ConfigError
from podium.rewards.columns import list_read_keys
from podium.rewards.signatures import (
    describe_place,
    find_code,
    is_empty,
    is_unused,
    list_partial_keywords,
    list_texts,
    read_signature,
)
from podium.spelling import write_count

EXTRAS: Final = ("completion_ids", "prompt_ids", "trainer_state", "max_new_tokens", "stop_text")
"""What the trainer knows of a completion beside its text and row, and gives to a function that asks for it."""

_COMPLETION: Final = "completion"
_COMPLETIONS: Final = frozenset(
    {
        *("completion", "response", "output", "reply", "text", "content", "message", "generation", "generated"),
        *("generated_text", "prediction", "pred", "predicted", "completion_text", "response_text", "output_text"),
        *("model_output", "model_response", "model_answer", "candidate", "hypothesis", "solution", "result"),
        "student_answer",
    }
)
"""Names of a parameter that can only mean the completion, unless it is a column of the data."""
_ROWS: Final = frozenset(
    {"row", "example", "sample", "item", "record", "datum", "doc", "entry", "data", "instance", "inputs"}
)
"""Names of a parameter that means the row, unless it is a column of the data."""
_NO_COMPLETION: Final = frozenset(
    {"prompt", "question", "answer", "ground_truth", "row", "self", "cls", "args", "state", "batch"}
)
_LISTS: Final = frozenset({"completions", "completions_ids", "prompts"})
_TRUTHS: Final = frozenset({"reward_model", "ground_truth", "answer"})  # columns in which verl's rows have the answer
_VERL_LISTS: Final = {f"{name}s": name for name in ("data_source", "solution_str", "ground_truth", "extra_info")}
_LOGS: Final = ("log_extra", "log_metric")
_RESERVED: Final = frozenset({"prompt", "completion", "completion_ids"})  # columns that TRL passes under other names

_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


class CallError(ValueError):
    """A function cannot be called for an item, or returned what its form does not. The message goes on from "the
    reward"."""


@dataclass(frozen=True, slots=True)
class Item:
    """One completion to be scored.

    Attributes:
        completion: Its text.
        row: The row of the data that its prompt came from.
        extras: The values of those of ``EXTRAS`` that a function asks for, as far as the trainer knows them.
    """

    completion: str
    row: Mapping[str, Any]
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Log:
    """What functions log of one completion: numbers become parts, everything else text beside the completion."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[float]] = {}
        self.extra: dict[str, str] = {}

    @property
    def parts(self) -> dict[str, float]:
        """The logged numbers. Of several of one name, which may be those of several functions, it is their mean."""
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}

    def log_metric(self, name: str, value: Any) -> None:
        """Keep a number, whose mean over completions is a metric."""
        self._metrics.setdefault(str(name), []).append(float(value))

    def log_extra(self, column: str, values: Any) -> None:
        """Keep a column's value, which TRL's functions give as a list of one."""
        is_list = isinstance(values, list | tuple) and len(values) == 1
        self.extra[str(column)] = str(values[0] if is_list else values)


Getter = Callable[[Item, Log], Any]


@dataclass(frozen=True)
class _Call:
    """How a function is called for rows with certain columns: ``reward(*positional, **by_name, **rest(item))``."""

    positional: tuple[Getter, ...]
    by_name: Mapping[str, Getter]
    rest: Callable[[Item, Log], Mapping[str, Any]] | None


class CallForm:
    """A reward function and the way in which it is called.

    Args:
        reward: The function, or any callable object.
        name: The name of its part of the score.
        steps: The number of steps of the run, which ``trainer_state`` holds.

    Attributes:
        extras: Those of ``EXTRAS`` that it asks for.
        is_async: Whether it is a coroutine function.
        most_items: How many completions it must have at the same time, if it waits for several of them.
        least_limit_s: The seconds that it may take by limits of its own.
        takes_lists: Whether it is called with lists of one completion, in TRL's form or verl's of a batch.
        where: The function with its file and line, as errors call it.

    Raises:
        ConfigError: The function has no signature, or one that hides its parameters.
    """

    takes_lists = False
    _given = frozenset(EXTRAS)  # what it gets of the run by these names, although the data have such columns
    _reserved = frozenset[str]()  # columns that it gets under other names
    _of_rest = frozenset[str]()  # what ``**kwargs`` gets of the run although the code of the function does not name it

    def __init__(self, reward: Callable[..., Any], name: str, steps: int = 0) -> None:
        self.reward, self.name, self.steps = reward, name, steps
        self.where = f"the reward {name}{describe_place(reward)}"
        self.is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
        self.most_items, self.least_limit_s = getattr(reward, "most_items", 0), getattr(reward, "least_limit_s", 0.0)
        self.signature = read_signature(reward)
        every = self.signature.parameters.values()
        self.parameters = {parameter.name: parameter for parameter in every if parameter.kind in _NAMED}
        self.rest = next((parameter.name for parameter in every if parameter.kind is parameter.VAR_KEYWORD), None)
        self.bound = list_partial_keywords(reward)
        self._code = find_code(reward)
        in_rest = {*list_texts(self._code), *self._of_rest} if self.rest is not None else set[str]()
        self.extras = frozenset(EXTRAS) & (self.parameters.keys() | in_rest)
        if "completions_ids" in self.parameters:
            self.extras |= {"completion_ids"}
        self._calls: dict[tuple[str, ...], _Call] = {}

    def check(self, columns: Collection[str]) -> list[str]:
        """Check that every parameter has a value for rows with these columns.

        Returns sentences on what the function reads that these rows do not have.

        Raises:
            ConfigError: A parameter has no value.
        """
        call = self._bind(columns := frozenset(columns))
        if (check := getattr(self.reward, "check_columns", None)) is not None:
            check(columns)
        shadowed = [name for name in self.parameters if name in self._given & columns - self._reserved]
        return [
            *(f"{self.where} gets the {name} of the run, and not the column of this name" for name in shadowed),
            *self._explain_defaults(call, columns),
            *self._explain_keys(columns),
        ]

    def call(self, item: Item, log: Log) -> Any:
        """Call the function. Returns what it returns, which may be to await. Raises whatever it raises.

        It gets a copy of row and extras, so that what it changes in them is seen by no other function and completion.
        """
        extras = {name: [*value] if isinstance(value, list) else value for name, value in item.extras.items()}
        item = Item(item.completion, copy.deepcopy(dict(item.row)), extras)
        columns = tuple(item.row)
        if (call := self._calls.get(columns)) is None:
            call = self._calls[columns] = self._bind(frozenset(columns))
        arguments = {name: getter(item, log) for name, getter in call.by_name.items()}
        if call.rest is not None:
            arguments = {**call.rest(item, log), **arguments}
        return self.reward(*(getter(item, log) for getter in call.positional), **arguments)

    def read(self, value: Any) -> Any:
        """Return the score of the one completion in what the function returned."""
        return value

    def _bind(self, columns: frozenset[str]) -> _Call:
        """Find the value of each parameter, or leave it at its default. Raises ConfigError where there is none."""
        getters: dict[str, Getter] = {}
        empty: list[str] = []
        for name, parameter in self.parameters.items():
            if name in self.bound:
                continue
            getter = self._find(parameter, columns)
            if getter is not None:
                getters[name] = getter
            elif parameter.default is parameter.empty:
                raise ConfigError(self._refuse(name, columns))
            elif is_empty(parameter.default):
                empty.append(name)
        if empty and not self._reads_row(getters, columns):
            raise ConfigError(self._refuse(empty[0], columns))
        positional: list[Getter] = []
        before = [p for p in self.parameters.values() if p.kind is p.POSITIONAL_ONLY]
        last = max((place for place, p in enumerate(before) if p.name in getters), default=-1)
        for parameter in before[: last + 1]:
            default = parameter.default
            positional.append(getters.pop(parameter.name, lambda item, log, default=default: default))
        return _Call(tuple(positional), getters, None if self.rest is None else self._find_rest(columns, getters))

    def _find(self, parameter: inspect.Parameter, columns: frozenset[str]) -> Getter | None:
        """The value of a parameter; None where nobody gives one."""
        raise NotImplementedError

    def _find_rest(self, columns: frozenset[str], getters: Mapping[str, Getter]) -> Callable[..., Mapping[str, Any]]:
        """The values of ``**kwargs``."""
        raise NotImplementedError

    def _explain_defaults(self, call: _Call, columns: frozenset[str]) -> list[str]:
        """Sentences on parameters that keep their defaults although their names may mean columns."""
        kept = [name for name in self.parameters if name not in (*call.by_name, *self.bound)]
        kept = [name for name in kept if self.parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY]
        listed = ", ".join(f"{name} = {self.parameters[name].default!r:.60}" for name in kept)
        if kept and self.rest is None and not self._reads_row(call.by_name, columns):
            return [f"{self.where} reads nothing of the row, and keeps {listed}: no column of the data has such a name"]
        if same := [name for name in kept if name in columns]:
            why = f"gets the row, so its parameter {same[0]} keeps its default"
            return [f"{self.where} {why} {self.parameters[same[0]].default!r:.60}, and not the column of this name"]
        return []

    def _explain_keys(self, columns: frozenset[str]) -> list[str]:
        """A sentence on what the function reads of the row, or of ``**kwargs``, that some rows do not have."""
        for variable, names in self._list_mappings(columns).items():
            missing = [key for key in list_read_keys(self._code, variable) if key not in names]
            if missing:
                listed = ", ".join(sorted(names)) or "nothing"
                what = f"reads {missing[0]!r} of {variable}, and some rows of the data do not have it"
                return [f"{self.where} {what}: {variable} has {listed}"]
        return []

    def _list_mappings(self, columns: frozenset[str]) -> dict[str, frozenset[str]]:
        """The parameters that get mappings, with the names that these have."""
        return {}

    def _reads_row(self, getters: Mapping[str, Getter], columns: frozenset[str]) -> bool:
        """Whether a parameter gets the row or a column of it."""
        return any(name in columns for name in getters)

    def _extra(self, parameter: inspect.Parameter) -> Getter | None:
        """The value of a parameter that the trainer gives, or of one that logs."""
        name = parameter.name.replace("completions_", "completion_")
        if name in EXTRAS:
            return lambda item, log: self._read_extra(item, name, parameter.default)
        if name in _LOGS:
            return lambda item, log: getattr(log, name)
        return None

    def _read_extra(self, item: Item, name: str, default: Any = inspect.Parameter.empty) -> Any:
        if name not in item.extras and default is not inspect.Parameter.empty:
            return default
        if name not in item.extras:
            raise CallError(f"asks for {name}, which a run knows: Grader.grade gets it as extras")
        value = item.extras[name]
        if name == "trainer_state":
            return SimpleNamespace(global_step=value, max_steps=self.steps)
        return [value] if self.takes_lists else value

    def _read_extras(self, item: Item) -> dict[str, Any]:
        """Those of ``EXTRAS`` that ``**kwargs`` gets."""
        names = (self.extras & item.extras.keys()) - self.parameters.keys()
        return {name: self._read_extra(item, name) for name in names}

    def _refuse(self, name: str, columns: frozenset[str]) -> str:
        if name == "environments":
            return f"{self.where} needs environments, which only TRL's trainer has: see docs/coming-from-trl.md"
        label = self.name if self.name.isidentifier() and not keyword.iskeyword(self.name) else "score"
        listed = ", ".join(sorted(columns)) or "none"
        answer = next((column for column in ("answer", *sorted(columns - {"prompt"})) if column in columns), "answer")
        what = f"is neither the completion, the row nor a column of the data (which are {listed})"
        if "return_dict" in self.parameters or "DataProto" in str(self.signature):
            what = (
                "is verl's batch, as a reward manager gets it: give the function that the manager calls for one answer"
            )
        elif name in ("self", "cls"):
            what = "is the object of a method: give the method of an object, as in `Judge().score`. Or"
        elif name in _ROWS and len(self.parameters) == 1:
            what = "is the row, and no parameter is known to be the completion"
        if name in columns:
            what = "is a column of the data, and no parameter is known to be the completion"
        if name in self._reserved:
            what = (
                f"has another name in TRL's form, whose lists are prompts, completions and completion_ids, not {name}"
            )
        return (
            f"{self.where} has the signature {self.signature}, and its parameter {name!r} {what}: write "
            f'`def {label}(completion, row)` and read row["{answer}"] in it, or name the parameter after its column, '
            f"as in `def {label}(completion, {answer})`"
        )


class _RowForm(CallForm):
    """Podium's form: one completion, with its row or with columns by name."""

    _row: str | None = None

    def _bind(self, columns: frozenset[str]) -> _Call:
        if not self.parameters:  # lambda *_: 1.0
            return _Call((), {}, None)
        self._completion, self._row = self._find_completion(columns)
        return super()._bind(columns)

    def _find_completion(self, columns: frozenset[str]) -> tuple[str, str | None]:
        """The names of the parameters that are the completion and the row; None if the row is not asked for."""
        names = [name for name in self.parameters if name not in self.bound]
        others = [name for name in names if name not in columns and name not in EXTRAS]
        unused = next((name for name in names[1:] if is_unused(self.parameters[name])), None)
        exact = "row" if "row" in names else unused
        completions = [name for name in others if name in _COMPLETIONS]
        first = names[0] if names else ""
        is_first = first in others and first not in _NO_COMPLETION
        second = next((name for name in names[1:2] if name in others and self._is_mapping(name)), None)
        if _COMPLETION in names:
            completion = _COMPLETION
        elif completions:
            completion = completions[0]
        elif is_first and ((len(names) == 1 and first not in _ROWS) or (exact or second) not in (None, first)):
            completion = first
        else:
            raise ConfigError(self._refuse(first, columns))
        rows = [name for name in others if name in _ROWS and name != completion and not self._is_plain(name)]
        row = exact or next(iter(rows), None) or second
        if exact is None and (unclear := next((name for name in names if name in _ROWS and name in columns), None)):
            raise ConfigError(
                f"{self.where} has the parameter {unclear!r}, which may be the row or its column {unclear!r}: call it "
                "row if it means the row"
            )
        return completion, row if row != completion else None

    def _is_mapping(self, name: str) -> bool:
        """Whether a parameter's annotation says that it is a mapping."""
        return re.search(r"(?i)\b(dict|\w*mapping|typeddict)\b", self._annotation(name)) is not None

    def _is_plain(self, name: str) -> bool:
        """Whether a parameter's annotation says that it is text, a number or a list."""
        return re.match(r"(?i)(str|int|float|bool|list|tuple|sequence)\b", self._annotation(name)) is not None

    def _annotation(self, name: str) -> str:
        """The annotation of a parameter as text."""
        annotation = self.parameters[name].annotation
        if isinstance(annotation, type) and issubclass(annotation, Mapping):
            return "dict"
        return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def _find(self, parameter: inspect.Parameter, columns: frozenset[str]) -> Getter | None:
        name = parameter.name
        if name == self._completion:
            return lambda item, log: item.completion
        if name == self._row or is_unused(parameter):
            return lambda item, log: item.row
        if (extra := self._extra(parameter)) is not None:
            return extra
        if name in columns and (self._row is None or parameter.default is parameter.empty):
            return lambda item, log: item.row[name]
        return None

    def _reads_row(self, getters: Mapping[str, Getter], columns: frozenset[str]) -> bool:
        return self._row is not None or super()._reads_row(getters, columns)

    def _find_rest(self, columns: frozenset[str], getters: Mapping[str, Getter]) -> Callable[..., Mapping[str, Any]]:
        def rest(item: Item, log: Log) -> dict[str, Any]:
            values = {**item.row, **self._read_extras(item)}
            return {name: value for name, value in values.items() if name not in self.parameters}

        return rest

    def _list_mappings(self, columns: frozenset[str]) -> dict[str, frozenset[str]]:
        names = columns - self.parameters.keys() | {*EXTRAS}
        return {**({self._row: columns} if self._row else {}), **({self.rest: names} if self.rest else {})}


class _ListForm(CallForm):
    """TRL's form. Each completion has its own time limit and place in a process, so the lists have one entry."""

    takes_lists = True
    _given = frozenset({*EXTRAS, *_LISTS})
    _reserved = _RESERVED
    _of_rest = frozenset({"completion_ids", "trainer_state"})  # always, as in TRL: it may pass them on

    def _find(self, parameter: inspect.Parameter, columns: frozenset[str]) -> Getter | None:
        name = parameter.name
        if name in ("completions", "prompts"):
            return lambda item, log: _texts(item)[name]
        if (extra := self._extra(parameter)) is not None:
            return extra
        if name in columns and name not in _RESERVED:
            return lambda item, log: [item.row[name]]
        return None

    def _find_rest(self, columns: frozenset[str], getters: Mapping[str, Getter]) -> Callable[..., Mapping[str, Any]]:
        def rest(item: Item, log: Log) -> dict[str, Any]:
            values: dict[str, Any] = {name: [value] for name, value in item.row.items() if name not in _RESERVED}
            values |= {**_texts(item), "log_extra": log.log_extra, "log_metric": log.log_metric}
            values |= self._read_extras(item)
            return {name: value for name, value in values.items() if name not in self.parameters}

        return rest

    def _list_mappings(self, columns: frozenset[str]) -> dict[str, frozenset[str]]:
        names = columns - _RESERVED | {"prompts", "completions", *_LOGS, *EXTRAS}
        return {self.rest: names - self.parameters.keys()} if self.rest else {}

    def read(self, value: Any) -> Any:
        return _read_list(value)


class _VerlForm(CallForm):
    """verl's form: texts, whatever the prompt is. The parameters of a batch have names in the plural."""

    def __init__(self, reward: Callable[..., Any], name: str, steps: int = 0) -> None:
        super().__init__(reward, name, steps)
        self.takes_lists = "solution_strs" in self.parameters

    def read(self, value: Any) -> Any:
        return _read_list(value) if self.takes_lists else value

    def _find(self, parameter: inspect.Parameter, columns: frozenset[str]) -> Getter | None:
        name = parameter.name
        if (extra := self._extra(parameter)) is not None:
            return extra
        if self.takes_lists and (name in _VERL_LISTS or name in columns):
            getter = self._find_one(parameter.replace(name=_VERL_LISTS.get(name, name)), columns)
            return getter and (lambda item, log: [getter(item, log)])
        return self._find_one(parameter, columns)

    def _find_one(self, parameter: inspect.Parameter, columns: frozenset[str]) -> Getter | None:
        """The value for one completion."""
        name = parameter.name
        if name == "solution_str":
            return lambda item, log: item.completion
        if name == "ground_truth":
            if not columns & _TRUTHS:
                raise ConfigError(
                    f"{self.where} has verl's signature, and the rows have no ground truth: neither reward_model nor "
                    "ground_truth nor answer is a column of the data; set data.answer_column"
                )
            return lambda item, log: _ground_truth(item.row)
        if name == "data_source":
            return lambda item, log: item.row.get(name)
        if name == "extra_info":
            return lambda item, log: dict(item.row.get(name) or {})
        return (lambda item, log: item.row[name]) if name in columns else None

    def _reads_row(self, getters: Mapping[str, Getter], columns: frozenset[str]) -> bool:
        return True

    def _find_rest(self, columns: frozenset[str], getters: Mapping[str, Getter]) -> Callable[..., Mapping[str, Any]]:
        return lambda item, log: self._read_extras(item)

    def _list_mappings(self, columns: frozenset[str]) -> dict[str, frozenset[str]]:
        return {self.rest: frozenset(EXTRAS)} if self.rest else {}


def read_form(reward: Callable[..., Any], name: str, steps: int = 0) -> CallForm:
    """Return the form of a function, a callable object, or a class whose objects are callable and need no argument.

    Raises:
        ConfigError: The function hides its parameters, so that nobody can say what it takes.
    """
    if not callable(reward):
        raise ConfigError(
            f"the reward {reward!r:.60} is of type {type(reward).__name__}: expected a function, or a list of "
            "functions and of names"
        )
    if inspect.isclass(reward):
        reward = _make_object(reward, name)
    try:
        signature = read_signature(reward)
        parameters = signature.parameters
    except (TypeError, ValueError):
        raise ConfigError(
            f"the reward {name} has no signature that Python can read: write a function of (completion, row) that "
            "calls it"
        ) from None
    named = [parameter.name for parameter in parameters.values() if parameter.kind in _NAMED]
    if not named and not (parameters and all(parameter.startswith("_") for parameter in parameters)):
        raise ConfigError(
            f"the reward {name}{describe_place(reward)} has the signature {signature}, which does not say what it "
            "takes: write its parameters out, or put functools.wraps on the wrapper"
        )
    if {"solution_str", "solution_strs"} & {*named}:
        return _VerlForm(reward, name, steps)
    is_by_ids = bool(named) and named[0] in EXTRAS and not {"completion", "row"} & {*named}
    return (_ListForm if _LISTS & {*named} or is_by_ids else _RowForm)(reward, name, steps)


def _make_object(cls: type, name: str) -> Callable[..., Any]:
    """An object of a class that was given in place of one of its objects."""
    try:
        signature_of(cls).bind()
    except (TypeError, ValueError):
        made = None
    else:
        made = cls()
    if not callable(made):
        raise ConfigError(
            f"the reward {name} is a class, of which an object would be called with (completion, row): give an object "
            "that can be called, or a function"
        )
    return made


def _read_list(value: Any) -> Any:
    """The one score in the list that a function returned for a list of one completion."""
    if (
        not hasattr(value, "__len__")
        or not hasattr(value, "__getitem__")
        or isinstance(value, str | bytes | bytearray | Mapping)
    ):
        raise CallError(f"returned {value!r:.60} for a list of one completion: expected a list of one number")
    if len(value) != 1:
        raise CallError(f"returned {write_count(len(value), 'score')} for a list of one completion: expected one")
    return value[0]


def _texts(item: Item) -> dict[str, list[Any]]:
    """The prompt and the completion in lists of one. The completion is a list of messages where the prompt is one."""
    prompt = item.row.get("prompt")
    answer = [{"role": "assistant", "content": item.completion}] if isinstance(prompt, list) else item.completion
    return {"prompts": [prompt], "completions": [answer]}


def _ground_truth(row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    truth = row["ground_truth"] if "ground_truth" in row else row.get("answer")
    if truth is None:
        raise CallError("cannot be called: the row has no reward_model.ground_truth, ground_truth or answer")
    return truth
