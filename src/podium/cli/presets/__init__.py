"""Presets of ``podium train grpo``: the settings of a paper, each in a YAML file beside this module, or in the
package that an entry point names.

The comment at the top of a file names the paper. A setting of the user's file or command line comes before it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import find_installed, nearest
from podium.installed import list_entry_points

__all__ = ["Preset", "list_presets", "read_preset"]

_GROUP = "podium.presets"


@dataclass(frozen=True)
class Preset:
    """The settings of a paper.

    Attributes:
        name: The name of the file.
        source: The paper, and what it has beyond these settings.
        settings: Values by dotted key.
    """

    name: str
    source: str
    settings: Mapping[str, Any]

    def overrides(self, values: Mapping[str, Any], words: Sequence[str] = ()) -> list[str]:
        """Return the settings as words of a command line, but for those that ``values`` have, and then ``words``.

        Where the preset has a mapping with ``count``, the user's number in its place is this count.
        """
        user_settings, user_words = dict(_flatten(values)), list(words)
        settings = {key: value for key, value in self.settings.items() if key not in user_settings}
        for key in [key.removesuffix(".count") for key in self.settings if key.endswith(".count")]:
            joined = {
                **self.settings,
                **user_settings,
                **({f"{key}.count": user_settings[key]} if isinstance(user_settings.get(key), int) else {}),
            }
            settings = {name: value for name, value in settings.items() if not name.startswith(f"{key}.")}
            settings[key] = {
                name.removeprefix(f"{key}."): value for name, value in joined.items() if name.startswith(f"{key}.")
            }
            for at, word in enumerate(user_words):
                name, equals, value = word.partition("=")
                number = value if equals else "".join(user_words[at + 1 : at + 2])
                if name == f"--{key}" and number.isdecimal():
                    user_words[at] = f"{name}.count{equals}{value}"
        typed = tuple(f"{word[2:].partition('=')[0]}." for word in user_words if word.startswith("--"))
        settings = {key: value for key, value in settings.items() if not key.startswith(typed)}
        pairs = [
            (f"--{key}", value if isinstance(value, str) else json.dumps(value)) for key, value in settings.items()
        ]
        return [*chain.from_iterable(pairs), *user_words]

    def describe(self) -> str:
        """Return the name, the source and the settings, as text of two lines."""
        settings = ", ".join(f"{key} = {value}" for key, value in self.settings.items())
        return f"preset       {self.name}: {self.source}\n{'':12} {settings}; your own settings override these"


def list_presets() -> list[str]:
    """Return the names of all presets."""
    names = (path.stem for path in Path(__file__).parent.glob("*.yaml"))
    return sorted({*names, *(entry.name for entry in list_entry_points(group=_GROUP))})


def read_preset(name: str) -> Preset:
    """Return the preset of this name. Raises ConfigError if there is none."""
    names = list_presets()
    if name not in names:
        raise ConfigError(
            f"--recipe {name}: there is no such preset{nearest(name, names, _GROUP)}; there are {', '.join(names)}; "
            f"{explain_packages(_GROUP, name)}"
        )
    import yaml  # help is printed without it

    path = Path(__file__).with_name(f"{name}.yaml")
    if not path.is_file() and (entry := find_installed(_GROUP, name, "--recipe")) is not None:
        path = files(entry.value) / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    lines = (line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    return Preset(name, " ".join(lines), dict(_flatten(yaml.safe_load(text))))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        yield from _flatten(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
