"""Texts and ids: what the tokenizer of a service makes of them, and what its model says of them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError
from podium_agents.service.request_bodies import Refusal, texts_of
from podium_agents.service.service import UNWRITTEN

if TYPE_CHECKING:
    from podium_agents.service.service import Service
    from podium_agents.service.token_source import Scored
    from podium_serve.bodies import TokenizeRequest

__all__ = [
    "detokenize",
    "encode",
    "list_pieces",
    "name_bytes",
    "place_tokens",
    "score_text",
    "spell",
    "tokenize",
]


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


def spell(service: Service, token: int, *, begins: bool = False) -> bytes:
    """The bytes that a token stands for in an answer, at whose beginning many tokenizers leave out a space. A special
    token is spelled by its name."""
    spelled = service.spelling.bytes_of(token) or service.decode([token], special=True).encode()
    if begins and spelled[:1] == b" " and spelled == b" " + (text := service.decode([token]).encode()):
        return text
    return spelled


def name_bytes(spelled: bytes) -> str:
    """The text of a token; a piece of a character is named as OpenAI's completions name it."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def place_tokens(spelled: Iterable[bytes]) -> list[int]:
    """The number of characters of a text that are whole before each token."""
    decoder, count, places = getincrementaldecoder("utf-8")(errors="replace"), 0, list[int]()
    for part in spelled:
        places.append(count)
        count += len(decoder.decode(part))
    return places


def list_pieces(service: Service, ids: Sequence[int]) -> list[str]:
    """The tokens as the tokenizer has them."""
    return [str(piece) for piece in service.tokenizer.convert_ids_to_tokens(list(ids))]


async def score_text(service: Service, ids: Sequence[int], **how: Any) -> Scored:
    """Return the log-probabilities of a text's tokens. Raises Refusal if the service cannot compute them."""
    try:
        return await service.source.score(ids, **how)
    except ConfigError as error:
        raise Refusal(400, str(error)) from None
