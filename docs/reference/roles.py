"""Lets the site show ``:class:`~podium.data.Batch``` as `Batch`. zensical.toml names this extension of griffe."""

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Replaces the roles of docstrings by the names that they refer to."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object of the code whose documentation is read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":[a-z]+:`(~[\w.]*?\.)?([\w.]+)`", r"`\2`", obj.docstring.value)
