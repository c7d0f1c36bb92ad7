"""A service whose model says what a test has written down."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from podium.models import char_tokenizer
from podium.rollout.engines.requests import Tokens
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.service.admission import Admission
from podium_agents.service.chat_format import ChatFormat
from podium_agents.service.request_bodies import ChatRequest
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Sampled
from podium_agents.service.token_source import Scored

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eot|>")
CHATML = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKEN = "secret"
USER = {"role": "user", "content": "hello"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FLY = {"type": "function", "function": {"name": "fly", "parameters": {"type": "object"}}}


class Scripted:
    """A source that gives one answer for each call: a text, ids, an error that it raises, or None to wait for ever.

    Attributes:
        prompts: The ids that the model has read, by call.
        cancelled: How many calls were ended before they had an answer.
    """

    positions: int | None = None
    in_flight = waiting = version = 0
    prompt_tokens = None

    def __init__(self, tokenizer: Any, *answers: str | Sequence[int] | Exception | None, pause_s: float = 0.0) -> None:
        self._tokenizer, self._pause_s = tokenizer, pause_s
        self.answers = list(answers)
        self.prompts: list[list[int]] = []
        self.cancelled = 0
        self.admission = Admission()

    def end_session(self, name: str) -> None:
        self.admission.end(name)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        session: str = "",
        tokens: bool = True,
        caller: Any = None,
        constraint: Any = None,
        exact: bool = True,
    ) -> AsyncGenerator[Tokens | Sampled]:
        """Give the next answer, token by token where ``tokens`` is True."""
        self.prompts.append(list(prompt))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            await asyncio.sleep(0)
            raise answer
        if answer is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        ids = (
            self._tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else list(answer or ())
        )
        for token in ids[:-1] if tokens else ():
            yield Tokens("", [token], [-1.0], 0)
            await asyncio.sleep(self._pause_s)
        yield Sampled(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    async def score(self, ids: Sequence[int], **how: Any) -> Scored:
        """Fail: what a test has written down has no probabilities."""
        raise AssertionError("no prompt is scored here")


def scripted(
    *answers: str | Sequence[int] | Exception | None,
    template: str = CHATML,
    pause_s: float = 0.0,
    tokenizer: Any = None,
    **data: Any,
) -> tuple[Service, Scripted, Any]:
    """Return a service, its source, and its tokenizer. ``data`` are settings of DataConfig."""
    if tokenizer is None:
        tokenizer = char_tokenizer(ALPHABET, chat_template=template)
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})  # type: ignore[arg-type]
    source = Scripted(tokenizer, *answers, pause_s=pause_s)
    end: Any = tokenizer.convert_tokens_to_ids("<|im_end|>")
    form = ChatFormat(ChatEncoder(tokenizer, DataConfig(**data)), tokenizer)
    service = Service(
        source, form, tokenizer, model="tiny", context=1 << 16, stop_token_ids=[end], most_tokens=1 << 40
    )  # fmt: skip
    return service, source, tokenizer


async def say(service: Service, messages: Sequence[Any], session: str = "s", **request: Any) -> dict[str, Any]:
    """Let the service answer a conversation in a session. Returns the assistant's message."""
    answer = await service.answer(service.chat(ChatRequest(messages=[*messages], **request), session))
    return dict(answer.message)


def posted(url: str, body: Any, token: str = TOKEN) -> tuple[int, str]:
    """Post a request as JSON. Returns the status and the body of the answer."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
