"""What the library ``renderers`` knows of a family of models: what comes between an answer and the next one.

It is asked for nothing else. What the model reads otherwise, and what is read from its answers, follow its template.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from podium.errors import ConfigError
from podium.rollout.tasks.messages import template_messages
from podium.telemetry import Note, emit

__all__ = ["CALL", "TOOL", "USER", "LibraryBridge", "library_bridge"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_NO_FAMILY: Final = {"BaseRendererConfig", "AutoRendererConfig", "DefaultRendererConfig", "CustomRendererConfig"}

# What a template is tried on: a question, and a call of a tool.
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
USER: Final = {"role": "user", "content": "What is there?"}
CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"place": "a"}'}}
    ],
}
_RESULT: Final = {"role": "tool", "tool_call_id": "call00001", "content": "a tree"}
_ANSWER: Final = {"role": "assistant", "content": "A house."}
_PROBES: Final[Sequence[tuple[Messages, Tools]]] = (
    ([USER], ()),
    ([{"role": "system", "content": "Be brief."}, USER], ()),
    ([USER, _ANSWER, {"role": "user", "content": "And there?"}], ()),
    ([USER], [TOOL]),
    ([USER, CALL, _RESULT], [TOOL]),
    ([USER, {**CALL, "reasoning_content": "Hm."}, _RESULT], [TOOL]),
    ([USER, {**_ANSWER, "reasoning_content": "Hm."}, USER], ()),
)


class LibraryBridge:
    """A renderer of the library.

    Args:
        renderer: The library's renderer, made with the model's tokenizer.
        bare: Whether the renderer takes tools without the entry "type" around them.
    """

    def __init__(self, renderer: Any, *, bare: bool = False) -> None:
        self._renderer, self._bare = renderer, bare

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int] | None:
        """The ids of a conversation with the assistant's turn opened after it; None where it cannot be written."""
        with contextlib.suppress(Exception):
            written = template_messages(messages)
            return [*self._renderer.render_ids(written, tools=self._tools(tools), add_generation_prompt=True)]
        return None

    def added(self, prompt: Sequence[int], sampled: Sequence[int], new: Messages, tools: Tools) -> list[int]:
        """The ids from what was sampled after ``prompt`` to the next answer, with the messages ``new`` between them; []
        where the renderer does not know them."""
        before = [*prompt, *sampled]
        with contextlib.suppress(Exception):
            bridged = self._renderer.bridge_to_next_turn(
                [*prompt], [*sampled], template_messages(new), tools=self._tools(tools)
            )
            ids = [*getattr(bridged, "token_ids", bridged or ())]
            return ids[len(before) :] if ids[: len(before)] == before else []
        return []

    def _tools(self, tools: Tools) -> list[Any] | None:
        return [tool.get("function", tool) if self._bare else dict(tool) for tool in tools] or None


def library_bridge(tokenizer: Any, prompt: Callable[[Messages, Tools], list[int]]) -> LibraryBridge | None:
    """Return the renderer of the library that writes the same ids as ``prompt``, the model's template: conversations
    with a system prompt, with turns, and with tools and their results. None if there is none, or no library."""
    return next((renderer for renderer in _renderers(tokenizer) if _agrees(renderer, prompt)), None)


def _renderers(tokenizer: Any) -> Iterator[LibraryBridge]:
    """The renderers of the library that can be made with this tokenizer."""
    try:
        from renderers import base, configs
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "renderers":
            emit(Note(f"the library renderers is installed, but cannot be used: {error}"))
        return
    classes: list[Any] = [
        cls for cls in vars(configs).values() if isinstance(cls, type) and issubclass(cls, configs.BaseRendererConfig)
    ]
    for config in classes:
        if config.__name__ in _NO_FAMILY:
            continue
        with contextlib.suppress(Exception):  # another family's, whose special tokens this tokenizer does not have
            renderer = base.create_renderer(tokenizer, config())
            yield from (LibraryBridge(renderer, bare=bare) for bare in (False, True))


def _agrees(found: LibraryBridge, prompt: Callable[[Messages, Tools], list[int]]) -> bool:
    """Whether a renderer writes what the template writes. A conversation that the template refuses says nothing."""
    compared = 0
    for messages, tools in _PROBES:
        try:
            expected = prompt(messages, tools)
        except ConfigError:
            continue
        if found.prompt(messages, tools) != expected:
            return False
        compared += 1
    return compared > 1
