"""From messages to token ids and back, without ever tokenising again what the model sampled.

    prompt   messages, tools ──▶ ids            the first call of a conversation, and one that could not be bridged
    bridge   ids so far + new messages ──▶ ids  the next call: what was recorded, and what the template adds
    parse    sampled ids ──▶ text, reasoning, tool calls

Two formats do this. ``TemplateFormat`` works for any chat template, by its text. ``RendererFormat`` uses a renderer of
the library ``renderers``, which knows how one family writes tool calls and reasoning; it is taken only where it writes
the same ids as the tokenizer's own template. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

from podium.errors import ConfigError
from podium.rollout.service.tool_calls import MARKS, CallReader, Reply, ToolCall, read_hermes, reader_of
from podium.rollout.tasks.examples import template_messages
from podium.telemetry import Note, emit

if TYPE_CHECKING:
    from podium.rollout.tasks.writer import Writer

__all__ = ["ChatFormat", "RendererFormat", "Reply", "TemplateFormat", "ToolCall", "chat_format"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_NO_FAMILY: Final = {"BaseRendererConfig", "AutoRendererConfig", "DefaultRendererConfig", "CustomRendererConfig"}
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_PROBE_USER: Final = {"role": "user", "content": "What is there?"}
_PROBE_CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"place": "a"}'}}
    ],
}
_PROBE_RESULT: Final = {"role": "tool", "tool_call_id": "call00001", "content": "a tree"}
_PROBES: Final[Sequence[tuple[Messages, Tools]]] = (
    ([_PROBE_USER], ()),
    ([{"role": "system", "content": "Be brief."}, _PROBE_USER], ()),
    ([_PROBE_USER, {"role": "assistant", "content": "A house."}, {"role": "user", "content": "And there?"}], ()),
    ([_PROBE_USER], [_PROBE_TOOL]),
    ([_PROBE_USER, _PROBE_CALL, _PROBE_RESULT], [_PROBE_TOOL]),
    ([_PROBE_USER, {**_PROBE_CALL, "reasoning_content": "Hm."}, _PROBE_RESULT], [_PROBE_TOOL]),
    ([_PROBE_USER, {"role": "assistant", "content": "A house.", "reasoning_content": "Hm."}, _PROBE_USER], ()),
)
_MARK: Final = "podium\u241fmark"  # stands for an answer whose place in a written conversation is looked for


class ChatFormat(Protocol):
    """How one model writes conversations."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; () for those of the tokenizer and the model."""
        ...

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """The ids of a conversation with the assistant's turn opened after it. ``data.system_prompt`` comes first where
        the conversation does not begin with a system message or a developer's.

        Raises:
            ConfigError: The template cannot write it.
        """
        ...

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        said: Messages,
        new: Messages,
        tools: Tools = (),
        *,
        ends: Sequence[int] = (),
    ) -> list[int] | None:
        """The ids of the next prompt, which begin with ``prompt`` and ``sampled`` as they are.

        Args:
            prompt: The ids of the call before.
            sampled: What it sampled.
            said: The messages of that call and its answer.
            new: The messages that have come since.
            tools: The tools of the conversation.
            ends: The tokens by which the model ends its turn. What another token has ended, such as a stop token of
                the client, is ended as the template does it.

        Returns:
            The ids; None where the template writes ``said`` otherwise once ``new`` follows.
        """
        ...

    def parse(self, prompt: Sequence[int], sampled: Sequence[int], tools: Tools = ()) -> Reply:
        """What ``sampled``, after ``prompt``, says."""
        ...


class TemplateFormat:
    """Any chat template. Tool calls are read in the form in which it writes them (:mod:`.tool_calls`).

    Args:
        writer: Writes conversations by the template.
        tokenizer: Decodes what was sampled.
    """

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, writer: Writer, tokenizer: Any) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        special = {place: str(token) for place, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = {*special}
        self._silent = {place for place, text in special.items() if text not in MARKS}

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """As :meth:`ChatFormat.prompt`."""
        return self._writer.encode(self._text(messages, tools, opened=True))

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        said: Messages,
        new: Messages,
        tools: Tools = (),
        *,
        ends: Sequence[int] = (),
    ) -> list[int] | None:
        """As :meth:`ChatFormat.bridge`."""
        asked = self._text(said[:-1], tools, opened=True)
        whole = self._text([*said, *new], tools, opened=True)
        closed = self._text(said, tools, opened=False)
        if not (whole.startswith(asked) and whole.startswith(closed)):
            return None
        added = self._writer.encode(self._ending(said, tools) + whole[len(closed) :])
        if sampled and added and sampled[-1] in {added[0], *ends} & self._special and added[0] in self._special:
            added = added[1:]  # the model has written the end of its turn itself
        return [*prompt, *sampled, *added]

    def parse(self, prompt: Sequence[int], sampled: Sequence[int], tools: Tools = ()) -> Reply:
        """As :meth:`ChatFormat.parse`."""
        ids = list(sampled)
        while ids and ids[-1] in self._special:
            ids.pop()
        ids = [one for one in ids if one not in self._silent]
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._opens_reasoning(prompt):
            text = f"<think>{text}"
        return self._reader(text, bool(tools))

    @cached_property
    def _reader(self) -> CallReader:
        """Reads what the model writes, in the form in which the template writes a call of a tool."""
        for call in (_PROBE_CALL, {**_PROBE_CALL, "content": "So."}):
            try:
                asked = self._text([_PROBE_USER], [_PROBE_TOOL], opened=False)
                whole = self._text([_PROBE_USER, call], [_PROBE_TOOL], opened=False)
            except ConfigError:
                continue
            if "look" in (written := whole.removeprefix(asked)):
                return reader_of(written)
        return read_hermes

    def _opens_reasoning(self, prompt: Sequence[int]) -> bool:
        tail = self._tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)
        return tail.rstrip().endswith("<think>")

    def _ending(self, said: Messages, tools: Tools) -> str:
        """What the template writes after the text and the tool calls of the last answer, up to its next message."""
        answer = {**said[-1], "content": _MARK}
        for name in ("tool_calls", "reasoning_content"):
            answer.pop(name, None)
        return self._text([*said[:-1], answer], tools, opened=False).rpartition(_MARK)[2]

    def _text(self, messages: Messages, tools: Tools, *, opened: bool) -> str:
        return self._writer.text(messages, list(tools) or None, opened=opened)


