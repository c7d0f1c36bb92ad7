"""Write prompts and conversations as text, by the chat template if there is one, and encode them."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.bad_rows import RowError
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.examples import Example, Messages, half_pair, message_text, template_messages
from podium.rollout.tasks.spans import (
    MARKING,
    Span,
    check_fields,
    check_learned,
    check_others,
    find_turn,
    mask_tokens,
    opens_otherwise,
    read_marks,
    text_differs_at,
    to_tool_calls,
)
from podium.telemetry import Note, emit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["INSTRUCTING", "Writer", "chat_template"]

T = TypeVar("T")

INSTRUCTING: Final = ("system", "developer")
"""The roles of messages before which no ``data.system_prompt`` comes."""

_CUTS: Final = 5  # attempts to cut a prompt: a shorter text seldom has exactly as many tokens fewer as were cut
_PATIENCE_S: Final = 10.0  # for a template to write a chunk of prompts, which takes milliseconds
_VAST: Final = 1_000_000  # characters: only texts of more are judged by their length before they are encoded
_EXAMINED: Final = 200  # characters of a text that are looked at for unknown ones
_PROBE: Final = "podium"
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")  # transformers' keyword around the assistant's text


class Writer:
    """Writes prompts and answers as text and encodes them, for one tokenizer and one configuration."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self.config = config
        self._template = chat_template(tokenizer, config)
        self._tool_template = chat_template(tokenizer, config, tools=True)
        self._options = _template_options(tokenizer, config, self._template, self._tool_template)
        self._has_written = False
        self.turns = [0, 0, 0]
        """Turns of conversations that were encoded; of these, those that the template writes otherwise than the row has
        them, and those whose end is not learned."""
        unknown, special = tokenizer.unk_token_id, (tokenizer.eos_token_id, tokenizer.bos_token_id)
        # GPT-2's is its end-of-sequence token, and never stands for a character.
        self.unknown = unknown if isinstance(unknown, int) and unknown not in special else None

    @property
    def settings(self) -> tuple[Any, ...]:
        """The settings that the token ids depend on."""
        config = self.config
        options = sorted(self._options.items())
        return (
            self._template,
            self._tool_template,
            options,
            config.system_prompt,
            config.max_prompt_tokens,
            config.overlong,
        )

    @property
    def is_lasting(self) -> bool:
        """Whether the same examples are written in the same way at any time: the template reads no clock."""
        return not any("strftime_now" in (text or "") for text in (self._template, self._tool_template))

    @cached_property
    def ends(self) -> tuple[tuple[str, int], ...]:
        """The special tokens with which the template ends the assistant's turn, and their ids: most write one."""
        if self._template is None:
            return ()
        messages = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        try:
            written = _in_time(lambda: self._render(messages, None, opened=False))
        except _Looping:
            raise
        except ConfigError:  # one that writes prompts only
            return ()
        (ids,) = self._encode([written.rpartition(_PROBE)[2]])
        first = next((at for at, token in enumerate(ids) if token in self._special.values()), None)
        if first is None:
            return ()
        names = {token_id: name for name, token_id in self._special.items()}
        return tuple((names[token], token) for token in takewhile(names.__contains__, ids[first:]))

    @property
    def end(self) -> tuple[str, int] | None:
        """The first special token with which the template ends the assistant's turn, and its id."""
        return self.ends[0] if self.ends else None

    @cached_property
    def _special(self) -> dict[str, int]:
        """The texts of the special tokens, and their ids."""
        return {token.content: at for at, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def _end_signs(self) -> tuple[str, ...]:
        """The texts that end a turn: all tokens of the template's end, and the first alone."""
        signs = ("".join(name for name, _ in self.ends), *(name for name, _ in self.ends[:1]))
        return tuple(dict.fromkeys(sign for sign in signs if sign))

    @cached_property
    def words(self) -> frozenset[str]:
        """The texts that the tokenizer reads as one token of their own, added to its vocabulary."""
        return frozenset(token.content for token in self._tokenizer.added_tokens_decoder.values())

    @property
    def template(self) -> str | None:
        """The Jinja text of the chat template; None for plain text."""
        return self._template

    def text(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None, *, opened: bool) -> str:
        """Write a conversation by the chat template, with the system prompt. With ``opened`` the assistant's turn is
        opened after it.

        Raises:
            ConfigError: There is no template, or it cannot write this conversation.
        """
        if self._template is None:
            raise ConfigError(
                "conversations need a chat template, and the tokenizer has none: set data.chat_template to a Jinja file"
            )
        whole_text = self.messages(messages)
        if self._has_written:
            return self._render(whole_text, tools, opened=opened)
        text = _in_time(lambda: self._render(whole_text, tools, opened=opened))
        self._has_written = True  # a template that loops does so at once; a thread for each text would cost most of it
        return text

    def messages(self, prompt: str | Sequence[Mapping[str, Any]]) -> Messages:
        """Return a prompt as messages that a template can write. Where the first is neither a system message nor a
        developer's, ``data.system_prompt`` comes before it."""
        messages: Messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else self._to_messages(prompt)
        )
        if self.config.system_prompt and messages[0]["role"] not in INSTRUCTING:
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        return messages

    def encode(self, text: str) -> list[int]:
        """The token ids of a text that the template wrote."""
        return self._encode([text])[0]

    def prompts(self, examples: Sequence[Example]) -> list[list[int] | RowError | None]:
        """Encode prompts as they are generated from. None stands for a prompt that is too long at first sight, an error
        for one that cannot be written."""
        texts: list[str | RowError | None] = [*self._write([(example.prompt, example) for example in examples])]
        most = self.config.max_prompt_tokens
        texts = [None if isinstance(text, str) and self.is_vast(len(text), most) else text for text in texts]
        encoded: list[list[int] | RowError | None] = [None if isinstance(text, str) else text for text in texts]
        for plain in (False, True):
            places = [at for at, e in enumerate(examples) if e.is_text == plain and isinstance(texts[at], str)]
            ids = self._encode_prompts([str(texts[at]) for at in places], plain=plain)
            for at, tokens in zip(places, ids, strict=True):
                encoded[at] = tokens
        return encoded

    def cut(self, example: Example, tokens: list[int] | None) -> tuple[str | Messages, list[int]] | None:
        """Cut the prompt's own text, or the last message's, from the front until it fits. None: nothing is left."""
        prompt, most = example.prompt, self.config.max_prompt_tokens
        text = prompt if isinstance(prompt, str) else message_text(prompt[-1])
        if tokens is None:
            text = text[-self.config.max_prompt_tokens * self._longest_token :]
        (ids,) = self._encode([text])
        excess = (len(ids) if tokens is None else len(tokens)) - most
        for _ in range(_CUTS):
            ids = ids[max(0, excess) :]
            if not ids:
                return None
            shorter: Any = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            prompt_shortened = (
                shorter if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": shorter}]
            )
            (written,) = self._write([(prompt_shortened, example)])
            if not isinstance(written, str):
                raise written
            (tokens,) = self._encode_prompts([written], plain=example.is_text)
            excess = len(tokens) - most
            if excess <= 0:
                return prompt_shortened, tokens
        return None

    def answered(
        self, prompts: Sequence[tuple[Example, str | Messages, list[int]]], end: int
    ) -> Iterator[tuple[list[int], list[bool]] | RowError]:
        """Encode what follows each prompt. Yields the ids of the whole and their mask, or why there are none.

        Args:
            prompts: An example, its prompt, which may have been cut, and the prompt's ids.
            end: The id that ends an answer.
        """
        turns = [(e, prompt, ids) for e, prompt, ids in prompts if e.turns]
        spoken = iter(
            _in_time(lambda: [_try_row(e, partial(self._conversation, e, p, ids, end)) for e, p, ids in turns])
            if turns
            else ()
        )
        written = iter(
            self._encode_answers([(e, prompt, ids) for e, prompt, ids in prompts if not e.turns and not e.is_text])
        )
        signs = [token for _, token in self.ends] or [end]
        for example, _, ids in prompts:
            if example.turns:
                yield next(spoken)
            elif example.is_text:
                eos = self._tokenizer.eos_token_id
                yield [*ids, eos if isinstance(eos, int) else end], [False] + [True] * len(ids)
            else:
                answer = [*next(written), *signs]
                yield [*ids, *answer], [False] * len(ids) + [True] * len(answer)

    def _encode_answers(self, prompts: Sequence[tuple[Example, str | Messages, list[int]]]) -> list[list[int]]:
        """Encode answers that are text. An answer is encoded with its prompt as one text, where this text begins with
        the prompt's ids: many tokenizers put a space before each text that they encode. It is encoded alone otherwise.
        """
        before = self._write([(prompt, example) for example, prompt, _ in prompts])
        answers = [example.answer or "" for example, _, _ in prompts]
        texts = [f"{text}{answer}" for text, answer in zip(before, answers, strict=True)]
        joined = self._encode_prompts(texts, plain=False)
        alone = [tokens[: len(ids)] != ids for tokens, (_, _, ids) in zip(joined, prompts, strict=True)]
        pieces = iter(self._encode([answer for answer, apart in zip(answers, alone, strict=True) if apart]))
        return [
            next(pieces) if apart else tokens[len(ids) :]
            for tokens, (_, _, ids), apart in zip(joined, prompts, alone, strict=True)
        ]

    def check_unknown(self, what: str, texts: Sequence[str], rows: int, total: int) -> None:
        """Report characters that the tokenizer does not know and that ``rows`` of ``total`` texts hold.

        Args:
            what: The name of the texts, in the plural.
            texts: Some texts that hold unknown characters.
            rows: Number of texts that hold unknown characters.
            total: Number of all texts.

        Raises:
            DataError: Most texts hold nothing but unknown characters.
        """
        if not texts:
            return
        texts = [text[-_EXAMINED:] for text in texts]
        blind = sum(all(token == self.unknown for token in ids) for ids in self._encode(texts))
        signs = sorted(set().union(*texts))
        strange = [sign for sign, ids in zip(signs, self._encode(signs), strict=True) if self.unknown in ids]
        spoken = (
            f"{rows} of {total} {what} hold characters that the tokenizer does not know, such as "
            f"{', '.join(map(repr, strange[:5])) or repr(texts[0][:20])}"
        )
        unknown = self._tokenizer.unk_token
        if 2 * rows > total and 2 * blind > len(texts):
            raise DataError(f"{spoken}: the model would see nothing but {unknown}; set model.tokenizer")
        emit(Note(f"{spoken}: the model sees {unknown} in their place"))

    # -- text ----------------------------------------------------------------------------------------------------------

    def _write(self, prompts: Sequence[tuple[str | Messages, Example]]) -> list[str | RowError]:
        """Write prompts as they are generated from. The second of each pair has the tools."""
        return _in_time(lambda: [_try_row(e, partial(self._write_prompt, p, e)) for p, e in prompts])

    def _write_prompt(self, prompt: str | Messages, example: Example) -> str:
        if example.is_text and isinstance(prompt, str):
            return prompt
        if self._template is not None:
            messages, tools = read_marks(self.messages(prompt))[0], self._tools(example)
            check_fields(messages, lambda part: self._render(part, tools, opened=True))
            return self._render(messages, tools, opened=True)
        if not isinstance(prompt, str):
            raise ConfigError(
                "the prompt is a conversation, and there is no chat template to write it with: set data.chat_template "
                "to a Jinja file, or take a tokenizer that has one"
            )
        return f"{self.config.system_prompt}\n\n{prompt}" if self.config.system_prompt else prompt

    def _tools(self, example: Example) -> list[Any] | None:
        """The tools of the row: a list of JSON schemas, or its JSON text. Other columns of this name are not tools."""
        row_tools = tools = example.row.get("tools")
        if not tools:
            return None
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError):
                tools = None
        if not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in cast("list[object]", tools))):
            if isinstance(example.prompt, str):
                return None
            raise DataError(f"the tools {str(row_tools)[:60]!r} are no list of JSON schemas; repair the row")
        if not re.search(r"\btools\b", self._tool_template or ""):
            raise ConfigError("the row has tools, and the chat template writes none: set data.chat_template to another")
        return cast("list[Any]", tools)

    def _render(self, messages: Messages, tools: list[Any] | None, *, opened: bool) -> str:
        return self._apply_template(messages, tools, add_generation_prompt=opened, tokenize=False)

    def _apply_template(self, messages: Messages, tools: list[Any] | None, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                cast(Any, messages),
                tools=tools,
                chat_template=self._tool_template if tools else self._template,
                **options,
                **self._options,
            )
        except Exception as error:  # templates raise what they like, and Jinja's own errors besides
            system = self.config.system_prompt
            raise ConfigError(
                f"the chat template cannot write {str(messages)[:120]}: {str(error) or type(error).__name__}; set "
                "data.chat_template to another, or to none for plain text"
                + ("; the template may not support system prompts" if system else "")
            ) from error

    def _conversation(
        self, example: Example, prompt: str | Messages, ids: list[int], end: int
    ) -> tuple[list[int], list[bool]]:
        """Encode prompt and turns. The mask is True on the assistant's turns, without the prompt's unless it is whole,
        and without those that the row marks as not to be learned.

        Where the template marks the assistant's text, its mask is taken. Otherwise a turn is what the template adds for
        this turn to what it writes to open it, up to the end of the turn. The text is encoded as a whole where it then
        begins with the prompt's ids, and in pieces otherwise.
        """
        tools = self._tools(example)
        before = self.messages(prompt)
        messages, learned = read_marks([*before, *self._to_messages(example.turns)])
        first = 0 if example.whole else len(before)
        self.turns[1] += check_fields(messages, lambda part: self._render(part, tools, opened=False))
        if _GENERATION.search((self._tool_template if tools else self._template) or ""):
            if not all(learned[first:]):
                raise ConfigError(
                    "a turn is marked as not to be learned, and the chat template marks the assistant's text itself: "
                    "set data.chat_template to one without {% generation %}"
                )
            return self._read_marks(messages, tools, 0 if example.whole else len(ids))
        text = self._render(messages, tools, opened=False)
        spans: list[Span] = []
        for index in range(first, len(messages)):
            if messages[index]["role"] == "assistant":
                span = find_turn(
                    text,
                    messages,
                    index,
                    lambda part, opened: self._render(part, tools, opened=opened),
                    self._end_signs,
                    self._special,
                )
                spans.append(replace(span, learned=learned[index]))
        self.turns[0] += len(spans)
        self.turns[1] += check_learned(text, messages, spans)
        while spans and not spans[-1].learned:
            spans.pop()
        if not spans:
            raise DataError("no turn of the conversation is learned: every turn is marked as not to be learned")
        self.turns[2] += sum(span.learned and not span.ended for span in spans[:-1])
        tokens, mask = self._encode_spans(text[: spans[-1].stop], spans, ids)
        return (tokens, mask) if spans[-1].ended else ([*tokens, end], [*mask, True])

    def _encode_spans(self, text: str, spans: list[Span], ids: list[int]) -> tuple[list[int], list[bool]]:
        if self._tokenizer.is_fast:
            encoded: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            mask = mask_tokens(encoded["offset_mapping"], spans)
            if mask is not None and encoded["input_ids"][: len(ids)] == ids:
                return encoded["input_ids"], mask
        done, pieces = 0, list[tuple[str, bool]]()
        for span in spans:
            pieces += [(text[done : span.start], False), (text[span.start : span.stop], span.learned)]
            done = span.stop
        tokens: list[int] = []
        mask = []
        for piece, (_, learned) in zip(self._encode([piece for piece, _ in pieces]), pieces, strict=True):
            tokens += piece
            mask += [learned] * len(piece)
        return tokens, mask

    def _to_messages(self, messages: Sequence[Mapping[str, Any]]) -> Messages:
        """Messages that the template can write, with function calls in the form that it reads."""
        if "function_call" not in (self._template or ""):
            messages = [to_tool_calls(message) for message in messages]
        return template_messages(messages)

    def _read_marks(self, messages: Messages, tools: list[Any] | None, known: int) -> tuple[list[int], list[bool]]:
        """Encode a conversation with the template's own mask, to which the end of each turn is added."""
        opened = self._render(messages[:-1], tools, opened=True)
        if not (text := self._render(messages, tools, opened=False)).startswith(opened):
            raise opens_otherwise(opened[text_differs_at(text, opened) :], "or data.chat_template to another file")
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoding = self._apply_template(messages, tools, **options)
        tokens: list[int] = encoding["input_ids"]
        mask = [bool(flag) for flag in encoding["assistant_masks"]]
        end = self.end[1] if self.end else None
        for index in range(1, len(tokens)):
            mask[index] = mask[index] or (mask[index - 1] and tokens[index] == end and tokens[index - 1] != end)
        self._check_marks(text, messages, tokens, mask)
        mask[:known] = [False] * known
        if not any(mask):
            raise ConfigError(
                f"the chat template marks nothing of {str(messages)[:60]} as the assistant's text: {MARKING}"
            )
        last = max(index for index, learned in enumerate(mask) if learned) + 1
        return tokens[:last], mask[:last]

    def _check_marks(self, text: str, messages: Messages, tokens: list[int], mask: list[bool]) -> None:
        """Check that the template's marks do not cover what others than the assistant said. Raises DataError."""
        if not self._tokenizer.is_fast:
            return
        encoded: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if encoded["input_ids"] != tokens:
            return
        outside, done = list[str](), 0
        for (first, last), learned in zip(encoded["offset_mapping"], mask, strict=True):
            if learned:
                outside.append(text[done:first])
                done = last
        turns = {index for index, message in enumerate(messages) if message["role"] == "assistant"}
        check_others(text, [*(part for part in outside if part), text[done:]], messages, turns)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _encode_prompts(self, texts: list[str], *, plain: bool = False) -> list[list[int]]:
        """Encode texts. A template writes special tokens itself; ``plain`` text gets the tokenizer's first ones."""
        if self._template is not None and not plain:
            return self._encode(texts)
        eos = self._tokenizer.eos_token_id
        encoded = self._encode(texts, special=True)
        return [ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids for ids in encoded]

    def _encode(self, texts: list[str], *, special: bool = False) -> list[list[int]]:
        try:
            encoded: Any = (
                self._tokenizer(texts, add_special_tokens=special, return_attention_mask=False) if texts else {}
            )
        except Exception as error:
            halves = (f"{text[max(0, at - 20) : at + 20]!r}" for text in texts if (at := half_pair(text)) is not None)
            if (near := next(halves, None)) is None:
                reason = f"{type(error).__name__}: {error}"
                raise ConfigError(
                    f"the tokenizer cannot encode {texts[0][:60]!r}: {reason}; set model.tokenizer"
                ) from error
            raise DataError(f"half of a surrogate pair, which is no text, stands near {near}; take it out") from None
        return encoded.get("input_ids", [])

    def is_vast(self, characters: int, tokens: int) -> bool:
        """Whether a text of so many characters has more than ``tokens`` tokens whatever they are. Encoding such a text
        would take minutes and gigabytes.
        """
        return characters > _VAST and characters > tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """The most characters that one token of the vocabulary stands for."""
        return max(map(len, self._tokenizer.get_vocab()))


class _Looping(ConfigError):
    """A template does not end."""


def _try_row(example: Example, work: Callable[[], T]) -> T | RowError:
    """Return what ``work`` returns for a row, or the error with which it refuses the row, which names the place."""
    try:
        with example.name_in_errors():
            return work()
    except _Looping:
        raise
    except (ConfigError, DataError) as error:
        return error


def _in_time(work: Callable[[], T]) -> T:
    """Run ``work``, which fills templates, in a thread that is given up after ``_PATIENCE_S``: a template may loop."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="chat template", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise _Looping(
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


def _template_options(
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
