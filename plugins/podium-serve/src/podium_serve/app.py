"""The service over HTTP: the OpenAI API, and ids in and out as vLLM has them.

    POST /v1/chat/completions      conversations, with tools; streamed or whole
    POST /v1/completions           texts or ids
    POST /v1/responses             conversations, as the Responses API of OpenAI has them
    POST /v1/messages              conversations, as the Messages API of Anthropic has them
    POST /tokenize  /detokenize    texts to ids, and back
    POST /inference/v1/generate    ids in; ids, log-probabilities and versions out
    POST /inference/v1/score       ids in; their log-probabilities and the most probable tokens out
    GET  /v1/models  /health  /metrics

A session is named by the path, as in ``/sessions/NAME/v1/chat/completions``, so that a client is in it which is only
given another ``base_url``; by the header ``X-Session-ID``; or by ``metadata.session_id`` in the body.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from podium.errors import PodiumError
from podium.rollout.engines.stops import before_stop
from podium_agents.service.request_bodies import (
    WISHES,
    ChatRequest,
    Refusal,
    parse,
)
from podium_agents.service.session_recording import Sampled
from podium_serve.bodies import (
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    ScoreRequest,
    TokenizeRequest,
    write_masks,
)
from podium_serve.concurrency import in_turns
from podium_serve.dialects import Dialect, Usage, Writer, stream_events
from podium_serve.exchange import Streamed, as_json, read_body, session_of, while_there
from podium_serve.messages import Messages
from podium_serve.metrics import App, Metrics
from podium_serve.pieces import Delta, Progress
from podium_serve.routes import PATHS, find_dialect, make_routes
from podium_serve.streaming import count_reasoning, read_answer, stream_answers, stream_texts
from podium_serve.texts import (
    detokenize,
    encode,
    list_pieces,
    name_bytes,
    place_tokens,
    score_text,
    spell,
    tokenize,
)

if TYPE_CHECKING:
    from podium_agents.service.keys import Access
    from podium_agents.service.service import Answer, Asked, Service
    from podium_agents.service.token_source import Scored

__all__ = ["make_app"]

R = TypeVar("R", bound=BaseModel)
_HINTS: Final[Mapping[str, Any]] = {"verbosity": ()}  # which clients of other dialects send to any model


def make_app(service: Service, access: str | Access) -> App:
    """Return the application. Requests without the bearer token ``access``, or one that it knows, get the status 401,
    except for ``/health``.

    Raises:
        ConfigError: The token is empty.
    """
    api = _Api(service)
    handlers = {
        "/v1/chat/completions": api.chat,
        "/v1/completions": api.completions,
        "/inference/v1/generate": api.generate,
        "/inference/v1/score": api.score,
        "/v1/responses": api.converse,
        "/v1/messages": api.converse,
        "/v1/messages/count_tokens": api.count,
        "/tokenize": api.tokenize,
        "/detokenize": api.detokenize,
        "/v1/models": api.models,
        "/v1/models/{model:path}": api.models,
        "/metrics": api.metrics,
        "/health": api.health,
    }
    return api.metrics_of.measured(make_routes(handlers, access), PATHS)


class _Api:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.metrics_of = Metrics()

    async def chat(self, request: Request) -> Response:
        body = as_json(await read_body(request))
        asked_for = self._parse(ChatRequest, body)
        question = await self._ask(request, body, asked_for)
        head = _head("chatcmpl", "chat.completion", self.service)
        if asked_for.stream:
            return _events(self._chat_stream(asked_for, question, {**head, "object": "chat.completion.chunk"}))
        samples = await while_there(
            request, [self.service.draw(question, number) for number in range(len(question.seeds))]
        )
        answers = self.service.read(question, samples)
        choices = [
            {"index": index, "message": answer.message, **await self._ending(asked_for, question, answer)}
            for index, answer in enumerate(answers)
        ]
        response = {**head, "choices": choices, "usage": self._usage([question], samples)}
        if asked_for.return_token_ids:
            response["prompt_token_ids"] = list(question.prompt)
        return JSONResponse(response)

    def _parse(self, cls: type[R], body: Any, hints: Mapping[str, Any] | None = None) -> R:
        """Return the request in a body, which names the model that is served. Raises Refusal."""
        asked_for = parse(cls, body, WISHES if self.service.rules is not None else hints)
        self.service.check_model(str(getattr(asked_for, "model", "")))
        return asked_for

    async def _ask(self, request: Request, body: Any, asked_for: ChatRequest, dialect: Dialect | None = None) -> Asked:
        clips, hints = dialect is not None and dialect.clips, dialect is not None
        question = self.service.chat(asked_for, session_of(request, body), clips=clips, hints=hints)
        if asked_for.top_logprobs and question.constraint is not None:
            raise Refusal(
                400, "top_logprobs: a form or logit_bias leaves out some of these; leave one out", "top_logprobs"
            )
        await self.service.prepare(question)
        return question

    async def converse(self, request: Request) -> Response:
        """Answer a conversation in another dialect."""
        body, dialect = as_json(await read_body(request)), find_dialect(request)
        if dialect is None or not isinstance(body, Mapping):
            raise Refusal(400, "the body is not a JSON object")
        asked_for = self._parse(ChatRequest, dialect.chat(body), _HINTS)
        question = await self._ask(request, body, asked_for, dialect)
        writer = dialect.writer(body, self.service.model)
        if asked_for.stream:
            return stream_events(self._dialect_events(asked_for, question, writer), writer)
        (sample,) = await while_there(request, [self.service.draw(question)])
        (answer,) = self.service.read(question, [sample])
        events = [*writer.begin(len(question.prompt))]
        for piece in Progress(partial(read_answer, self.service, question) if asked_for.logprobs else None).end(answer):
            events += await self._write(asked_for, question, piece, writer)
        return JSONResponse(writer.whole)

    async def _dialect_events(
        self, asked_for: ChatRequest, question: Asked, writer: Writer
    ) -> AsyncGenerator[Mapping[str, Any]]:
        for event in writer.begin(len(question.prompt)):
            yield event
        async with aclosing(self._stream(asked_for, question)) as pieces:
            async for _, piece in pieces:
                for event in await self._write(asked_for, question, piece, writer):
                    yield event

    async def _write(
        self, asked_for: ChatRequest, question: Asked, piece: Delta | Answer, writer: Writer
    ) -> list[Mapping[str, Any]]:
        if isinstance(piece, Delta):
            return [*writer.add(piece, await self._logprobs(asked_for, question, piece))]
        counts = self._usage([question], [piece.sampled])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        reasoning = count_reasoning(self.service, question, piece)
        usage = Usage(counts["prompt_tokens"], cached, counts["completion_tokens"], reasoning)
        return [*writer.end(piece, usage)]

    async def count(self, request: Request) -> Response:
        """Answer how many tokens the prompt of a message has."""
        body = as_json(await read_body(request))
        asked_for = self._parse(ChatRequest, Messages().read({"max_tokens": 1, **body} if body else body))
        options = self.service.options_of(asked_for, hints=True)
        conversation = TokenizeRequest(messages=asked_for.messages, tools=asked_for.tools, chat_template_kwargs=options)
        return JSONResponse({"input_tokens": len(tokenize(self.service, conversation))})

    async def tokenize(self, request: Request) -> Response:
        asked_for = self._parse(TokenizeRequest, as_json(await read_body(request)))
        ids = tokenize(self.service, asked_for)
        pieces = list_pieces(self.service, ids) if asked_for.return_token_strs else None
        counts = {"count": len(ids), "max_model_len": self.service.context}
        return JSONResponse({**counts, "tokens": ids, "token_strs": pieces})

    async def detokenize(self, request: Request) -> Response:
        asked_for = self._parse(DetokenizeRequest, as_json(await read_body(request)))
        return JSONResponse({"prompt": detokenize(self.service, asked_for.tokens)})

    async def completions(self, request: Request) -> Response:
        body = as_json(await read_body(request))
        asked_for = self._parse(CompletionRequest, body)
        if self.service.rules is not None:
            raise Refusal(400, "/v1/completions is not recorded for training: use /v1/chat/completions in training")
        if asked_for.echo and asked_for.max_tokens == 0:
            return await self._echo(request, asked_for)
        caller = self.service.caller()
        questions = await in_turns(
            replace(
                self.service.ask(ids, asked_for, asked_for.max_tokens, stop=asked_for.stop_token_ids),
                special=not asked_for.skip_special_tokens,
                caller=caller,
            )
            for ids in self._prompts(asked_for.prompt)
        )
        await self.service.prepare(*questions)
        draws = [(question, number) for question in questions for number in range(len(question.seeds))]
        head = _head("cmpl", "text_completion", self.service)
        if asked_for.stream:
            return _events(self._text_stream(asked_for, questions, head))
        answers = await while_there(request, [self.service.draw(question, number) for question, number in draws])
        scored = await self._score_prompts(request, asked_for, [question.prompt for question in questions])
        choices = await in_turns(
            self._text_choice(asked_for, index, sampled, which.prompt, scored[index // asked_for.n])
            for index, ((which, _), sampled) in enumerate(zip(draws, answers, strict=True))
        )
        return JSONResponse({**head, "choices": choices, "usage": self._usage(questions, answers)})

    async def _echo(self, request: Request, asked_for: CompletionRequest) -> Response:
        """Answer with the prompts themselves and, where that is asked for, their log-probabilities."""
        prompts = await in_turns(self._prompts(asked_for.prompt))
        scored = await self._score_prompts(request, asked_for, prompts)
        nothing = Sampled((), (), (), "length")
        choices = await in_turns(
            self._text_choice(asked_for, index, nothing, prompts[index // asked_for.n], scored[index // asked_for.n])
            for index in range(len(prompts) * asked_for.n)
        )
        count = sum(map(len, prompts))
        self.metrics_of.tokens.update(prompt=count)
        usage = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
        return JSONResponse({**_head("cmpl", "text_completion", self.service), "choices": choices, "usage": usage})

    async def _score_prompts(
        self, request: Request, asked_for: CompletionRequest, prompts: Sequence[Sequence[int]]
    ) -> Sequence[Scored | None]:
        if not asked_for.echo or asked_for.logprobs is None:
            return [None] * len(prompts)
        return await while_there(request, [score_text(self.service, prompt) for prompt in prompts])

    async def generate(self, request: Request) -> Response:
        asked_for = parse(GenerateRequest, as_json(await read_body(request)))
        if asked_for.stream:
            raise Refusal(400, "stream: /inference/v1/generate does not stream; leave stream out", "stream")
        if self.service.rules is not None:
            raise Refusal(
                400, "/inference/v1/generate is not recorded for training: use /v1/chat/completions in training"
            )
        params = asked_for.sampling_params
        for name in asked_for.ended_sessions:
            self.service.source.end_session(name)
        question = self.service.ask(
            *(asked_for.token_ids, params, params.max_tokens), stop=params.stop_token_ids, session=asked_for.session
        )
        await self.service.prepare(question)
        answers = await while_there(
            request, [self.service.draw(question, number) for number in range(len(question.seeds))]
        )
        choices = [
            {
                "index": index,
                "token_ids": list(sampled.ids),
                "logprobs": {"content": [{"logprob": value} for value in sampled.logprobs]},
                "finish_reason": sampled.finish_reason,
                "versions": list(sampled.versions),
                **({} if sampled.kept is None else {"kept": [list(ids) for ids in sampled.kept]}),
                **({} if sampled.masks is None else {"masks": write_masks(sampled.masks)}),
            }
            for index, sampled in enumerate(answers)
        ]
        usage = self._usage([question], answers)
        return JSONResponse({"request_id": f"gen-{uuid.uuid4().hex}", "choices": choices, "usage": usage})

    async def score(self, request: Request) -> Response:
        asked_for = parse(ScoreRequest, as_json(await read_body(request)))
        if self.service.rules is not None:
            raise Refusal(400, "/inference/v1/score is not for sessions of training: use top_logprobs there")
        how: Any = asked_for.model_dump(include={"first", "top", "temperature"})
        (scored,) = await while_there(request, [score_text(self.service, asked_for.token_ids, **how)])
        return JSONResponse(asdict(scored))

    async def models(self, request: Request) -> Response:
        service = self.service
        card = {
            "id": service.model, "object": "model", "created": service.created_s, "owned_by": "podium",
            "max_model_len": service.context,
        }  # fmt: skip
        if (name := request.path_params.get("model")) is not None:
            service.check_model(name)
            return JSONResponse(card)
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": self.service.source.version})

    async def metrics(self, request: Request) -> Response:
        source = self.service.source
        gauges = {
            "requests_waiting": ("Completions of which no token is drawn yet.", source.waiting),
            "tokens_in_flight": ("Tokens that requests in flight may still hold, prompts included.", source.in_flight),
            "sessions": ("Sessions that are recorded.", len(self.service.sessions)),
            "sessions_waiting": ("Sessions whose next turn waits for memory.", source.admission.waiting),
            "unrecognized": ("Calls whose history is not what their session has recorded.", self.service.unrecognized),
            "weights_version": ("Version of the weights that the next token is drawn from.", source.version),
        }
        if (counts := source.prompt_tokens) is not None:
            gauges |= {
                "prompt_tokens_read": ("Tokens of the prompts that the engine began.", counts.read),
                "prompt_tokens_reused": ("Those whose keys and values the engine had already.", counts.reused),
                "prompt_tokens_evicted": ("Positions that the engine forgot for want of memory.", counts.evicted),
            }
        return PlainTextResponse(self.metrics_of.text(gauges), media_type="text/plain; version=0.0.4")

    # -- streams ---------------------------------------------------------------------------------------------------

    def _stream(self, asked_for: ChatRequest, asked: Asked) -> AsyncGenerator[tuple[int, Delta | Answer]]:
        # What top-p and top-k kept is known at the end, and a run records no answer whose alternatives it cannot tell.
        late = asked.top > 0 and (asked.params.filtered or self.service.rules is not None)
        return stream_answers(self.service, asked, tokens=bool(asked_for.logprobs), late=late)

    async def _chat_stream(
        self, asked_for: ChatRequest, asked: Asked, head: Mapping[str, Any]
    ) -> AsyncGenerator[Mapping[str, Any]]:
        begun: set[int] = set()
        sampled: list[Sampled] = []
        prompt = {"prompt_token_ids": list(asked.prompt)} if asked_for.return_token_ids else {}
        async with aclosing(self._stream(asked_for, asked)) as pieces:
            async for index, piece in pieces:
                delta: dict[str, Any] = {} if index in begun else {"role": "assistant", "content": ""}
                begun.add(index)
                chunk, prompt = {**head, **prompt}, {}
                if isinstance(piece, Delta):
                    delta |= {"content": piece.content} if piece.content else {}
                    delta |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
                    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
                    if piece.sampled is not None:
                        choice["logprobs"] = {"content": await self._logprobs(asked_for, asked, piece)}
                    yield {**chunk, "choices": [choice]}
                    continue
                if calls := piece.message.get("tool_calls"):
                    delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
                sampled.append(piece.sampled)
                ending = await self._ending(asked_for, asked, piece)
                yield {**chunk, "choices": [{"index": index, "delta": delta, **ending}]}
        usage = self._usage([asked], sampled)
        if asked_for.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage}

    async def _text_stream(
        self, asked_for: CompletionRequest, asked: Sequence[Asked], head: Mapping[str, Any]
    ) -> AsyncGenerator[Mapping[str, Any]]:
        """Chunks of the texts as they come. The last one of a completion has no text but whatever else is asked for."""
        answers: dict[int, Sampled] = {}  # by their numbers: they end in another order
        has_tokens = asked_for.logprobs is not None
        async with aclosing(stream_texts(self.service, asked, tokens=has_tokens)) as pieces:
            async for index, piece in pieces:
                if isinstance(piece, Delta):
                    choice: dict[str, Any] = {"index": index, "text": piece.content, "finish_reason": None}
                    choice["logprobs"] = None
                else:
                    answers[index] = piece.sampled
                    choice = {**self._text_choice(asked_for, index, piece.sampled), "text": ""}
                if has_tokens and piece.sampled is not None:
                    choice["logprobs"] = self._text_logprobs(asked_for, piece.sampled, start=piece.start)
                yield {**head, "choices": [choice]}
        usage = self._usage(asked, [answers[index] for index in sorted(answers)])
        if asked_for.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage}

    # -- answers ---------------------------------------------------------------------------------------------------

    async def _ending(self, asked_for: ChatRequest, asked: Asked, answer: Answer) -> dict[str, Any]:
        """What a choice has beside its message."""
        fields: dict[str, Any] = {"finish_reason": answer.finish_reason}
        if asked_for.logprobs:
            fields["logprobs"] = {"content": await self._logprobs(asked_for, asked, answer)}
        if asked_for.return_token_ids:
            fields |= {"token_ids": list(answer.sampled.ids), "versions": list(answer.sampled.versions)}
        return fields

    def _text_choice(
        self,
        asked_for: CompletionRequest,
        index: int,
        sampled: Sampled,
        prompt: Sequence[int] = (),
        scored: Scored | None = None,
    ) -> dict[str, Any]:
        special = not asked_for.skip_special_tokens
        stops = (*asked_for.stops, *self.service.stops)
        text = before_stop(self.service.decode(sampled.ids, special=special), stops)
        if asked_for.echo:
            text = self.service.decode(prompt, special=True) + text
        choice: dict[str, Any] = {
            "index": index, "text": text, "finish_reason": sampled.finish_reason, "logprobs": None,
        }  # fmt: skip
        if asked_for.logprobs is not None:
            choice["logprobs"] = self._text_logprobs(asked_for, sampled, prompt if asked_for.echo else (), scored)
        if asked_for.return_token_ids:
            choice |= {"token_ids": list(sampled.ids), "versions": list(sampled.versions)}
        return choice

    def _text_logprobs(
        self,
        asked_for: CompletionRequest,
        sampled: Sampled,
        prompt: Sequence[int] = (),
        scored: Scored | None = None,
        *,
        start: int = 0,
    ) -> dict[str, Any]:
        """The log-probabilities of the prompt and of what was drawn, from token ``start`` on; the most probable tokens
        of the prompt alone."""
        parts = [spell(self.service, id, begins=not at) for ids in (prompt, sampled.ids) for at, id in enumerate(ids)]
        silent = {} if not asked_for.skip_special_tokens else {*self.service.tokenizer.all_special_ids}
        names = [name_bytes(part) for part in parts[start:]]
        logprobs: list[float | None] = [None] * len(prompt)
        top: list[dict[str, float] | None] = [None] * len(names)
        if scored is not None:
            logprobs[1:] = scored.logprobs
            for index, (best, logprob) in enumerate(zip(scored.best, scored.best_logprobs, strict=True), start=1):
                top[index] = {
                    names[index]: scored.logprobs[index - 1],
                    name_bytes(spell(self.service, best)): logprob,
                }
        shown = [
            b"" if id in silent else part for id, part in zip((*[None] * len(prompt), *sampled.ids), parts, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [*logprobs, *sampled.logprobs[start:]],
            "top_logprobs": top,
            "text_offset": place_tokens(shown)[start:],
        }

    def _prompts(self, prompt: str | Sequence[Any]) -> Iterator[list[int]]:
        if isinstance(prompt, str):
            yield encode(self.service, prompt)
        elif all(isinstance(entry, int) for entry in prompt):
            yield list(prompt)
        else:
            yield from (encode(self.service, entry) if isinstance(entry, str) else list(entry) for entry in prompt)

    async def _logprobs(self, asked_for: ChatRequest, asked: Asked, piece: Delta | Answer) -> list[dict[str, Any]]:
        """The log-probabilities of the tokens of a piece; [] where they are not asked for."""
        if not asked_for.logprobs or piece.sampled is None:
            return []
        sampled, start = piece.sampled, piece.start
        top: Sequence[Sequence[tuple[int, float]]] = [()] * (len(sampled.ids) - start)
        if asked_for.top_logprobs and top:
            top = (
                await self.service.most_probable(asked, sampled, start) if sampled.top is None else sampled.top[start:]
            )

        def entry(token: int, logprob: float, at: int) -> dict[str, Any]:
            part = spell(self.service, token, begins=not at)
            return {"token": part.decode(errors="replace"), "logprob": logprob, "bytes": list(part)}

        sampled_tokens = zip(sampled.ids[start:], sampled.logprobs[start:], top, strict=True)
        return [
            {**entry(token, logprob, at), "top_logprobs": [entry(*other, at) for other in others]}
            for at, (token, logprob, others) in enumerate(sampled_tokens, start)
        ]

    def _usage(self, asked: Sequence[Asked], drawn: Sequence[Sampled]) -> dict[str, Any]:
        """The tokens of questions and of all their completions, in their order. A question's prompt counts once, and so
        do those of its tokens that were in the cache: its completions share the others."""
        prompt, completion = sum(len(question.prompt) for question in asked), sum(len(answer.ids) for answer in drawn)
        self.metrics_of.tokens.update(prompt=prompt, completion=completion)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        rest = iter(drawn)
        reused = [[answer.reused for answer in islice(rest, len(question.seeds))] for question in asked]
        return {
            **counts,
            "prompt_tokens_details": {"cached_tokens": sum(min(numbers, default=0) for numbers in reused)},
        }


def _events(chunks: AsyncGenerator[Mapping[str, Any]]) -> Response:
    async def lines() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk)}\n\n"
        except (Refusal, PodiumError) as error:  # too late for a status
            refusal = error if isinstance(error, Refusal) else Refusal(500, str(error))
            yield f"data: {json.dumps(refusal.body)}\n\n"
        yield "data: [DONE]\n\n"

    return Streamed(lines(), chunks.aclose, media_type="text/event-stream")


def _head(prefix: str, kind: str, service: Service) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": service.model,
    }  # fmt: skip
