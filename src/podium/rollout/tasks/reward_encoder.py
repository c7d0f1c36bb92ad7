"""Conversations as a reward model reads them, in its training and where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from podium.errors import ConfigError, DataError
from podium.exceptions import describe_error
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.fields import OMITTED, check_arguments
from podium.rollout.tasks.forms import Example, list_tools
from podium.rollout.tasks.messages import Messages, strip_end
from podium.rollout.tasks.spans import read_marks
from podium.rollout.tasks.templates import Looping, Texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE: Final = {"role": "assistant", "content": "podium"}


class RewardEncoder(ChatEncoder):
    """Writes conversations as :class:`.ChatEncoder` writes them for a policy, with messages in the form that the
    template reads, with tools and with the system prompt, and encodes them for a reward model.

    Args:
        tokenizer: The tokenizer of the reward model.
        config: The chat template and the system prompt.
        who: The reward model, for errors.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, who: str) -> None:
        super().__init__(tokenizer, config)
        self._who = who
        self._checked: set[tuple[str, ...]] = set()

    def encode_answer(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        answer: Sequence[Mapping[str, Any]],
        text: str,
        tools: list[Any] | None,
    ) -> list[int]:
        """Return the ids of a prompt with its answer.

        Args:
            prompt: Text, or messages.
            answer: The answer as messages.
            text: Prompt and answer as one text, which is encoded where the tokenizer has no chat template.
            tools: The schemas of tools.

        Raises:
            ConfigError: The chat template seems to loop.
            DataError: The chat template cannot write the conversation.
        """
        if self.template is None:
            return self._encoder.encode([text], special=True)[0]
        return self.encode(self._write_scored(Texts(self._render, self._join(prompt, answer), tools)))

    def check_prompt(self, example: Example, *, in_session: bool = False) -> None:
        """Check that the template writes what a prompt says: its messages, their calls of tools, and its tools.

        Of prompts without tools whose messages have a role and a content alone, the first of each sequence of roles is
        written.

        Args:
            example: The prompt, with its row.
            in_session: Whether the prompt is a task of an environment, whose sessions read the other columns.

        Raises:
            ConfigError: The chat template seems to loop.
            DataError: It does not write a part, or the row has a column that it would write if it got the column.
        """
        if self.template is None:
            return
        turns = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
        columns = () if in_session else [name for name in self.variables if example.row.get(name)]
        tools = list_scored_tools(example)
        if not tools and not columns and all(map(_is_plain, turns)):
            roles = tuple(str(message["role"]) for message in turns)
            if roles in self._checked:
                return
            self._checked.add(roles)
        with example.name_in_errors():
            messages = self._join(turns, [_PROBE])
            texts = Texts(self._render, messages, tools)
            self._write_scored(texts)
            try:
                if columns:
                    self._check_variables(example, Texts(self._render, messages[:-1], tools, opened=True))
                self._tools_check.check(texts)
                self._fields.check(texts)
                check_arguments(messages, texts.whole)
            except (ConfigError, DataError) as error:
                raise DataError(self._explain(str(error))) from error

    def _join(self, prompt: str | Sequence[Mapping[str, Any]], answer: Sequence[Mapping[str, Any]]) -> Messages:
        """Prompt and answer as messages of which the assistant's are without a sign of their end."""
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages, _ = read_marks(self.messages([*turns, *answer]))
        return [
            {**message, "content": strip_end(message["content"], self.closings)}
            if message["role"] == "assistant"
            else message
            for message in messages
        ]

    def _write_scored(self, texts: Texts) -> str:
        try:
            return texts.whole
        except Looping:
            raise
        except ConfigError as error:
            roles = ", ".join(str(message.get("role")) for message in texts.messages)
            raise DataError(
                f"the chat template of {self._who} cannot write a conversation of {roles}: "
                f"{describe_error(error.__cause__ or error)}; change the prompts, or data.system_prompt"
            ) from error.__cause__

    def _explain(self, reason: str) -> str:
        """An error about the chat template of a policy as one about that of the reward model."""
        reason = reason.partition(": set data.chat_template")[0].partition("; data.chat_template_kwargs")[0]
        return (
            f"{reason}. The chat template is that of {self._who}, which would score answers without this: write a "
            "template that has it into the file chat_template.jinja of its directory, or take it out of the row. With "
            f"the comment {{#- {OMITTED} -#}} in the template, tools are left out on purpose"
        )


def list_scored_tools(example: Example) -> list[Any] | None:
    """Return the tools of a row that a reward model reads; None where there are none."""
    tools = example.row.get("tools")
    return (list_tools(tools) or None) if tools else None


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message has a role and a content alone."""
    return all(name in ("role", "content") or entry is None for name, entry in message.items())
