"""The chat template of a run: where its text comes from, which variables it reads, and whether it ends."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import jinja2
from jinja2 import meta

from podium.errors import ConfigError
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.messages import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The keyword of transformers around the assistant's text."""
PROBED_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "podium",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"podium": {"type": "string", "description": "A text."}}},
    },
}
"""A tool with which templates are tried that write nothing without tools."""
_KEYWORDS: Final = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_PATIENCE_S: Final = 10.0  # for a template to write a chunk of prompts, which takes milliseconds


class Looping(ConfigError):
    """A template does not end."""


class Texts:
    """What the template writes of the first messages of a conversation, each text once.

    Args:
        render: Writes messages and tools.
        messages: The conversation.
        tools: Its tools.
        opened: Whether an answer is opened after the messages, unless a call says otherwise.
    """

    def __init__(
        self, render: Callable[..., str], messages: Messages, tools: list[Any] | None, *, opened: bool = False
    ) -> None:
        self._render, self._opened = render, opened
        self.messages, self.tools = messages, tools
        self._made: dict[tuple[int, bool], str] = {}

    def __call__(self, count: int, *, opened: bool | None = None) -> str:
        """The text of the first ``count`` messages."""
        key = count, self._opened if opened is None else opened
        if key not in self._made:
            self._made[key] = self._render(self.messages[:count], self.tools, opened=key[1])
        return self._made[key]

    def write(self, messages: Messages) -> str:
        """The text of other messages."""
        return self._render(messages, self.tools, opened=self._opened)

    def try_write(self, messages: Messages, tools: Sequence[Any] | None = None) -> str | None:
        """The text of other messages, or of other tools; None if the template refuses what it then reads."""
        try:
            return self._render(messages, tools or self.tools, opened=self._opened)
        except ConfigError:
            return None

    def with_messages(self, messages: Messages) -> Texts:
        """The texts of other messages, with the same tools."""
        return Texts(self._render, messages, self.tools, opened=self._opened)

    @property
    def whole(self) -> str:
        """The text of all messages."""
        return self(len(self.messages))


def run_in_time(work: Callable[[], T]) -> T:
    """Run ``work``, which fills chat templates, in a thread, and return its result.

    Raises:
        Looping: The thread has not ended after ``_PATIENCE_S`` seconds, so a template seems to loop.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="chat template", daemon=True)
    thread.start()
    ended = False
    try:
        ended = bool(wait([outcome], _PATIENCE_S).done)
    finally:  # also where this thread is itself one that fills templates, and is stopped
        if not ended:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    if not ended:
        raise Looping(
            f"the chat template has written nothing for {_PATIENCE_S:.0f} s, so it seems to loop: set "
            "data.chat_template to another, or to none for plain text"
        )
    return outcome.result()


def chat_template(tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, tools: bool = False) -> str | None:
    """Return the Jinja text of the chat template, or None for plain text.

    Args:
        tools: Whether the template is for rows with tools. Some tokenizers have one called tool_use beside the default.

    Raises:
        ConfigError: There is no such file or name, or none of several templates is the default.
    """
    stored: Any = tokenizer.chat_template
    named = cast("dict[str, str]", stored) if isinstance(stored, dict) else {}
    names = ", ".join(map(repr, named))
    if config.chat_template == "none":
        return None
    if config.chat_template in named:
        return named[config.chat_template]
    if config.chat_template == "auto":
        if not named:
            return cast("str | None", stored or None)
        name = "tool_use" if tools and "tool_use" in named else "default"
        if name not in named:
            raise ConfigError(
                f"the tokenizer has the chat templates {names}, and none is called default: set data.chat_template to "
                "one of these names"
            )
        return named[name]
    path = Path(os.path.expanduser(config.chat_template))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        expected = f"auto, none, a file, or one of {names}" if named else "auto, none or a file"
        raise ConfigError(
            f"data.chat_template = {config.chat_template!r} cannot be read: {error}; expected {expected}"
        ) from None


def check_opening(write: Callable[..., str | None], special: Collection[str]) -> None:
    """Check that a template opens no answer after a conversation that ends with one.

    Args:
        write: Writes messages, with an opened answer or not; returns None for those that the template refuses.
        special: The texts of the tokenizer's special tokens.

    Raises:
        ConfigError: It opens one although ``add_generation_prompt`` is false.
    """
    user, answer = {"role": "user", "content": "podium"}, {"role": "assistant", "content": "rostra"}
    question, closed, further = write([user], opened=True), write([user, answer]), write([user, answer, user])
    if question is None or closed is None or further is None:
        return
    opening = question.rpartition(user["content"])[2].rstrip()
    opening = opening[max([0, *map(opening.rfind, special)]) :]
    ending, later = (text.partition(answer["content"])[2].rstrip() for text in (closed, further))
    if opening.strip() and ending.endswith(opening) and not later.startswith(ending):
        raise ConfigError(
            f"the chat template opens an answer with {opening[-40:]!r} after each conversation, also where "
            "add_generation_prompt is false, so that the model would learn to write it after its own answer: put it "
            "between {% if add_generation_prompt %} and {% endif %} in a copy of the template, and set "
            "data.chat_template to that file"
        )


def template_options(
    tokenizer: PreTrainedTokenizerBase, config: DataConfig, *templates: str | None
) -> Mapping[str, Any]:
    """Return ``config.chat_template_kwargs``. Raises ConfigError for one that no template reads."""
    template = None if None in templates else "".join(map(str, templates))
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in config.chat_template_kwargs:
        key = f"data.chat_template_kwargs.{name}"
        if template is None:
            raise ConfigError(f"{key}: this run has no chat template to read this argument")
        if name in taken or name == "messages":
            raise ConfigError(f"{key}: Podium sets this argument of the chat template itself")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(f"{key}: the chat template reads no variable of this name")
    return config.chat_template_kwargs


def list_variables(template: str | None) -> set[str]:
    """Return the variables that a template reads and does not set itself; none of a template that cannot be read."""
    if template is None:
        return set()
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        return meta.find_undeclared_variables(environment.parse(_KEYWORDS.sub("", template)))
    except jinja2.TemplateError:  # of which the first prompt tells
        return set()
