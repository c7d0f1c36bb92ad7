"""The arguments ``--backend NAME`` and ``--backend.OPTION VALUE`` of every command that starts workers."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from podium.config import read_values
from podium.errors import ConfigError

__all__ = ["Backend", "parse_with_backend"]

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
        ConfigError: An option of the backend has no name, no value, or a value that is not YAML.
    """
    others = "local" if default == "inline" else "inline"
    parser.add_argument(
        "--backend",
        default=default,
        metavar="NAME",
        help=f"{default} (default), {others}, one of a package, or NAME://ADDRESS; its options: --backend.OPTION VALUE",
    )
    parsed, rest = parser.parse_known_args(arguments)
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
