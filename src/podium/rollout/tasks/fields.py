"""Whether the chat template writes what messages say: each message's text, its calls of tools, and its other fields.

No list of fields decides. What a template writes is found by writing a conversation with another value in a field's
place. A field without an effect is refused if it holds what somebody said, and else taken for meta data and told.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.messages import Messages, SystemPrompt, message_text, number_of

if TYPE_CHECKING:
    from podium.rollout.tasks.templates import Texts

Path: TypeAlias = tuple[str | int, ...]
"""The names and places that lead to a text in a list of tools."""
OMITTED: Final = "podium: tools are left out"
"""A comment in a chat template whose model knows its tools without reading them."""

_SPEECH: Final = re.compile(
    r"(.+_)?(reasoning|thinking|thought|rationale|chain_of_thought|cot|scratchpad|refusal|function_call|tool_call)s?"
    r"(_(content|text|block|detail|step)s?)?"
)
"""Names of fields that hold what the model said or thought, however short."""
_METADATA: Final = re.compile(
    r"(.+[_-])?(id|idx|index|uuid|url|uri|link|title|meta|metadata|source|origin|date|time|timestamp|created|updated|path|"
    r"file|filename|lang|language|country|score|rating|count|tokens|length|usage|license|licence|split|hash|sha|repo|"
    r"version|model|name|username|author|speaker|recipient|type|kind|status|category|topic|domain|tag|label|difficulty|"
    r"quality|sentiment|emotion|header)s?"
)
"""Names of fields that say where a message comes from or what kind it is, whatever words they hold."""
_FEW: Final = 4  # words: so many in a row are a sentence, and fewer may be a name
_LOWER: Final = 2  # words of a sentence that begin in lower case; those of names, dates and browsers hardly do
_IDEOGRAPHS: Final = 8  # letters of a script that puts no spaces between words
_TRIES: Final = 4  # messages with a field of meta data that are written with it and without it
_SHAPES: Final = 500  # sequences of roles of which a conversation of probes is written
_KINDS: Final = 500  # of tools and sequences of roles, which are tried once
_CHOICES: Final = ("enum", "const")
_TEXTS: Final = ("name", "description", *_CHOICES)
_UNSPACED: Final = re.compile(rf"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]{{{_IDEOGRAPHS},}}")
_WORD: Final = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*[.,;:!?]?")


def holds_speech(name: str, value: Any) -> bool:
    """Return whether a field holds what somebody said, and no meta data: its name says so, or its text is a sentence,
    has several lines, or is nested and has such a text in it."""
    if _names(_METADATA, name):
        return False
    if _names(_SPEECH, name):
        return any(text.strip() for text in list_texts(value))
    return any(_is_sentence(text) for text in list_texts(value))


def is_speech(name: str) -> bool:
    """Return whether a field of this name holds what somebody said or thought."""
    return _names(_SPEECH, name)


def is_metadata(name: str) -> bool:
    """Return whether a field of this name says where something comes from, or of what kind it is."""
    return _names(_METADATA, name)


@lru_cache(maxsize=1024)
def _names(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.fullmatch(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) is not None


def list_texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of a field, without those under a name of meta data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in cast("Mapping[str, Any]", value).items():
            if not _names(_METADATA, str(name)):
                yield from list_texts(entry)
    elif isinstance(value, list | tuple):
        for entry in cast("Sequence[Any]", value):
            yield from list_texts(entry)


def _is_sentence(text: str) -> bool:
    if "\n" in text.strip() or _UNSPACED.search(text):
        return True
    words = text.split()
    if len(words) < _FEW:
        return False
    plain = [word for word in words if _WORD.fullmatch(word)]
    return 2 * len(plain) > len(words) and sum(word[0].islower() for word in plain) >= _LOWER


def list_speech(message: Mapping[str, Any]) -> list[str]:
    """Return the texts that a message says: its content, the names of its calls of tools, and fields of speech."""
    fields = [value for name, value in message.items() if isinstance(value, str) and is_speech(name)]
    names = [str(_function(call).get("name", "")) for call in _calls(message)]
    return [spoken.strip() for spoken in (message_text(message), *fields, *names) if spoken.strip()]


class FieldCheck:
    """Checks conversations against one chat template.

    Attributes:
        unwritten: Fields that are taken for meta data and that the template does not write, and how many messages have
            them.
        rewritten: How many messages of each role but the assistant's the template writes with other characters.
    """

    def __init__(self) -> None:
        self.unwritten: Counter[str] = Counter()
        self.rewritten: Counter[str] = Counter()
        self._written: dict[tuple[str, str], int] = {}
        self._shapes: set[tuple[Any, ...]] = set()

    def check(self, texts: Texts, start: int = 0) -> set[int]:
        """Check that the template writes what the messages from ``start`` on say. Returns the places of the messages of
        which it leaves out a field because later messages follow, as many templates do with the reasoning of earlier
        turns.

        Raises:
            DataError: The template does not write a message, a call of a tool, or a field that holds what was said.
        """
        stripped: set[int] = set()
        for index, message in enumerate(texts.messages[start:], start=start):
            for name, value in message.items():
                if name in ("role", "content") or not value or (name == "tool_calls" and isinstance(value, list)):
                    continue
                if not holds_speech(name, value):
                    self._look(texts, index, name)
                elif _is_stripped(texts, index, name):
                    stripped.add(index)
        self._check_texts(texts, start)
        _check_calls(texts, start)
        return stripped

    def _look(self, texts: Texts, index: int, name: str) -> None:
        """Count a field of meta data that the template does not write."""
        key = texts.messages[index]["role"], name
        tries = self._written.get(key, 0)
        if 0 <= tries < _TRIES:
            has_effect = texts.whole != texts.try_write(_without(texts.messages, index, name))
            tries = self._written[key] = -1 if has_effect else tries + 1
        if tries > 0:
            self.unwritten[name] += 1

    def _check_texts(self, texts: Texts, start: int) -> None:
        """Check that the text of each message is written. Of each sequence of roles, one conversation of probes is
        written, because a short text may stand in the conversation by chance."""
        messages, text = texts.messages, texts.whole
        shape = shape_of(messages)
        doubtful = [at for at, m in enumerate(messages) if (content := message_text(m).strip()) and content not in text]
        if shape not in self._shapes and len(self._shapes) < _SHAPES:
            probes = [f"podium{at}m" if message_text(m) else "" for at, m in enumerate(messages)]
            pairs = zip(messages, probes, strict=True)
            probed = texts.try_write([{**m, "content": p} if p else m for m, p in pairs]) or ""
            missing = [at for at, probe in enumerate(probes) if probe and probe not in probed]
            doubtful = sorted({*doubtful, *missing})
        for index in doubtful:
            message = messages[index]
            if index < start or not message_text(message).strip():
                continue
            if text == texts.try_write(with_fields(messages, index, content="podium")):
                if isinstance(message, SystemPrompt):
                    raise ConfigError(
                        f"data.system_prompt = {message['content'][:40]!r} is not written by the chat template: set "
                        "data.chat_template to one that writes a system prompt, or put the text into the prompts"
                        + explain_parts(texts.try_write, messages)
                    )
                raise DataError(
                    f"message {number_of(messages, index)} of the role {message['role']!r}, "
                    f"{message_text(message)[:40]!r}, is not written by the chat template, so that the model would not "
                    "see it: set data.chat_template to one that writes such messages, or take the message out"
                    + explain_parts(texts.try_write, messages)
                )
            if message["role"] != "assistant" and not _is_in(message_text(message).strip(), text):
                self.rewritten[message["role"]] += 1
        if len(self._shapes) < _SHAPES:
            self._shapes.add(shape)


def explain_parts(write: Callable[[Messages], str | None], messages: Messages) -> str:
    """Return the end of a message about a template that does not write these texts: that it takes content as a list of
    parts alone, if this is why. ``write`` returns what the template writes, or None where it raises."""
    said = [text for message in messages if isinstance(message.get("content"), str) and (text := message_text(message))]
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
    written = (write(parts) if said else None) or ""
    if not said or not all(_is_in(text, written) for text in said):
        return ""
    return (
        ". The template reads the content of a message as a list of parts alone, [{'type': 'text', 'text': ...}], and "
        "Podium gives it texts: set data.chat_template to a copy that also writes a content which is a text "
        "(`message.content is string`)"
    )


def shape_of(messages: Messages) -> tuple[str, ...]:
    """Return what messages of one shape have in common: the roles, and whether there is a text and a call."""
    return tuple(f"{m['role']}{bool(m.get('content'))}{bool(m.get('tool_calls'))}" for m in messages)


def with_fields(messages: Messages, index: int, **fields: Any) -> Messages:
    """Return messages of which one has other fields."""
    return [*messages[:index], {**messages[index], **fields}, *messages[index + 1 :]]


def _without(messages: Messages, index: int, name: str) -> Messages:
    message = {key: entry for key, entry in messages[index].items() if key != name}
    return [*messages[:index], message, *messages[index + 1 :]]


def _is_in(said: str, text: str) -> bool:
    """Whether a text holds what was said, but for white space, or as JSON."""
    forms = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1])
    return any("".join(form.split()) in "".join(text.split()) for form in forms)


def _is_stripped(texts: Texts, index: int, name: str) -> bool:
    """Return whether the template writes a field only while no later messages follow.

    Raises:
        DataError: It writes the field in neither case.
    """
    messages, whole = texts.messages, texts.whole
    value = messages[index][name]
    text = value.strip() if isinstance(value, str) else ""
    uses = sum(str(entry).count(text) for other in messages for entry in other.values()) if len(text) > _FEW else 0
    if uses and whole.count(text) >= uses:
        return False
    if uses == 1 and text not in whole and text in texts(index + 1):
        return True
    without = _without(messages, index, name)
    if whole != texts.try_write(without):
        return False
    if index < len(messages) - 1 and texts(index + 1) != texts.try_write(without[: index + 1]):
        return True
    raise _refuse(messages, index, name, value)


def _refuse(messages: Messages, index: int, name: str, value: Any) -> DataError:
    effect = "learn to leave it out" if messages[index]["role"] == "assistant" else "not see it"
    return DataError(
        f"message {number_of(messages, index)} has {name} = {str(value)[:40]!r}, which the chat template does not "
        f"write, so that the model would {effect}: set data.chat_template to one that writes this field, put its text "
        f"into the content, or take {name} out"
    )


def _check_calls(texts: Texts, start: int) -> None:
    """Check that name and arguments of each call of a tool are written.

    One conversation is written with probes in the place of all of them. A call whose probe is missing is left out to
    see whether the text changes.

    Raises:
        DataError: A call, or its arguments, are not written.
    """
    messages = texts.messages
    if not any(message.get("tool_calls") for message in messages[start:]):
        return
    numbers = count()
    probes: list[tuple[int, int, str]] = []

    def probe(index: int, number: int, call: Any) -> Any:
        function = _function(call)
        name, argument = (f"podium{next(numbers)}{part}" for part in ("n", "a"))
        probes.append((index, number, name))
        if not function.get("arguments"):
            return _with_function(call, {**function, "name": name})
        probes.append((index, number, argument))
        return _with_function(call, {**function, "name": name, "arguments": {"podium": argument}})

    probed = [
        {**m, "tool_calls": [probe(index, number, call) for number, call in enumerate(_calls(m))]} if _calls(m) else m
        for index, m in enumerate(messages)
    ]
    text = texts.try_write(probed) or ""
    missing = ((index, number) for index, number, sign in probes if index >= start and sign not in text)
    for index, number in dict.fromkeys(missing):
        calls = _calls(messages[index])
        before, call, after = calls[:number], calls[number], calls[number + 1 :]
        arguments = _function(call).get("arguments")
        bare = _with_function(call, {**_function(call), "arguments": {}})
        for name, value, other in (
            ("tool_calls", calls, [*before, *after]),
            ("tool_calls.function.arguments", arguments, [*before, bare, *after]),
        ):
            if value and texts.whole == texts.try_write(with_fields(messages, index, tool_calls=other)):
                raise _refuse(messages, index, name, value)


def check_arguments(messages: Messages, text: str) -> None:
    """Check that arguments of calls that are no JSON object are not written as a text in quotes into ``text``.

    Raises:
        DataError: They are.
    """
    for index, message in enumerate(messages):
        for function in map(_function, _calls(message)):
            arguments = function.get("arguments")
            if isinstance(arguments, str) and arguments.strip() and json.dumps(arguments, ensure_ascii=False) in text:
                raise DataError(
                    f"message {number_of(messages, index)} calls {str(function.get('name'))[:40]!r} with the arguments "
                    f"{arguments[:40]!r}, which are no JSON object, and which the chat template writes as a text in "
                    "quotes: repair the row"
                )


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return cast("list[Any]", calls) if isinstance(calls, list) else []


def _function(call: Any) -> Mapping[str, Any]:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    return cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {}


def _with_function(call: Any, function: Mapping[str, Any]) -> Any:
    if isinstance(call, Mapping) and "function" in call:
        return {**cast("Mapping[str, Any]", call), "function": function}
    return function


def to_tool_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of OpenAI's older form, with ``function_call`` or the role "function", in today's form."""
    entries = dict(message)
    call = entries.get("function_call")
    if call and not entries.get("tool_calls"):
        function = cast("Mapping[str, Any]", call) if isinstance(call, Mapping) else {}
        if function.get("name"):
            del entries["function_call"]
            entries["tool_calls"] = [{"type": "function", "function": dict(function)}]
    if entries.get("role") == "function":
        entries["role"] = "tool"
    return entries


