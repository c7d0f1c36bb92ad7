"""Configuration of generation engines. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

from pydantic import Field

from podium.answers import load_answers
from podium.config import build_config, section
from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import is_installed
from podium.installed import list_entry_points
from podium.spelling import nearest_spellings, suggest

AUTO: Final = "auto"
NATIVE: Final = "native"
REPLAY: Final = "replay"
PREFILL_TOKENS: Final = 8192
S = TypeVar("S")


@section("engine")
class EngineConfig:
    """The engine that generates completions, and how much memory it may use."""

    name: str = AUTO
    """This engine generates completions: transformers (any architecture), or one of an installed package, such as
    native (Llama, Mistral, Qwen 2 and 3, SmolLM3). auto chooses native where it supports the model, and transformers
    otherwise. replay generates nothing: the run of engine.options.run has recorded the
    completions."""
    max_sequences: int = Field(default=128, ge=1, le=65536)
    """The engine decodes at most this many completions at the same time."""
    cache_gib: float | None = Field(default=None, gt=0, le=65536)
    """The cache of keys and values takes at most this many GiB. null means a quarter of the device's free memory. If
    max_sequences completions do not fit, the engine decodes fewer at the same time.
    """
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The engine computes in this data type. null means parallel.precision if training computes in float32 or float16;
    else bfloat16 on accelerators, and model.dtype on the CPU. Another type than model.dtype needs a copy of the
    weights."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """These options belong to the engine that engine.name names, which declares them."""

    def __post_init__(self) -> None:
        if self.name not in (AUTO, REPLAY) and self.name not in find_engines():
            hint = suggest(*nearest_spellings(self.name, [AUTO, *find_engines()])[:1])
            if translation := load_answers().find_translation("engine.name", self.name):
                hint = f"; {translation.remark}" if translation.missing else suggest(str(translation.value))
            raise ConfigError(
                f"engine.name = {self.name!r}: expected {AUTO} or an installed engine: "
                f"{', '.join(sorted(find_engines()))}{hint}; an engine of your own is chosen by the name of its "
                "entry point in the group podium.engines, not by module:Class: see docs/engines.md; "
                f"{explain_packages('podium.engines', self.name)}"
            )

    @property
    def replayed_run(self) -> str:
        """The directory of the run whose completions are trained again; "" where an engine generates them."""
        return self.read_options(ReplayOptions).run if self.name == REPLAY else ""

    def read_options(self, section: type[S]) -> S:
        """Return ``options`` as ``section``, which an engine declares as ``Engine.options``.

        Raises:
            ConfigError: An option is unknown, which names the nearest, has the wrong type or is out of its range.
        """
        try:
            return build_config(section, self.options, key="engine.options")
        except ConfigError as error:
            owner = f"engine.name = {self.name!r}" if self.name != AUTO else f"{section.__module__}.{section.__name__}"
            raise ConfigError(f"{owner}: {error}") from None


@section("engine.options")
class OutputOptions:
    """Options of the engine transformers, which native has too."""

    float32_output: bool = False
    """The output layer is computed in float32, from weights and hidden states of the engine's data type. It goes with
    parallel.precision.output = float32."""


@section("engine.options")
class NativeOptions(OutputOptions):
    """Options of the engine native."""

    cuda_graphs: bool | None = None
    """Decode steps are recorded as CUDA graphs and replayed: one graph for each number of rows (1, 2, 4, 8, ...) and of
    positions (128, 256, ...). A CPU runs the same steps without graphs. null means true on CUDA, where one row is
    decoded 13 times as fast and 512 rows twice as fast, and false for a mixture of experts and elsewhere."""
    prefill_tokens: int = Field(default=PREFILL_TOKENS, ge=1, le=10**9)
    """One forward pass of the engine takes at most this many prompt tokens."""


@section("engine.options")
class ReplayOptions:
    """Options of the engine replay."""

    run: str = Field(min_length=1)
    """The completions are those that the run in this directory has recorded."""


OWN_OPTIONS: Final[Mapping[str, type | None]] = MappingProxyType(
    {AUTO: None, NATIVE: NativeOptions, "transformers": OutputOptions, REPLAY: ReplayOptions}
)
"""What engines declare as ``Engine.options``, those of which the options are checked without importing torch."""


RECORDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        **dict.fromkeys((AUTO, NATIVE), frozenset({"record_top"})),
        **dict.fromkeys(("transformers", REPLAY), frozenset({"record_top", "record_experts"})),
    }
)
"""What these engines declare as ``Engine.records``."""


@functools.cache
def find_engines() -> Mapping[str, EntryPoint]:
    """The entry points of the group ``podium.engines``, by name. Those of Podium and its packages win over others.

    Raises:
        ConfigError: There is none, because the installation's metadata is older than its code.
    """
    points = list_entry_points(group="podium.engines")
    packages = ("podium.", "podium_")
    ranked = sorted(points, key=lambda entry: (entry.module.startswith(packages), is_installed(entry)))
    entries = {entry.name: entry for entry in ranked}
    if not entries:
        raise ConfigError(
            "this installation of podium has no entry points in the group 'podium.engines', so its metadata is older "
            "than its code; install it again, in a checkout by: pip install -e ."
        )
    return entries
