"""Texts and ids: what the tokenizer of a service makes of them, and what its model says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError
from podium.rollout.service.service import UNWRITTEN
from podium.rollout.service.wire import Refusal, texts_of

if TYPE_CHECKING:
    from podium.rollout.service.service import Service
    from podium.rollout.service.token_source import Scored
    from podium_serve.bodies import TokenizeRequest

__all__ = ["detokenize", "encode", "list_pieces", "score_text", "tokenize"]


def encode(service: Service, text: str) -> list[int]:
    """The ids of a plain text, with the tokenizer's first ones. Raises Refusal for a vast text."""
    service.check_length([text])
    ids: list[int] = service.tokenizer(text)["input_ids"]
    eos = service.tokenizer.eos_token_id
    return ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids


def tokenize(service: Service, request: TokenizeRequest) -> list[int]:
    """The ids of a text, or of a conversation. Raises Refusal if the template cannot write it."""
    if request.prompt is not None:
        return encode(service, request.prompt)
    try:
        form = service.form.with_options(request.chat_template_kwargs)
        messages, tools = request.messages or [], request.tools or []
        service.check_length(texts_of([messages, tools, request.chat_template_kwargs]), "", UNWRITTEN)
        form.check((), messages, tools)
        return form.prompt(messages, tools, opened=request.add_generation_prompt)
    except ConfigError as error:
        raise Refusal(400, str(error), "messages") from None


def detokenize(service: Service, ids: Sequence[int]) -> str:
    """The text of ids. Raises Refusal for one that the tokenizer does not have."""
    if (largest := max(ids, default=0)) >= (count := len(service.tokenizer)):
        raise Refusal(400, f"tokens: {largest} is no id of the tokenizer, which has {count}", "tokens")
    return service.decode(ids, special=True)


def list_pieces(service: Service, ids: Sequence[int]) -> list[str]:
    """The tokens as the tokenizer has them."""
    return [str(piece) for piece in service.tokenizer.convert_ids_to_tokens(list(ids))]


async def score_text(service: Service, ids: Sequence[int], **how: Any) -> Scored:
    """Return the log-probabilities of a text's tokens. Raises Refusal if the service cannot compute them."""
    try:
        return await service.source.score(ids, **how)
    except ConfigError as error:
        raise Refusal(400, str(error)) from None
