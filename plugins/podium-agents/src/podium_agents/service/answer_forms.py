"""How a chat template writes answers and calls of tools, as rules of a grammar.

The template itself writes an answer and a call with names of our own in it. What stands around these is the form, with
its special tokens. A call whose name or arguments do not come back as they are has no known form. Before an answer, a
model that knows ``<think>`` may think.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError
from podium_agents.service.renderers import TOOL, USER
from podium_agents.service.request_bodies import ChatRequest, Refusal
from podium_agents.service.structured import AnswerGrammar, Rule, call_rules, read_rule

if TYPE_CHECKING:
    from podium_agents.service.grammars import Grammars

__all__ = ["AnswerForms", "conversation_grammar"]

_NAME: Final = "podium_name"
_TEXT: Final = "podium_text"
_ID: Final = "podium001"  # nine letters and digits, as Mistral's templates demand
_CALL: Final[Mapping[str, Any]] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": '{"podium_key": 1}'}}],
}
_TOOL: Final = {**TOOL, "function": {**TOOL["function"], "name": _NAME}}
_SLOTS: Final = re.compile(rf'{_NAME}|\{{\s*"podium_key"\s*:\s*1\s*\}}|{_ID}')
_THOUGHT: Final = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
_FREE: Final = r"/(?s:.*)/"


class AnswerForms:
    """The forms of one template.

    Args:
        write: Writes messages with tools by the template, with an opened answer or not.
        tokenizer: The model's tokenizer.
        ends: The ids of special tokens that end a message, or stand between messages.
    """

    def __init__(self, write: Callable[..., str], tokenizer: Any, ends: set[int]) -> None:
        self._write, self._ends = write, ends
        self._added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}

    def grammar(self, answer: Rule | None, calls: Mapping[str, Rule], *, thinks: bool) -> str:
        """Return the grammar of an answer by ``answer``, or of one call of ``calls``.

        Args:
            answer: What a text must be; None if it must be a call.
            calls: By name of a function, what its arguments must be.
            thinks: Whether the prompt has opened the reasoning.

        Raises:
            ConfigError: The form in which the template writes calls is not known.
        """
        lines, kinds = list[str](), list[str]()
        if answer is not None:
            before, after = self._answer_form
            lines += [f"body: {answer.lark}", f"answer: {self._literals(before)} body {self._literals(after)}"]
            kinds.append("answer")
        for number, (name, rule) in enumerate(calls.items()):
            lines += [f"arguments{number}: {rule.lark}", f"call{number}: {self._call(name, f'arguments{number}')}"]
            kinds.append(f"call{number}")
        thought = self._reasoning(thinks)
        lines += [f"thought: {thought}"] if thought else []
        start = f"start: {'' if not thought else 'thought ' if thinks else 'thought? '}({' | '.join(kinds)})"
        return "\n".join([start, *lines])

    def _call(self, name: str, arguments: str) -> str:
        """A rule's right-hand side for a call of a function."""
        parts, at = list[str](), 0
        for slot in _SLOTS.finditer(self._call_form):
            parts.append(self._literals(self._call_form[at : slot.start()]))
            if slot[0] == _NAME:
                parts.append(self._literals(json.dumps(name, ensure_ascii=False)[1:-1]))
            else:
                parts.append("/[A-Za-z0-9]{9}/" if slot[0] == _ID else arguments)
            at = slot.end()
        return " ".join([*parts, self._literals(self._call_form[at:])])

    @cached_property
    def _call_form(self) -> str:
        """What the template writes for a call, after its opened answer and before the end of the message.

        Raises:
            ConfigError: That is not known.
        """
        form = self._form([USER], _CALL, [_TOOL])
        slots = _SLOTS.findall(form)
        if slots.count(_NAME) != 1 or len(slots) - slots.count(_ID) != 2:
            raise ConfigError(
                "this service cannot force a tool call of this model: its chat template writes a call as "
                f"{form[:200]!r}, which does not have the name and the arguments once each; use auto or none"
            )
        return form

    @cached_property
    def _answer_form(self) -> tuple[str, str]:
        """What the template writes before and after the text of an answer, if that has special tokens."""
        form = self._form([USER], {"role": "assistant", "content": _TEXT}, [])
        before, slot, after = form.partition(_TEXT)
        return (before, after) if slot and any(token in before for token in self._special) else ("", "")

    def _form(self, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any], tools: Sequence[Any]) -> str:
        opened = self._write(before, tools, opened=True)
        written = self._write([*before, message], tools, opened=False)
        heads = [opened, opened[: opened.rfind("<think>")]] if "<think>" in opened else [opened]
        head = next((text for text in heads if written.startswith(text)), None)
        if head is None:  # the template writes what was said otherwise than it opens an answer
            return ""
        form = _THOUGHT.sub("", written.removeprefix(head))
        ends = [at for text, id in self._added.items() if id in self._ends and (at := form.find(text, 1)) > 0]
        late = [at for at in ends if _SLOTS.search(form[:at]) or _TEXT in form[:at]]
        slots = [*_SLOTS.finditer(form)]
        last = slots[-1].end() if slots else form.find(_TEXT)
        return form[: min((at for at in late if at >= last), default=None)]

    def _reasoning(self, thinks: bool) -> str:
        """The rule of reasoning, from its beginning or after it was opened; "" for a model that knows none."""
        opener, closer = self._added.get("<think>"), self._added.get("</think>")
        if not thinks:
            return "" if opener is None or closer is None else rf"<[{opener}]> {_FREE} <[{closer}]> /[ \n]{{0,4}}/"
        if closer is not None and "</think>" in self._special:
            return rf"{_FREE} <[{closer}]> /[ \n]{{0,4}}/"
        return r"ended /[ \n]{0,4}/" + "\n" + r"ended[lazy]: /(?s:.*)<\/think>/"

    def _literals(self, text: str) -> str:
        """A text as it stands in a rule, its added tokens by their ids."""
        if not text:
            return ""
        pattern = "|".join(re.escape(token) for token in sorted(self._added, key=len, reverse=True) if token)
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(
            f"<[{self._added[part]}]>" if part in self._added else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def conversation_grammar(
    request: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    forms: AnswerForms,
    thinks: Callable[[], bool],
    grammars: Grammars,
) -> AnswerGrammar | None:
    """Return the grammar of the answer to a conversation; None for any answer. ``thinks`` says whether the prompt has
    begun the model's reasoning.

    Raises:
        Refusal: The request's schema is none, or the form in which the model writes calls is not known.
    """
    rule = read_rule(request.response_format, request.structured_outputs)
    calls = call_rules(request.tool_choice, tools) if rule is not None or request.forces_call else {}
    if rule is None and not calls:
        return None
    answer = None if request.forces_call else rule
    try:
        text = forms.grammar(answer, calls, thinks=thinks())
    except ConfigError as error:
        raise Refusal(400, f"tool_choice: {error}", "tool_choice", "unsupported") from None
    return AnswerGrammar(grammars, text, (*([answer] if answer else ()), *calls.values()))
