"""Lets the site show docstrings as they are meant. zensical.toml names this extension of griffe.

``:class:`~podium.data.Batch``` becomes `Batch`, and examples that begin with ``>>>`` become blocks of code.
"""

import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`(~[\w.]*?\.)?([\w.]+)`")
EXAMPLE = re.compile(r"^( *)>>> .*\n?(?:\1\S.*\n?)*", re.MULTILINE)


class Readable(griffe.Extension):
    """Rewrites the docstrings of all objects whose documentation is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object of the code."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_as_code, ROLE.sub(r"`\2`", obj.docstring.value))


def _as_code(example: re.Match[str]) -> str:
    shown = re.sub(r" *# doctest: .*", "", example[0].rstrip("\n"))
    return f"{example[1]}```pycon\n{shown}\n{example[1]}```\n"
