"""Whether the chat template writes what tools say: names, descriptions, parameters, and the values to choose from.

The template is tried: one conversation is written with a probe in the place of each text. A text whose probe is missing
is replaced alone, to see whether that changes anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.examples import Messages
from podium.rollout.tasks.fields import holds_speech

__all__ = ["ToolCheck"]

Render: TypeAlias = Callable[[Messages, Sequence[Any]], str]
"""What the template writes of a conversation with tools, the assistant's turn opened."""
Path: TypeAlias = tuple[str | int, ...]
"""The names and places that lead to a text in a list of tools."""

_KINDS: Final = 500  # of tools and sequences of roles, which are tried once
_CHOICES: Final = ("enum", "const")
_TEXTS: Final = ("name", "description", *_CHOICES)

OMITTED: Final = "podium: tools are left out"
"""A comment in a chat template whose model knows its tools without reading them."""


class ToolCheck:
    """Checks tools against one chat template.

    Args:
        render: Writes conversations with tools.
        template: The text of the template. One with the words of ``OMITTED`` leaves tools out on purpose.
    """

    def __init__(self, render: Render, template: str = "") -> None:
        self._render, self._omits = render, OMITTED in template
        self._written: set[str] = set()

    def check(self, messages: Messages, tools: Sequence[Any]) -> None:
        """Check that the template writes what the tools say, up to the last question or in the whole conversation.

        Raises:
            ConfigError: It writes no tools.
            DataError: It leaves out a part of a tool.
        """
        if self._omits:
            return
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        question = messages[: users[-1] + 1] if users else messages
        kind = json.dumps([tools, [message["role"] for message in question]], sort_keys=True, default=str)
        if kind in self._written:
            return
        paths = [*_list_paths(tools)]
        probes = {path: f"podium{number}t" for number, path in enumerate(paths)}
        probed = _replace(tools, probes)
        for conversation in (question, messages):
            text = self._try(conversation, probed)
            missing = [path for path in paths if probes[path] not in (text or "")]
            if text is not None and len(missing) < len(paths):
                break
        written = self._try(conversation, tools)
        leaves = [path for path in missing if written == self._try(conversation, _replace(tools, {path: "podium"}))]
        if leaves and len(leaves) == len(paths):
            raise ConfigError(
                "there are tools, and the chat template does not write them: set data.chat_template to one that does; "
                f"if the model knows them without, write the comment {{#- {OMITTED} -#}} into it"
            )
        if leaves:
            raise _refuse(tools, leaves[0])
        if len(self._written) >= _KINDS:
            self._written.clear()
        self._written.add(kind)

    def _try(self, messages: Messages, tools: Sequence[Any]) -> str | None:
        try:
            return self._render(messages, tools)
        except ConfigError:
            return None


def _list_paths(value: Any, path: Path = (), *, named: bool = False) -> Iterator[Path]:
    """The places of texts that say something to the model. Of a parameter it is its name: the path ends in "".

    Args:
        value: What stands at ``path``.
        path: Where the search is.
        named: Whether the keys of ``value`` are names of parameters.
    """
    if isinstance(value, Mapping):
        for name, entry in cast("Mapping[str, Any]", value).items():
            place = (*path, name)
            if named:
                yield (*place, "")
            if isinstance(entry, str):
                if entry.strip() and not named and (name in _TEXTS or holds_speech(name, entry)):
                    yield place
            else:
                yield from _list_paths(entry, place, named=not named and name == "properties")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(cast("Sequence[Any]", value)):
            if isinstance(entry, str):
                if path[-1] in _CHOICES and entry.strip():
                    yield (*path, index)
            else:
                yield from _list_paths(entry, (*path, index))


def _replace(value: Any, texts: Mapping[Path, str], path: Path = ()) -> Any:
    """``value`` with other texts at some paths."""
    if path in texts:
        return texts[path]
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value).items()
        names = {texts.get((*path, name, ""), name): (name, entry) for name, entry in entries}
        return {new: _replace(entry, texts, (*path, name)) for new, (name, entry) in names.items()}
    if isinstance(value, list | tuple):
        return [_replace(entry, texts, (*path, at)) for at, entry in enumerate(cast("Sequence[Any]", value))]
    return value


def _refuse(tools: Sequence[Any], path: Path) -> DataError:
    number, *names = (name for name in path if name != "")
    value: Any = tools
    for name in path if path[-1] != "" else path[:-2]:
        value = value[name]
    text = value if path[-1] != "" else path[-2]
    where = ".".join(map(str, names if path[-1] != "" else names[:-1]))
    return DataError(
        f"tool {int(number) + 1} has {where} = {str(text)[:60]!r}, which the chat template does not write, so that the "
        "model would not see it: set data.chat_template to one that writes it, put its text into a description that is "
        "written, or take it out"
    )
