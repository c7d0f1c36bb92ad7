"""The names that settings of other projects, and their values, have in Podium.

The answers are data, in a file for each project beside this module, which are read when a key or a value is unknown.
Whoever converts whole configurations reads the same files.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from podium.answers import Translation

__all__ = ["Equivalent", "Table", "find_equivalent", "find_translation", "read_tables", "read_values"]


@dataclass(frozen=True)
class Equivalent:
    """The answer to a setting of another project.

    Attributes:
        key: The key that means the same. It is empty where no single key does.
        remark: A sentence on what differs. It is empty where nothing does.
        missing: Whether Podium lacks what the setting does. ``key`` is empty then.
        holds: The values for which Podium needs no setting, of an answer without a key. Podium lacks what other values
            do. Empty for an answer that holds for all values.
        otherwise: The answers in configurations that lack ``key``, such as that of supervised fine-tuning.
        default: The setting's default, "null" for one that is None. A mapping has one for each recipe of the
            project. None where the table has no default.
        rule: Name of the computation by which a value becomes Podium's, where it is another value.
        group: Name of the settings that are converted together with this one.
        several: Whether settings of different meanings are called so. ``remark`` lists them.
        values: Values of the setting that are called otherwise here, beside those of the key.
    """

    key: str = ""
    remark: str = ""
    missing: bool = False
    holds: tuple[str, ...] = ()
    otherwise: tuple["Equivalent", ...] = ()
    default: Any = None
    rule: str = ""
    group: str = ""
    several: bool = False
    values: Mapping[str, Translation] = field(default_factory=dict[str, Translation])

    def choose(self, keys: Container[str]) -> "Equivalent | None":
        """Return this answer or one of the others: the first whose key is among ``keys``. None if there is none."""
        answers = (self, *self.otherwise)
        return next((answer for answer in answers if not answer.key or _root(answer.key) in keys), None)

    def lacks(self, value: object) -> bool:
        """Whether Podium lacks what ``value`` of the setting does."""
        return self.missing or (bool(self.holds) and _text(value) not in self.holds)

    def translate(self, value: object) -> Translation | None:
        """Return what ``value`` of the setting is here, if it is called otherwise."""
        return self.values.get(_text(value)) or (find_translation(self.key, value) if self.key else None)


@dataclass(frozen=True)
class Table:
    """The answers to the settings of one project. Each has the setting's dotted path, in which ``*`` is any text."""

    project: str
    version: str
    answers: Mapping[str, Equivalent]

    def find(self, path: str) -> Equivalent | None:
        """Return the answer to exactly ``path``: of patterns that match it, the longest decides."""
        if path in self.answers:
            return self.answers[path]
        matching = [pattern for pattern in self.answers if "*" in pattern and _expression(pattern).fullmatch(path)]
        return self.answers[max(matching, key=len)] if matching else None

    def find_above(self, path: str) -> Equivalent | None:
        """Return the answer to the setting that ``path`` lies below: one that takes a mapping, as ``engine_kwargs``."""
        above = path.rpartition(".")[0]
        return (self.find(above) or self.find_above(above)) if "." in above else None

    def find_endings(self, path: str) -> dict[str, Equivalent]:
        """Return the answers to settings whose path ends with ``path``, by their paths."""
        return {name: answer for name, answer in self.answers.items() if name.endswith(f".{path}")}


def find_equivalent(path: str, keys: Container[str] | None = None) -> Equivalent | None:
    """Return the answer to an unknown dotted ``path``, or to the end of a path. None if no table has one.

    ``keys`` are those of the configuration, where others are no answer. None means that all are.

    Where settings of several projects, or several of one, are called so and mean different things, the answer has no
    key, and its remark lists them.

    >>> find_equivalent("actor_rollout_ref.rollout.n").key
    'sampling.n'
    >>> find_equivalent("rollout.n").key
    'sampling.n'
    """
    named = _find_named(path)
    if keys is not None:
        named = {name: chosen for name, answer in named.items() if (chosen := answer.choose(keys))}
    distinct: dict[tuple[str, bool], str] = {}
    for name, answer in named.items():
        distinct.setdefault((answer.key, answer.missing), name)
    if len(distinct) <= 1:
        return next(iter(named.values()), None)
    if len(distinct) > _SEVERAL:
        return None
    return Equivalent(remark="; ".join(f"{name} {_in_short(named[name])}" for name in distinct.values()), several=True)


