"""Presets of ``podium train grpo``: the settings of a paper, each in a YAML file beside this module.

The comment at the top of a file names the paper. A setting of the user's file or command line comes before it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.functions import nearest

__all__ = ["Preset", "list_presets", "read_preset"]

_FOLDER = Path(__file__).parent


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

    def overrides(self, values: Mapping[str, Any]) -> list[str]:
        """Return the settings as words of a command line, but for those that nested ``values`` have."""
        own = dict(_flatten(values))
        pairs = [(key, value) for key, value in self.settings.items() if key not in own]
        return [
            word
            for key, value in pairs
            for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
        ]

    def describe(self) -> str:
        """Return the name, the source and the settings, as text of two lines."""
        settings = ", ".join(f"{key} = {value}" for key, value in self.settings.items())
        return f"preset       {self.name}: {self.source}\n{'':12} {settings}; your own settings come before these"


def list_presets() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def read_preset(name: str) -> Preset:
    """Return the preset of this name. Raises ConfigError if there is none."""
    names = list_presets()
    if name not in names:
        raise ConfigError(
            f"--recipe {name}: there is no such preset{nearest(name, names)}; there are {', '.join(names)}"
        )
    import yaml  # help is printed without it

    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    lines = (line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    return Preset(name, " ".join(lines), dict(_flatten(yaml.safe_load(text))))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        yield from _flatten(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
