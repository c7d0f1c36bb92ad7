"""Write prompts and conversations as text, by the chat template if there is one, and encode them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from transformers.utils.chat_template_utils import render_jinja_template

from podium.errors import ConfigError, DataError
from podium.exceptions import read_text
from podium.rollout.tasks.bad_rows import RowError
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.fields import (
    FieldCheck,
    ToolCheck,
    check_arguments,
    explain_parts,
    order_results,
    to_tool_calls,
)
from podium.rollout.tasks.forms import Example, list_tools
from podium.rollout.tasks.messages import (
    INSTRUCTING,
    Messages,
    SystemPrompt,
    message_text,
    number_of,
    strip_end,
    template_messages,
)
from podium.rollout.tasks.spans import TurnFinder, read_marks, text_differs_at
from podium.rollout.tasks.templates import (
    GENERATION,
    PROBED_TOOL,
    Looping,
    Texts,
    chat_template,
    check_opening,
    list_variables,
    run_in_time,
    template_options,
)
from podium.rollout.tasks.text_encoder import Kept, TextEncoder
from podium.spelling import write_share
from podium.telemetry import Note, emit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_CUTS: Final = 5  # attempts to cut a prompt: a shorter text seldom has exactly as many tokens fewer as were cut
_RARE: Final = "\ue000\u0f3a\U0001f9ff"  # characters that a tokenizer encodes if it can encode any
_EXAMINED: Final = 200  # characters of a text that are looked at for unknown ones
_PROBES: Final = (("user", "podium"), ("assistant", "podium"), ("assistant", "rostra"))


class ChatEncoder:
    """Writes prompts and answers as text and encodes them, for one tokenizer and one configuration."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self.config = config
        self._template = chat_template(tokenizer, config)
        self._tool_template = chat_template(tokenizer, config, tools=True)
        self._options = template_options(tokenizer, config, self._template, self._tool_template)
        self._has_written = False
        self._kept: dict[int, Kept] = {}
        self._fields = FieldCheck()
        self._tools_check = ToolCheck(self._tool_template or "")
        self._encoder = TextEncoder(tokenizer)
        unknown, special = tokenizer.unk_token_id, (tokenizer.eos_token_id, tokenizer.bos_token_id)
        # GPT-2's is its end-of-sequence token, and never stands for a character.
        self.unknown = unknown if isinstance(unknown, int) and unknown not in special else None

    def with_options(self, options: Mapping[str, Any]) -> ChatEncoder:
        """Return an encoder whose template also gets these variables. Raises ConfigError for one that is not read."""
        options = {**self.config.chat_template_kwargs, **options}
        return ChatEncoder(self._tokenizer, replace(self.config, chat_template_kwargs=options))

    @property
    def settings(self) -> tuple[Any, ...]:
        """The settings on which the token ids, and the rows that get some, depend."""
        config = self.config
        options = sorted(self._options.items())
        return (
            self._template,
            self._tool_template,
            options,
            config.system_prompt,
            config.max_prompt_tokens,
            config.overlong,
            config.bad_rows,
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
        user, *answers = ({"role": role, "content": text} for role, text in _PROBES)
        texts = [self._write_probe([user, answer]) for answer in answers]
        if None in texts:  # one that writes prompts only
            return ()
        written, other = cast("list[str]", texts)
        if written == other:  # it writes no answers
            return ()
        common = text_differs_at(written[::-1], other[::-1])  # a template may change the case of a text, or quote it
        (ids,) = self._encoder.encode([written[len(written) - common :]])
        first = next((at for at, token in enumerate(ids) if token in self._encoder.special.values()), None)
        if first is None:
            return ()
        names = {token_id: name for name, token_id in self._encoder.special.items()}
        ends = dict.fromkeys(takewhile(names.__contains__, ids[first:]))  # a template may write the end twice
        return tuple((names[token], token) for token in ends)

    def _write_probe(self, messages: Messages, *, opened: bool = False) -> str | None:
        """Write messages of probes, with a tool if the template writes nothing without one; None if it refuses both."""
        for tools in (None, [PROBED_TOOL]):
            try:
                return run_in_time(lambda tools=tools: self._render(messages, tools, opened=opened))
            except Looping:
                raise
            except ConfigError:
                continue
        return None

    def check_opening(self) -> None:
        """As :func:`.check_opening`, for the template of this encoder."""
        if self._template is not None:
            check_opening(self._write_probe, self._encoder.special)

    @property
    def end(self) -> tuple[str, int] | None:
        """The first special token with which the template ends the assistant's turn, and its id."""
        return self.ends[0] if self.ends else None

    @cached_property
    def closings(self) -> tuple[str, ...]:
        """The signs that end an answer, and that are written after it where the data have none."""
        names = [name for name, _ in self.ends]
        return tuple(
            dict.fromkeys(name for name in ("".join(names), *names, str(self._tokenizer.eos_token or "")) if name)
        )

    @cached_property
    def lead(self) -> str:
        """What the template writes between the opening of an answer and the text of an answer that is a message."""
        user, answer = ({"role": role, "content": text} for role, text in _PROBES[:2])
        try:
            opened, written = (self._render([user, *rest], None, opened=not rest) for rest in ([], [answer]))
        except ConfigError:  # of which the first prompt tells
            return ""
        before = written[len(opened) :].partition(answer["content"])
        return before[0] if before[1] and written.startswith(opened) else ""

    @cached_property
    def _signs(self) -> frozenset[str]:
        """The special tokens that the template writes around a message of the user, or after one of the assistant."""
        if self._template is None:
            return frozenset()
        text = self._write_probe([{"role": "user", "content": "podium"}]) or ""
        return frozenset(name for name in self._encoder.special if name in text) | {name for name, _ in self.ends}

    def _check_signs(self, messages: Messages) -> Messages:
        """Return messages of which the assistant's end without a sign that the template writes after them.

        Raises:
            DataError: A message has a sign within its text.
        """
        plain: Messages = []
        for index, message in enumerate(messages):
            text = message_text(message)
            if message["role"] == "assistant" and (short := strip_end(text, self.closings)) != text:
                message, text = {**message, "content": short}, short
            if sign := min((sign for sign in self._signs if sign in text), key=text.find, default=""):
                raise DataError(
                    f"message {number_of(messages, index)} of the role {message['role']!r} has {sign!r}, which the "
                    "chat template writes itself, so that the model would read turns within a turn: set "
                    "data.chat_template to none if the template has written these texts already, or take the sign out"
                )
            plain.append(message)
        return plain

    @cached_property
    def _finder(self) -> TurnFinder:
        return TurnFinder([name for name, _ in self.ends], [*self._encoder.special], self.words, self._find_marks)

    @property
    def turns(self) -> list[int]:
        """As :attr:`.TurnFinder.turns`."""
        return self._finder.turns

    @cached_property
    def words(self) -> frozenset[str]:
        """The texts that the tokenizer reads as one token of their own, added to its vocabulary."""
        return frozenset(token.content for token in self._tokenizer.added_tokens_decoder.values())

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of the tokenizer's special tokens."""
        return frozenset(name for name in self._encoder.special if name)

    @property
    def unwritten(self) -> tuple[dict[str, int], dict[str, int]]:
        """The fields that the template does not write, and the messages that it writes otherwise, as
        :class:`.FieldCheck` counts them."""
        return self._fields.unwritten, self._fields.rewritten

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
        text = run_in_time(lambda: self._render(whole_text, tools, opened=opened))
        self._has_written = True  # a template that loops does so at once; a thread for each text would cost most of it
        return text

    def messages(self, prompt: str | Sequence[Mapping[str, Any]]) -> Messages:
        """Return a prompt as messages that a template can write. Where the first is neither a system message nor a
        developer's, ``data.system_prompt`` comes before it."""
        messages: Messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else self._to_messages(prompt)
        )
        if self.config.system_prompt and messages[0]["role"] not in INSTRUCTING:
            messages = [SystemPrompt(self.config.system_prompt), *messages]
        return messages

    def check(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, start: int = 0) -> None:
        """Check that the template writes what the messages from ``start`` on and the tools say, as those of the data.

        Raises:
            ConfigError: It does not, or there is none.
        """
        self.text(messages, tools, opened=True)
        try:
            texts = Texts(self._render, self.messages(messages), tools, opened=True)
            self._tools_check.check(texts)
            self._fields.check(texts, start + len(texts.messages) - len(messages))
        except DataError as error:
            raise ConfigError(str(error)) from None

    def is_vast(self, characters: int, tokens: int) -> bool:
        """As :meth:`.TextEncoder.is_vast`."""
        return self._encoder.is_vast(characters, tokens)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text that the template wrote."""
        return self._encoder.encode([text])[0]

    def prompts(self, examples: Sequence[Example], *, answers: bool = False) -> list[list[int] | RowError | None]:
        """Encode prompts as they are generated from. None stands for a prompt that is too long at first sight, an error
        for one that cannot be written. With ``answers``, conversations are kept for :meth:`answered`."""
        texts: list[str | RowError | None] = [
            *self._write([(e.prompt, e) for e in examples], lambda example: answers and bool(example.turns))
        ]
        most = self.config.max_prompt_tokens
        texts = [None if isinstance(text, str) and self._encoder.is_vast(len(text), most) else text for text in texts]
        encoded: list[list[int] | RowError | None] = [None if isinstance(text, str) else text for text in texts]
        keeps = answers and self._template is not None and bool(self._tokenizer.is_fast)
        for plain in (False, True):
            places = [at for at, e in enumerate(examples) if e.is_text == plain and isinstance(texts[at], str)]
            parts = [str(texts[at]) for at in places]
            is_kept = keeps and not plain
            ids = self._keep(examples, places, parts) if is_kept else self._encode_prompts(parts, plain=plain)
            for at, tokens in zip(places, ids, strict=True):
                encoded[at] = tokens
        return encoded

    def _keep(self, examples: Sequence[Example], places: Sequence[int], texts: list[str]) -> list[list[int]]:
        """Encode prompts, and keep for each example what the encoding of its conversation can go on from."""
        self._kept.clear()
        encoding = self._encoder.encode_with_offsets(texts) if texts else {"input_ids": [], "offset_mapping": []}
        for at, text, offsets in zip(places, texts, encoding["offset_mapping"], strict=True):
            if (example := examples[at]).turns:
                self._kept[id(example)] = text, offsets
        return encoding["input_ids"]

    def cut(self, example: Example, tokens: list[int] | None) -> tuple[str | Messages, list[int]] | None:
        """Cut the prompt's own text, or the last message's, from the front until it fits. None: nothing is left."""
        prompt, most = example.prompt, self.config.max_prompt_tokens
        text = prompt if isinstance(prompt, str) else message_text(prompt[-1])
        if tokens is None:
            text = text[-self.config.max_prompt_tokens * self._encoder.longest_token :]
        (ids,) = self._encoder.encode([text])
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
            run_in_time(lambda: [_try_row(e, partial(self._conversation, e, p, ids, end)) for e, p, ids in turns])
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
                answer = next(written)
                if isinstance(answer, list):
                    yield [*ids, *answer, *signs], [False] * len(ids) + [True] * (len(answer) + len(signs))
                else:
                    yield answer

    def _encode_answers(
        self, prompts: Sequence[tuple[Example, str | Messages, list[int]]]
    ) -> list[list[int] | RowError]:
        """Encode answers that are text. An answer is encoded with its prompt as one text, where this text begins with
        the prompt's ids: many tokenizers put a space before each text that they encode. It is encoded alone otherwise.
        """
        before = self._write([(prompt, example) for example, prompt, _ in prompts], lambda _: True)
        answers = [strip_end(example.answer or "", self.closings) for example, _, _ in prompts]
        texts = [f"{text}{answer}" for text, answer in zip(before, answers, strict=True)]
        joined = self._encode_prompts(texts, plain=False)
        alone = [tokens[: len(ids)] != ids for tokens, (_, _, ids) in zip(joined, prompts, strict=True)]
        pieces = iter(self._encoder.encode([answer for answer, apart in zip(answers, alone, strict=True) if apart]))
        encoded: list[list[int] | RowError] = []
        for tokens, (example, _, ids), apart, text in zip(joined, prompts, alone, texts, strict=True):
            answer = next(pieces) if apart else tokens[len(ids) :]
            check = partial(self._encoder.check_pieces, [*ids, *answer], tokens, text)
            error = _try_row(example, check) if apart else None
            if error is None and any(sign in (example.answer or "") for sign in self._signs):
                checked = _try_row(
                    example, partial(self._check_signs, [{"role": "assistant", "content": example.answer}])
                )
                error = None if isinstance(checked, list) else checked
            encoded.append(answer if error is None else error)
        return encoded

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
        blind = sum(all(token == self.unknown for token in ids) for ids in self._encoder.encode(texts))
        signs = sorted(set().union(*texts))
        strange = [sign for sign, ids in zip(signs, self._encoder.encode(signs), strict=True) if self.unknown in ids]
        spoken = (
            f"{write_share(rows, total, what, 'holds', 'hold')} characters that the tokenizer does not know, such as "
            f"{', '.join(map(repr, strange[:5])) or repr(texts[0][:20])}"
        )
        unknown = self._tokenizer.unk_token
        if 2 * rows > total and 2 * blind > len(texts):
            raise DataError(f"{spoken}: the model would see nothing but {unknown}; set model.tokenizer")
        emit(Note(f"{spoken}: the model sees {unknown} in their place"))

    def check_lost(self, what: str, texts: Sequence[str]) -> None:
        """Report characters of ``texts`` for which the tokenizer has no token at all. Tokenizers that encode any
        character, as those of bytes do, are not asked for each."""
        if all(self._encoder.encode(list(_RARE))):
            return
        end = self._tokenizer.unk_token_id  # GPT-2's is its end-of-sequence token
        signs = [sign for sign in sorted(set().union(*texts)) if not sign.isspace()]
        lost = {sign for sign, ids in zip(signs, self._encoder.encode(signs), strict=True) if not ids or end in ids}
        if rows := sum(not lost.isdisjoint(text) for text in texts):
            emit(
                Note(
                    f"{write_share(rows, len(texts), what, 'holds', 'hold')} characters for which the tokenizer "
                    f"has no token, such as {', '.join(map(repr, sorted(lost)[:5]))}: the model "
                    "does not see them; set model.tokenizer"
                )
            )

    # -- text ----------------------------------------------------------------------------------------------------------

    def _write(
        self, prompts: Sequence[tuple[str | Messages, Example]], is_checked: Callable[[Example], bool] = lambda _: False
    ) -> list[str | RowError]:
        """Write prompts as they are generated from. The second of each pair has the tools.

        Args:
            is_checked: Whether the messages of an example are checked elsewhere.
        """
        return run_in_time(lambda: [_try_row(e, partial(self._write_prompt, p, e, is_checked(e))) for p, e in prompts])

    def _write_prompt(self, prompt: str | Messages, example: Example, is_checked: bool) -> str:
        if example.is_text and isinstance(prompt, str):
            return prompt
        if self._template is not None:
            messages = self._check_signs(read_marks(self.messages(prompt))[0])
            texts = Texts(self._render, messages, self._tools(example), opened=True)
            self._check_variables(example, texts)
            self._tools_check.check(texts)
            if not is_checked:
                self._fields.check(texts)
            check_arguments(messages, texts.whole)
            return texts.whole
        if not isinstance(prompt, str):
            raise ConfigError(
                "the prompt is a conversation, and there is no chat template to write it with: set data.chat_template "
                "to a Jinja file, or take a tokenizer that has one"
            )
        return f"{self.config.system_prompt}\n\n{prompt}" if self.config.system_prompt else prompt

    def _tools(self, example: Example) -> list[Any] | None:
        """The tools of the row, which :func:`.list_tools` reads. Other columns of this name are not tools."""
        row_tools = example.row.get("tools")
        tools = list_tools(row_tools) if row_tools else None
        if row_tools and tools is None and not isinstance(example.prompt, str):
            raise DataError(f"the tools {str(row_tools)[:60]!r} are no list of JSON schemas; repair the row")
        return tools or None

    def mentions(self, word: str) -> bool:
        """Whether the text of the chat template, or of the one for tools, has a word."""
        texts = (self._template or "", self._tool_template or "")
        return any(re.search(rf"\b{re.escape(word)}\b", text) for text in texts)

    def _check_variables(self, example: Example, texts: Texts) -> None:
        """Check that the row has no column that the template would write if it got it. Raises DataError."""
        for name in self.variables:
            if not (value := example.row.get(name)) or name in example.fields:
                continue
            with suppress(ConfigError):
                extra = self._apply_template(
                    texts.messages, texts.tools, add_generation_prompt=True, tokenize=False, **{name: value}
                )
                if extra == texts.whole:
                    continue
            raise DataError(
                f"column {name!r} holds {str(value)[:40]!r}, and the chat template has a variable of this name, which "
                "Podium sets for all rows alone: put the text into the messages, or rename the column; "
                f"data.chat_template_kwargs.{name} is for all rows"
            )

    @cached_property
    def variables(self) -> list[str]:
        """The variables that the template reads and nobody sets, of which a row may have columns."""
        names = {name for template in (self._template, self._tool_template) for name in list_variables(template)}
        return sorted(names - {"messages", "tools"} - {*self._options} - {*self._tokenizer.special_tokens_map})

    def _render(self, messages: Messages, tools: list[Any] | None, *, opened: bool) -> str:
        return self._apply_template(messages, tools, add_generation_prompt=opened, tokenize=False)

    def _apply_template(self, messages: Messages, tools: list[Any] | None, **options: Any) -> Any:
        template = self._tool_template if tools else self._template
        write = partial(self._tokenizer.apply_chat_template, tools=tools, chat_template=template)

        def try_write(messages: Messages) -> str | None:
            with suppress(Exception):
                return str(write(cast(Any, messages), tokenize=False, **self._options))
            return None

        try:
            return write(cast(Any, messages), **options, **self._options)
        except Exception as error:  # templates raise what they like, and Jinja's own errors besides
            system = self.config.system_prompt
            raise ConfigError(
                f"the chat template cannot write {str(messages)[:120]}: {read_text(error) or type(error).__name__}; "
                "set data.chat_template to another, or to none for plain text"
                + ("; the template may not support system prompts" if system else "")
                + explain_parts(try_write, messages)
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
        messages = self._check_signs(messages)
        first = 0 if example.whole else len(before)
        texts = Texts(self._render, messages, tools)
        stripped = self._fields.check(texts)
        self._finder.turns[1] += sum(index >= first for index in stripped)
        marked = GENERATION.search((self._tool_template if tools else self._template) or "") is not None
        check_arguments(messages, texts.whole)
        spans = self._finder.find(texts, first, learned, marked=marked)
        kept = None if marked else self._kept.pop(id(example), None)
        tokens, mask = self._encoder.encode_spans(texts.whole[: spans[-1].stop], spans, ids, kept, marked=marked)
        is_ended = spans[-1].ended or (marked and bool(self.ends))
        return (tokens, mask) if is_ended else ([*tokens, end], [*mask, True])

    def _to_messages(self, messages: Sequence[Mapping[str, Any]]) -> Messages:
        """Messages that the template can write, with function calls in the form that it reads."""
        if "function_call" not in (self._template or ""):
            messages = [to_tool_calls(message) for message in messages]
        written = template_messages(messages)
        return written if self._writes_ids else order_results(written)

    @cached_property
    def _writes_ids(self) -> bool:
        return self.mentions("tool_call_id")

    def _find_marks(self, texts: Texts) -> list[tuple[int, int]]:
        """Return where the template marks the assistant's text, in characters."""
        try:
            written, marks = cast("Callable[..., Any]", render_jinja_template)(
                conversations=[texts.messages],
                tools=texts.tools,
                chat_template=self._tool_template if texts.tools else self._template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
                **self._options,
            )
        except Exception as error:  # as in _apply_template
            raise ConfigError(
                f"the chat template cannot mark {str(texts.messages)[:120]}: {read_text(error)}"
            ) from error
        return [(start, stop) for start, stop in marks[0]] if written[0] == texts.whole else []

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _encode_prompts(self, texts: list[str], *, plain: bool = False) -> list[list[int]]:
        """Encode texts. A template writes special tokens itself; ``plain`` text gets the tokenizer's first ones."""
        if self._template is not None and not plain:
            return self._encoder.encode(texts)
        eos = self._tokenizer.eos_token_id
        encoded = self._encoder.encode(texts, special=True)
        return [ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids for ids in encoded]


def _try_row(example: Example, work: Callable[[], T]) -> T | RowError:
    """Return what ``work`` returns for a row, or the error with which it refuses the row, which names the place."""
    try:
        with example.name_in_errors():
            return work()
    except Looping:
        raise
    except (ConfigError, DataError) as error:
        return error