def _find_named(path: str) -> dict[str, Equivalent]:
    """The answers to ``path`` by what has it: settings of this name, or else patterns, ends, or settings above it."""
    tables = read_tables()
    if named := {f"in {table.project} it": table.answers[path] for table in tables if path in table.answers}:
        return named
    if named := {f"in {table.project} it": answer for table in tables if (answer := table.find(path))}:
        return named
    if named := {
        f"{table.project}'s {name}": answer for table in tables for name, answer in table.find_endings(path).items()
    }:
        return named
    return {f"in {table.project} it": answer for table in tables if (answer := table.find_above(path))}


def find_translation(key: str, value: object) -> Translation | None:
    """Return what another project's ``value`` is as a value of ``key``. None if no table says it.

    >>> find_translation("algorithm.aggregation", "seq-mean-token-mean").value
    'sequence-mean'
    """
    return read_values().get(key, {}).get(_text(value))


@cache
def read_tables() -> tuple[Table, ...]:
    """Return the tables of all projects."""
    return tuple(_read_table(Path(__file__).with_name(f"{name}.yaml")) for name in _TABLES)


_TABLES = (
    "trl",
    "verl",
    "openrlhf",
    "prime_rl",
    "podium",
)  # where several answer with the same key, the first one's words count
_VALUES = Path(__file__).with_name("values.yaml")
_SEVERAL = 4  # settings that one answer lists


def _in_short(answer: Equivalent) -> str:
    return f"is {answer.key}" if answer.key else "has no counterpart" if answer.missing else "needs none"


def _read_table(path: Path) -> Table:
    content = _read_yaml(path)
    answers = {name: _read_answer(value) for key, value in content["keys"].items() for name in _spell_out(key)}
    for kind in ("automatic", "missing"):
        for remark, keys in content[kind].items():
            answer = Equivalent(remark=remark, missing=kind == "missing")
            for name in (name for key in keys.split() for name in _spell_out(key)):
                if name in answers:
                    raise ValueError(f"{path.name} has two answers to {name}")
                answers[name] = answer
    return Table(content["project"], str(content["version"]), answers)


def _read_yaml(path: Path) -> Any:
    import yaml  # help and a wrong command are answered without it

    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _read_answer(value: Any) -> Equivalent:
    if isinstance(value, str):
        return Equivalent(value)
    values = {_text(name): _read_translation(entry) for name, entry in value.get("values", {}).items()}
    holds = tuple(map(_text, value.get("holds", ())))
    otherwise = tuple(map(_read_answer, value.get("otherwise", ())))
    return Equivalent(**{**value, "values": values, "holds": holds, "otherwise": otherwise})


@cache
def read_values() -> Mapping[str, Mapping[str, Translation]]:
    """Return the values of all projects that are called otherwise here, by the key that takes them."""
    content = _read_yaml(_VALUES)
    return {
        key: {_text(name): _read_translation(entry) for name, entry in entries.items()}
        for key, entries in content.items()
    }


def _read_translation(entry: Any) -> Translation:
    return Translation(**entry) if isinstance(entry, dict) else Translation(entry)


def _text(value: object) -> str:
    """A value as the tables write it: ``None`` and ``"null"`` are the same, ``True`` and ``"true"`` too."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


def _spell_out(pattern: str) -> Iterator[str]:
    """``a.{b,c}`` as ``a.b`` and ``a.c``."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    yield from map("".join, product(*(part.split(",") if place % 2 else [part] for place, part in enumerate(parts))))


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """``*`` is any text, with dots too. ``*.`` at the beginning may be missing."""
    optional = pattern.startswith("*.")
    text = ".*".join(map(re.escape, pattern.removeprefix("*.").split("*")))
    return re.compile(f"(.*\\.)?{text}" if optional else text)


def _root(key: str) -> str:
    """The key of the configuration that ``key`` is or lies below: options are those of a component."""
    return re.sub(r"\.options\..*", ".options", key)
