"""A configuration of Podium that grows from the settings of another project, with the reasons as comments."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from podium.config import keys_of, load_config
from podium.errors import ConfigError, PodiumError
from podium.exceptions import describe_error
from podium.runs.recipes import find_recipe, list_recipes
from podium.spelling import write_count
from podium_migration.sources import Settings
from podium_migration.tables import Equivalent, Table, read_tables

__all__ = ["Conversion", "convert_settings"]

_UNFIT: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What Python raises where a value is of another kind than a computation needs."""


def convert_settings(settings: Settings, convert: Callable[[Settings], "Conversion"]) -> "Conversion":
    """Convert settings by ``convert``, and list those that change nothing of the result among what is lost.

    Such a setting has a counterpart that the conversion does not reach: it belongs to a choice that the run does not
    make, or no function converts it. A conversion without it has the same result.

    Raises:
        ConfigError: A setting has a value of a kind that its conversion does not take, such as null for a number.
    """
    try:
        conversion = convert(settings)
    except PodiumError:
        raise
    except _UNFIT as error:
        raise ConfigError(_explain_unfit(settings, convert, error)) from error
    for name in settings.values:
        if (answer := conversion.find_expected(name)) and _equals_without(conversion, name, convert):
            remark = f", {answer.remark}" if answer.remark else ""
            conversion.lose(name, f"it is {answer.key}{remark}; it changes nothing in this configuration")
    return conversion


def _equals_without(conversion: "Conversion", name: str, convert: Callable[[Settings], "Conversion"]) -> bool:
    settings = conversion.settings
    try:
        without = convert(_leave_out(settings, name))
    except (*_UNFIT, PodiumError):
        return False  # other settings mean nothing without it
    return (without.values, without.notes) == (conversion.values, conversion.notes)


def _explain_unfit(settings: Settings, convert: Callable[[Settings], "Conversion"], error: Exception) -> str:
    """Name the settings without each of which the conversion succeeds."""
    unfit = list[str]()
    for name in settings.values:
        try:
            convert(_leave_out(settings, name))
        except (*_UNFIT, PodiumError):
            continue
        unfit.append(f"{name}={settings.values[name]!r}")
    subject = " or ".join(unfit) or "a value of several settings"
    return (
        f"{subject} cannot be converted ({describe_error(error)}): take it out of the file, or give another value "
        "behind the file, as NAME=VALUE"
    )


def _leave_out(settings: Settings, name: str) -> Settings:
    return settings._replace(values={other: value for other, value in settings.values.items() if other != name})


