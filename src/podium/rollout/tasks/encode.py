"""Encode examples as token ids: system prompt, chat template, and prompts that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.examples import Example, Messages
from podium.telemetry import Note, emit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EncodedPrompts", "encode_pairs", "encode_prompts"]

_CUTS: Final = 5  # attempts to cut a prompt: a shorter text seldom has exactly as many tokens fewer as were cut


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts as token ids.

    Attributes:
        token_ids: One list of 1 to ``max_prompt_tokens`` ids for each kept prompt.
        kept: The index of each kept prompt's example.
        dropped: Number of examples that were left out for their length.
        cut: Number of examples whose text was shortened.
    """

    token_ids: list[list[int]]
    kept: list[int]
    dropped: int
    cut: int


def encode_prompts(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> EncodedPrompts:
    """Write each prompt as ``config`` says and encode it.

    With a chat template a text becomes a user's message, a conversation is taken as it is, the system prompt goes
    before it, and the model's turn is opened. Without a template, system prompt and prompt are plain text with an empty
    line between them, after the tokenizer's beginning-of-sequence token if the tokenizer uses one.

    A prompt of more than ``config.max_prompt_tokens`` is dropped, or its own text is cut from the front. The system
    prompt and the template stay whole.

    Raises:
        ConfigError: The template cannot be read or used, or a prompt is a conversation and there is no template.
        DataError: A prompt is empty, or every prompt is too long.
    """
    writer = _Writer(tokenizer, config)
    ids = writer.encode([writer.write(example.prompt) for example in examples])
    token_ids: list[list[int]] = []
    kept: list[int] = []
    dropped = cut = 0
    for index, (example, tokens) in enumerate(zip(examples, ids, strict=True)):
        if not tokens:
            raise DataError(f"example {index}: the prompt {str(example.prompt)[:60]!r} has no tokens")
        if len(tokens) > config.max_prompt_tokens:
            shorter = writer.cut(example.prompt, tokens) if config.overlong == "cut" else None
            if shorter is None:
                dropped += 1
                continue
            cut += 1
            tokens = shorter
        token_ids.append(tokens)
        kept.append(index)
    if examples and not kept:
        shortest = min(map(len, ids))
        raise DataError(
            f"each of the {len(examples)} prompts is longer than data.max_prompt_tokens = {config.max_prompt_tokens} "
            f"(the shortest has {shortest}); raise it"
            + ("" if config.overlong == "cut" else ", or set data.overlong to cut")
        )
    return EncodedPrompts(token_ids, kept, dropped, cut)


def encode_pairs(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[tuple[list[int], list[bool]]]:
    """Encode prompts with their answers for supervised fine-tuning: ``(token_ids, loss_mask)`` of equal length.

    The prompt is encoded exactly as for generation. The answer's tokens and the end-of-sequence token follow, and the
    mask is True on these. Prompts that are too long are dropped or cut as in :func:`encode_prompts`, and a note says
    how many.

    Raises:
        ConfigError: As :func:`encode_prompts`, or the tokenizer has no end-of-sequence token.
        DataError: As :func:`encode_prompts`, or an example has no answer.
    """
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ConfigError(
            "the tokenizer has no end-of-sequence token, so a model could not learn to stop: set eos_token"
        )
    for index, example in enumerate(examples):
        if example.answer is None:
            raise DataError(
                f"example {index} has no answer to learn, prompt {str(example.prompt)[:60]!r}; set data.answer_column, "
                "or take the row out"
            )
    prompts = encode_prompts(examples, tokenizer, config)
    if prompts.dropped or prompts.cut:
        emit(Note(f"prompts too long: {prompts.dropped} dropped, {prompts.cut} cut, of {len(examples)}"))
    answers = _encode(tokenizer, [examples[index].answer or "" for index in prompts.kept], special=False)
    return [
        (prompt + answer + [eos], [False] * len(prompt) + [True] * (len(answer) + 1))
        for prompt, answer in zip(prompts.token_ids, answers, strict=True)
    ]


class _Writer:
    """Writes prompts as text and encodes them, for one tokenizer and one configuration."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._template = _template(tokenizer, config)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Encode texts. A template writes special tokens itself; plain text gets the tokenizer's first ones."""
        if self._template is not None:
            return _encode(self._tokenizer, texts, special=False)
        eos = self._tokenizer.eos_token_id
        encoded = _encode(self._tokenizer, texts, special=True)
        return [ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids for ids in encoded]

    def write(self, prompt: str | Messages) -> str:
        system = self._config.system_prompt
        if self._template is None:
            if not isinstance(prompt, str):
                raise ConfigError(
                    "the prompts are conversations, and there is no chat template to write them with: set "
                    "data.chat_template to a Jinja file, or take a tokenizer that has one"
                )
            return f"{system}\n\n{prompt}" if system else prompt
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        try:
            written: Any = self._tokenizer.apply_chat_template(
                cast(Any, messages), chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates raise what they like, and Jinja's own errors besides
            raise ConfigError(
                f"the chat template cannot write {str(messages)[:120]}: {error}; set data.chat_template to another, or "
                "to none for plain text" + ("; it may not know system prompts" if system else "")
            ) from error
        return written

    def cut(self, prompt: str | Messages, tokens: list[int]) -> list[int] | None:
        """Cut the prompt's own text, or the last message's, from the front until it fits. None: nothing is left."""
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        (ids,) = _encode(self._tokenizer, [text], special=False)
        excess = len(tokens) - self._config.max_prompt_tokens
        for _ in range(_CUTS):
            ids = ids[excess:]
            if not ids:
                return None
            shorter: Any = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            whole = shorter if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": shorter}]
            (tokens,) = self.encode([self.write(whole)])
            excess = len(tokens) - self._config.max_prompt_tokens
            if excess <= 0:
                return tokens
        return None


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[list[int]]:
    encoded: Any = tokenizer(texts, add_special_tokens=special, return_attention_mask=False) if texts else {}
    return encoded.get("input_ids", [])


def _template(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str | None:
    """Return the Jinja text of the chat template, or None for plain text."""
    if config.chat_template == "none":
        return None
    if config.chat_template == "auto":
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    path = Path(config.chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template = {config.chat_template!r} cannot be read: {error}; expected auto, none or a file"
        ) from None