class RendererFormat:
    """A family that the library ``renderers`` knows.

    Args:
        writer: Puts the system prompt before conversations.
        renderer: One of its renderers, made with the model's tokenizer.
        plain: Bridges what the renderer does not.
        bare: Whether the renderer takes tools without the entry "type" around them.
    """

    def __init__(self, writer: Writer, renderer: Any, plain: TemplateFormat, *, bare: bool = False) -> None:
        self._writer = writer
        self._plain = plain
        self._renderer = renderer
        self._bare = bare
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """As :meth:`ChatFormat.prompt`."""
        try:
            return list(
                self._renderer.render_ids(
                    self._writer.messages(messages), tools=self._tools(tools), add_generation_prompt=True
                )
            )
        except Exception as error:
            raise ConfigError(f"the renderer cannot write {str(messages)[:120]}: {error}") from error

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        said: Messages,
        new: Messages,
        tools: Tools = (),
        *,
        ends: Sequence[int] = (),
    ) -> list[int] | None:
        """As :meth:`ChatFormat.bridge`."""
        bridged = self._renderer.bridge_to_next_turn(
            list(prompt), list(sampled), template_messages(new), tools=self._tools(tools)
        )
        ids = [] if bridged is None else list(getattr(bridged, "token_ids", bridged))
        if ids[: len(prompt) + len(sampled)] == [*prompt, *sampled]:
            return ids
        return self._plain.bridge(prompt, sampled, said, new, tools, ends=ends)

    def parse(self, prompt: Sequence[int], sampled: Sequence[int], tools: Tools = ()) -> Reply:
        """As :meth:`ChatFormat.parse`."""
        found = self._renderer.parse_response(list(sampled), prompt_ids=list(prompt), tools=self._tools(tools))
        calls = [
            ToolCall(call.name, call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {}))
            for call in found.tool_calls
            if tools and call.status == "ok" and call.name
        ]
        broken = [call.raw for call in found.tool_calls if not (tools and call.status == "ok" and call.name)]
        return Reply("".join([found.content or "", *broken]), found.reasoning_content, tuple(calls))

    def _tools(self, tools: Tools) -> list[Any] | None:
        return [tool.get("function", tool) if self._bare else dict(tool) for tool in tools] or None


def chat_format(writer: Writer, tokenizer: Any) -> ChatFormat:
    """Return the format of a model.

    A renderer of the library ``renderers`` is taken only if it writes the same ids as the tokenizer's template does:
    conversations with a system prompt, with turns, and with tools and their results. Its name is not asked for. Where
    none does, or the library is not installed, the template is used by its text.
    """
    plain = TemplateFormat(writer, tokenizer)
    return next((found for found in _renderers(writer, tokenizer, plain) if _agree(found, plain)), plain)


def _renderers(writer: Writer, tokenizer: Any, plain: TemplateFormat) -> Iterator[RendererFormat]:
    """The renderers of the library that can be made with this tokenizer."""
    try:
        from renderers import base, configs
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "renderers":
            emit(Note(f"the library renderers is installed, and cannot be used: {error}"))
        return
    known: list[Any] = [
        one for one in vars(configs).values() if isinstance(one, type) and issubclass(one, configs.BaseRendererConfig)
    ]
    for config in known:
        if config.__name__ in _NO_FAMILY:
            continue
        with contextlib.suppress(Exception):  # another family's, whose special tokens this tokenizer does not have
            renderer = base.create_renderer(tokenizer, config())
            yield from (RendererFormat(writer, renderer, plain, bare=bare) for bare in (False, True))


def _agree(found: ChatFormat, plain: ChatFormat) -> bool:
    """Whether two formats write the same ids. A conversation that the template refuses says nothing."""
    compared = 0
    for messages, tools in _PROBES:
        try:
            expected = plain.prompt(messages, tools)
        except ConfigError:
            continue
        try:
            if found.prompt(messages, tools) != expected:
                return False
        except ConfigError:
            return False
        compared += 1
    return compared > 1