def order_results(messages: Messages) -> Messages:
    """Return messages with the results of each answer's calls in the order of the calls, where all of them name theirs.

    They may come in the order in which the tools were done, and a template that does not write the ids of calls would
    let the model take one result for that of another call.
    """
    ordered, at = Messages(), 0
    while at < len(messages):
        ordered.append(messages[at])
        calls = messages[at].get("tool_calls")
        at += 1
        results = [*takewhile(lambda message: message.get("role") == "tool", messages[at:])] if calls else []
        at += len(results)
        if len(results) > 1 and isinstance(calls, list):
            ids = [call.get("id") if isinstance(call, Mapping) else None for call in cast("list[object]", calls)]
            named = [result.get("tool_call_id") for result in results]
            if all(isinstance(name, str) and ids.count(name) == named.count(name) == 1 for name in named):
                results.sort(key=lambda result: ids.index(result.get("tool_call_id")))
        ordered += results
    return ordered


class ToolCheck:
    """Checks tools against one chat template: names, descriptions, parameters, and the values to choose from.

    The template is tried: one conversation is written with a probe in the place of each text. A text whose probe is
    missing is replaced alone, to see whether that changes anything.

    Args:
        template: The text of the template. One with the words of ``OMITTED`` leaves tools out on purpose.
    """

    def __init__(self, template: str) -> None:
        self._omits = OMITTED in template
        self._written: set[str] = set()

    def check(self, texts: Texts) -> None:
        """Check that the template writes what the tools say, up to the last question or in the whole conversation.

        Raises:
            ConfigError: It writes no tools.
            DataError: It leaves out a part of a tool.
        """
        messages, tools = texts.messages, texts.tools
        if self._omits or not tools:
            return
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        question = messages[: users[-1] + 1] if users else messages
        kind = json.dumps([tools, [message["role"] for message in question]], sort_keys=True, default=str)
        if kind in self._written:
            return
        paths = [*_list_paths(tools)]
        probes = {path: f"podium{number}t" for number, path in enumerate(paths)}
        probed = _fill(tools, probes)
        for conversation in (question, messages):
            text = texts.try_write(conversation, probed)
            missing = [path for path in paths if probes[path] not in (text or "")]
            if text is not None and len(missing) < len(paths):
                break
        written = texts.try_write(conversation, tools)
        leaves = [path for path in missing if written == texts.try_write(conversation, _fill(tools, {path: "podium"}))]
        if leaves and len(leaves) == len(paths):
            raise ConfigError(
                "there are tools, and the chat template does not write them: set data.chat_template to one that does; "
                f"if the model knows them without, write the comment {{#- {OMITTED} -#}} into it"
            )
        if leaves:
            raise _refuse_tool(tools, leaves[0])
        if len(self._written) >= _KINDS:
            self._written.clear()
        self._written.add(kind)


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


def _fill(value: Any, texts: Mapping[Path, str], path: Path = ()) -> Any:
    """``value`` with other texts at some paths."""
    if path in texts:
        return texts[path]
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value).items()
        names = {texts.get((*path, name, ""), name): (name, entry) for name, entry in entries}
        return {new: _fill(entry, texts, (*path, name)) for new, (name, entry) in names.items()}
    if isinstance(value, list | tuple):
        return [_fill(entry, texts, (*path, at)) for at, entry in enumerate(cast("Sequence[Any]", value))]
    return value


def _refuse_tool(tools: Sequence[Any], path: Path) -> DataError:
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
