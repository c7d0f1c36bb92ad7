"""``--backend NAME`` and ``--backend.OPTION VALUE``: where workers run, for every command that starts some."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from podium.errors import ConfigError

__all__ = ["Connecting", "add_backend", "split_backend"]

PREFIX = "--backend."


class Connecting(NamedTuple):
    """``options`` of ``podium.connect``, the ``words`` that gave them, and the ``other`` arguments."""

    options: dict[str, Any]
    words: list[str]
    other: list[str]


def add_backend(parser: argparse.ArgumentParser, default: str) -> None:
    """Give ``parser`` the argument ``--backend``."""
    others = "local" if default == "inline" else "inline"
    parser.add_argument(
        "--backend",
        default=default,
        metavar="NAME",
        help=f"{default} (default), {others}, ray, ray://HOST:PORT, or another; its options: --backend.OPTION VALUE",
    )


def split_backend(arguments: Sequence[str]) -> Connecting:
    """Take every ``--backend.OPTION VALUE`` out of ``arguments``.

    Raises:
        ConfigError: an option without a name or a value, or with a value that is not YAML.
    """
    words: list[str] = []
    other: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        mine = argument.startswith(PREFIX)
        (words if mine else other).append(argument)
        if mine and "=" not in argument and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
    if not words:
        return Connecting({}, words, other)
    from podium.trainer import read_values

    options: dict[str, Any] = read_values(object, None, words)["backend"]
    if "" in options:
        raise ConfigError("--backend. names no option: write --backend.OPTION VALUE, as in --backend.address auto")
    return Connecting(options, words, other)
