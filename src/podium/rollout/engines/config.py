"""Configuration of generation engines, and which engines are installed. Imports no torch."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from podium.config import section
from podium.errors import ConfigError

__all__ = ["AUTO", "EngineConfig", "check_installed", "installed_engines"]

AUTO = "auto"


@functools.cache
def installed_engines() -> Mapping[str, EntryPoint]:
    """The entry points of the group ``podium.engines``, by name.

    Raises:
        ConfigError: There is none, because the installation's metadata is older than its code.
    """
    found = {entry.name: entry for entry in entry_points(group="podium.engines")}
    if not found:
        raise ConfigError(
            "this installation of podium has no entry points in the group 'podium.engines', so its metadata is older "
            "than its code; install it again, in a checkout by: pip install -e ."
        )
    return found


def check_installed(name: str) -> None:
    """Check that the package of an engine that is an extra, and is named after that package, can be imported.

    Raises:
        ConfigError: The package is not installed. The message names the extra.
    """
    entry = installed_engines().get(name)
    extras = entry.dist.metadata.get_all("Provides-Extra") or [] if entry and entry.dist else []
    if name in extras and find_spec(name) is None:
        raise ConfigError(
            f"engine.name = {name!r}: {name} is not installed: pip install 'podium[{name}]', or use engine.name=auto"
        )


@section("engine")
class EngineConfig:
    """The engine that generates completions, and how much memory it may use."""

    name: str = AUTO
    """This engine generates completions: native (Llama and Qwen families), transformers (any architecture), vllm
    (pip install "podium[vllm]"), or another installed engine. auto chooses native where it supports the model, and
    transformers otherwise."""
    max_sequences: int = Field(default=128, ge=1, le=65536)
    """The engine decodes at most this many completions at the same time."""
    cache_gib: float | None = Field(default=None, gt=0, le=65536)
    """The cache of keys and values takes at most this many GiB. null means a quarter of the device's free memory. The
    engine decodes fewer completions at the same time where max_sequences of them do not fit."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The engine computes in this data type. null means model.dtype. Another type needs a copy of the weights."""
    prefill_tokens: int = Field(default=8192, ge=1, le=10**9)
    """One forward pass of the engine takes at most this many prompt tokens."""

    def __post_init__(self) -> None:
        if self.name != AUTO and self.name not in installed_engines():
            near = difflib.get_close_matches(self.name, [AUTO, *installed_engines()], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"engine.name = {self.name!r}: expected {AUTO} or an installed engine: "
                f"{', '.join(sorted(installed_engines()))}{hint}"
            )
