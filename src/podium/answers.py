"""Answers to settings of other projects, by which people look for those of Podium.

An installed package has them: an entry point of the group ``podium.answers``, which is a subclass of :class:`Answers`.
They are asked for once a key, a value or a word of the command line is unknown. Of several packages, the first that has
an answer counts.
"""

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from podium.exceptions import describe_error
from podium.extras import explain_packages
from podium.installed import list_entry_points
from podium.spelling import nearest_spellings

_GROUP: Final = "podium.answers"
_FORM: Final = "write --section.key value, as in --optim.lr 1e-4"


@dataclass(frozen=True)
class Translation:
    """What a value of another project is in Podium.

    Attributes:
        value: Podium's value. It means nothing where ``missing`` is true.
        remark: A sentence on what differs.
        key: The key that takes the value, where it is not that of the setting.
        missing: Whether Podium has no such value.
    """

    value: Any = None
    remark: str = ""
    key: str = ""
    missing: bool = False


class Answers:
    """The answers of a package. This class has none."""

    def find_translation(self, key: str, value: object) -> Translation | None:
        """Return what another project's ``value`` is as a value of ``key``; None if no project has it."""
        return None

    def describe_setting(self, path: str, value: object, keys: Collection[str] | None) -> str:
        """Return the end of a message about the unknown key ``path``; "" if no project has it.

        ``keys`` are those of the configuration. None means a section that is built by itself, in Python.
        """
        return ""

    def describe_word(self, argument: str, keys: Collection[str]) -> str:
        """Return how Hydra's name=value, +name=value or ~name of another project is typed here; "" if none has it."""
        return ""


class _Answers(Answers):
    """The answers of several packages, of which the first counts.

    Attributes:
        packages: Those of each package.
        failures: Why those of others cannot be imported, as the end of a message.
    """

    def __init__(self, packages: Sequence[Answers], failures: Sequence[str]) -> None:
        self.packages, self.failures = packages, failures

    def find_translation(self, key: str, value: object) -> Translation | None:
        return next(filter(None, (answers.find_translation(key, value) for answers in self.packages)), None)

    def describe_setting(self, path: str, value: object, keys: Collection[str] | None) -> str:
        return next(filter(None, (answers.describe_setting(path, value, keys) for answers in self.packages)), "")

    def describe_word(self, argument: str, keys: Collection[str]) -> str:
        return next(filter(None, (answers.describe_word(argument, keys) for answers in self.packages)), "")


@cache
def load_answers() -> _Answers:
    """Return the answers of the installed packages that have some, in the order of the names of their entry points.

    A package that cannot be imported is left out. :func:`explain_no_answers` names it.
    """
    packages: list[Answers] = []
    failures: list[str] = []
    for entry in sorted(list_entry_points(group=_GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            packages.append(entry.load()())
        except Exception as error:  # noqa: BLE001 - a package's own code runs, and the message about the key matters more
            failures.append(f"{entry.value} ({describe_error(error)})")
    return _Answers(packages, failures)


def explain_no_answers() -> str:
    """Return the end of a message about a key without an answer: how answers are installed, if they are not, or which
    of the installed ones cannot be imported."""
    answers = load_answers()
    if answers.failures:
        return f"; the answers of installed packages cannot be imported: {', '.join(answers.failures)}"
    if answers.packages:
        return ""
    return f"; if it is a setting of TRL, verl, OpenRLHF or prime-rl: {explain_packages(_GROUP, 'projects')}"


def describe_word(argument: str, keys: Collection[str]) -> str:
    """Return how a word of the command line is typed here, which is no ``--key``."""
    name, equals, value = argument.lstrip("+~").partition("=")
    if name in keys:
        typed = f"write --{name} {shlex.quote(value) if equals else 'VALUE'}"
        return "leave it out" if argument.startswith("~") else typed
    if answer := load_answers().describe_word(argument, keys):
        return answer
    section, _, last = name.rpartition(".")
    near = nearest_spellings(last, (key.removeprefix(f"{section}.") for key in keys))
    return f"write --{section}.{near[0]} {shlex.quote(value)}" if section and near else _FORM


def show_value(value: object) -> str:
    """Return a value as it is typed on the command line."""
    import yaml  # help is printed without it

    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
    return shlex.quote(text.removesuffix("\n").removesuffix("...").strip())
