"""The arguments ``--backend NAME`` and ``--backend.OPTION VALUE`` of every command that starts workers."""

import argparse
import difflib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from podium.config import read_values
from podium.errors import ConfigError
from podium.spelling import suggest

PREFIX = "--backend."


class Backend(NamedTuple):
    """Arguments of ``podium.connect``, and the ``words`` of the command line that gave the options."""

    name: str
    options: dict[str, Any]
    words: list[str]


def parse_with_backend(
    parser: argparse.ArgumentParser, arguments: Sequence[str], default: str
) -> tuple[argparse.Namespace, list[str], Backend]:
    """Parse ``arguments`` with ``parser`` and the arguments of the backend.

    Returns the namespace of the parser, the overrides of the configuration, and the backend.

    Raises:
        ConfigError: An option of the backend has no name, no value, or a value that is not YAML; an option that takes
            one value is given twice; or an argument is a mistyped option, or a file without its option.
    """
    others = "local" if default == "inline" else "inline"
    parser.add_argument(
        "--backend",
        default=default,
        metavar="NAME",
        help=f"{default} (default), {others}, one of a package, or NAME://ADDRESS; its options: --backend.OPTION VALUE",
    )
    parsed, rest = parser.parse_known_args(arguments)
    check_options(parser, arguments, rest)
    words: list[str] = []
    overrides: list[str] = []
    while rest:
        argument = rest.pop(0)
        mine = argument.startswith(PREFIX)
        (words if mine else overrides).append(argument)
        if mine and "=" not in argument and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
    options: dict[str, Any] = read_values(object, None, words).get("backend", {})
    if "" in options:
        raise ConfigError("--backend. names no option: write --backend.OPTION VALUE, as in --backend.address auto")
    return parsed, overrides, Backend(parsed.backend, options, words)


def check_options(parser: argparse.ArgumentParser, arguments: Sequence[str], rest: Sequence[str]) -> None:
    """Refuse what argparse takes without a word: an option that is given again with another value, of which it would
    forget the first one, and a mistyped option, which would be read as a key of the configuration.

    Args:
        parser: The parser of the command.
        arguments: The words of the command.
        rest: Those that the parser does not know.

    Raises:
        ConfigError: There is such an option, or a configuration without ``--config``.
    """
    options = {name for name in parser._option_string_actions if name.startswith("--")}
    repeatable = {"--backend", *(action.option_strings[-1] for action in parser._actions if not _takes_one(action))}
    for name in sorted(options - repeatable):
        values = dict.fromkeys(_values_of(name, arguments))
        if len(values) > 1:
            raise ConfigError(
                f"{name} is given {len(values)} times ({', '.join(values)}), and takes one value: keep one"
            )
    for word in rest:
        if "--config" in options and word.endswith((".yaml", ".yml")) and not word.startswith("-"):
            position = list(rest).index(word)
            if position == 0 or not rest[position - 1].startswith("--") or "=" in rest[position - 1]:
                raise ConfigError(f"{word!r} is no setting: write --config {word}")
        if (near := _mistyped(word, options)) is not None:
            raise ConfigError(f"there is no option {word}{suggest(near)}")


def _takes_one(action: argparse.Action) -> bool:
    return action.nargs is None and type(action).__name__ == "_StoreAction"


def _values_of(name: str, arguments: Sequence[str]) -> list[str]:
    """The values that ``arguments`` give an option."""
    following = zip(arguments, [*arguments[1:], ""], strict=True)
    return [
        word.partition("=")[2] if "=" in word else value
        for word, value in following
        if word == name or word.startswith(f"{name}=")
    ]


def _mistyped(word: str, options: Collection[str]) -> str | None:
    """The option that ``word``, which is no key with a section, was probably meant to be."""
    name = word.partition("=")[0]
    if not name.startswith("--") or "." in name:
        return None
    plain = {option.replace("-", ""): option for option in options}
    spelled = name.replace("-", "").replace("_", "")
    near = difflib.get_close_matches(spelled, plain, n=1, cutoff=0.85)
    return plain[near[0]] if near else None