class Conversion:
    """The conversion of the settings of one file.

    Attributes:
        recipe: The recipe of Podium that does the same.
        values: Values of Podium's keys.
        notes: Comments on single keys.
        lost: A line for each setting that has no counterpart or that the file does not decide.
    """

    def __init__(self, project: str, settings: Settings, recipe: str, theirs: str) -> None:
        self.table: Table = next(table for table in read_tables() if table.project == project)
        self.settings, self.recipe, self.theirs = settings, recipe, theirs
        keys = keys_of(find_recipe(recipe).config)
        self.defaults = {key.path: key.default for key in keys}
        self.expected = {key.path: key.expects for key in keys}
        self.values: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self.lost: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting: the file's, or the default of the project, or ``default``."""
        if name in self.settings.values:
            return self.settings.values[name]
        answer = self.table.answers.get(name)
        value = None if answer is None else self._default_of(answer)
        return default if value in (None, "null") else value

    def _default_of(self, answer: Equivalent) -> Any:
        default = answer.default
        return default.get(self.theirs) if isinstance(default, dict) and default else default

    def find_expected(self, name: str) -> Equivalent | None:
        """Return the answer to a setting of the file that should change the configuration.

        None for a setting without a key here, for one whose value is the project's default or means off, and for one
        that is already among what is lost.
        """
        answer = self.table.find(name)
        if answer is None or not (chosen := self._choose(answer)).key:
            return None
        value, default = self.settings.values[name], self._default_of(answer)
        if self._is_off(name) and (default is None or _equal(value, None if default == "null" else default)):
            return None
        translation = chosen.translate(value)
        here = value if translation is None else translation.value
        key = (translation and translation.key) or chosen.key
        usual = _equal(value, default) or _equal(here, self.values.get(key, self.defaults.get(key)))
        listed = any(line.startswith(f"{name}=") for line in self.lost)
        return None if usual or listed or chosen.group in ("same", "intervals") else chosen

    def _choose(self, answer: Equivalent) -> Equivalent:
        """The answer for the keys of this recipe."""
        return answer.choose(self.defaults) or answer

    def is_set(self, name: str) -> bool:
        """Whether the file gives the setting a value."""
        return name in self.settings.values

    def set(self, key: str, value: Any, note: str = "") -> None:
        """Give a key of Podium's a value, and a comment if there is something to say."""
        self.values[key] = value
        if note:
            self.notes[key] = note

    def lose(self, name: str, reason: str) -> None:
        """Record that a setting has no counterpart."""
        value = self.settings.values.get(name)
        shown = f"{name}={textwrap.shorten(str(value), 100, placeholder=' ...')}" if self.is_set(name) else name
        self.lost.append(f"{shown}: {reason}")

    def convert_plain(self, only_set: Sequence[str] = ()) -> None:
        """Convert the settings that need no computation, and the defaults that differ from Podium's.

        Keys of Podium's that begin with one of ``only_set`` keep Podium's default where the file does not set them:
        where a run leaves its files, and how fast it is.
        """
        for name, answer in self.table.answers.items():
            plain = answer.key and not answer.rule and not answer.group and name not in self.settings.undecided
            if plain and (self.is_set(name) or not answer.key.startswith(tuple(only_set))):
                self._convert(name, answer)
        for name in self.settings.values:
            answer = self.table.find(name) or self.table.find_above(name)
            if name.startswith("--"):
                self.lose(name, "this file of settings is neither here nor beside the script, and was not read")
            elif answer is None:
                self.lose(name, f"the table of {self.table.project} {self.table.version} has no such setting")
            elif not (chosen := self._choose(answer)).key and self._lacks(name, chosen):
                self.lose(name, chosen.remark)
        if names := ", ".join(self.settings.undecided):
            self.lost.append(
                f"{names}: the file does not decide this, a condition or another program does: give NAME=VALUE"
            )

    def _convert(self, name: str, answer: Equivalent) -> None:
        chosen = answer.choose(self.defaults)
        value = self.get(name)
        if chosen is None or (value is None and not self.is_set(name)) or chosen.rule or chosen.group:
            return
        translation = chosen.translate(value)
        key = (translation and translation.key) or chosen.key
        if translation is not None and translation.missing:
            self.lose(name, f"{key} has no such value: {translation.remark}")
            return
        value = value if translation is None else translation.value
        if value is None and key in self.expected and "null" not in self.expected[key]:
            if self._default_of(answer) not in (None, "null"):
                self.lose(name, f"{key} takes no null, and is {self.defaults[key]} where it is not set")
            return
        if self.is_set(name) or not _equal(value, self.defaults.get(key)):
            self.set(key, value, translation.remark if translation and self.is_set(name) else "")

    def _lacks(self, name: str, answer: Equivalent) -> bool:
        off = self._is_off(name) and not answer.holds
        return answer.lacks(self.settings.values[name]) and not off and not name.endswith("._target_")

    def _is_off(self, name: str) -> bool:
        """Whether a setting without a counterpart has a value that means off: nothing, zero, or one of something."""
        value = self.settings.values[name]
        return value is not True and value in (None, False, 0, 1, "", "none", [], {})

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, *header: str) -> str:
        """Return the configuration as YAML with comments, of which ``header`` are the first.

        Raises:
            ConfigError: The values do not fit together. The message says how.
        """
        if "model.path" not in self.values:
            self.set("model.path", "MODEL", "The file names no model: write its directory or its name on the hub here.")
        lines = [*(f"# {line}" for line in header), ""]
        lines += self._write_sections(_nest(self.values), "", "")
        if self.lost:
            lines += ["", "# Without a counterpart, or for you to decide:"]
            for line in self.list_lost():
                lines += textwrap.wrap(line, 116, initial_indent="# - ", subsequent_indent="#   ")
        text = "\n".join(lines) + "\n"
        try:
            load_config(find_recipe(self.recipe).config, "converted", content=text.encode())
        except ConfigError as error:
            raise ConfigError(
                f"the settings do not make a configuration of podium train {self.recipe}: "
                f"{str(error).replace('converted: ', '')}; give others behind the file, as NAME=VALUE of "
                f"{self.table.project}"
            ) from None
        return text

    def list_lost(self, most: int = 1000) -> list[str]:
        """Return the lines of ``lost``, those with one reason as one, which names at most this many settings."""
        names: dict[str, list[str]] = {}
        for line in self.lost:
            name, _, reason = line.partition(": ")
            names.setdefault(reason, []).append(name)
        lines = list[str]()
        for reason, of_reason in names.items():
            of_reason = list(dict.fromkeys(of_reason))
            others = f" and {write_count(len(of_reason) - most, 'other')}" if len(of_reason) > most else ""
            lines.append(f"{', '.join(of_reason[:most])}{others}: {reason}")
        return lines

    def _write_sections(self, values: Mapping[str, Any], path: str, indent: str) -> Iterator[str]:
        for name, value in values.items():
            key = f"{path}.{name}".strip(".")
            if isinstance(value, _Section):
                yield f"{indent}{name}:"
                yield from self._write_sections(value, key, indent + "  ")
                continue
            text = (
                yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False)
                .removesuffix("...\n")
                .strip()
            )
            if note := self.notes.get(key):
                yield from textwrap.wrap(note, 116, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            yield f"{indent}{name}: {text}"


class _Section(dict[str, Any]):
    """The keys of a section, which is no value of a key that takes a mapping."""


def _nest(values: Mapping[str, Any]) -> _Section:
    nested = _Section()
    order = [entry.path for name in list_recipes() for entry in keys_of(find_recipe(name).config)]

    def find_place(key: str) -> int:
        """The place of a key among all keys. A component's options come where the options are."""
        return order.index(key if key in order else key.rpartition(".")[0])

    for key in sorted(values, key=find_place):
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, _Section())
        inner[name] = values[key]
    return nested


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return list(first) == list(second)
    return first == second and isinstance(first, bool) == isinstance(second, bool)
