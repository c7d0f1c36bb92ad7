"""A request that is sent again under its Idempotency-Key: one answer, and one row."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from podium.errors import GenerationError
from podium_agents.service.service import Service
from tests.unit.rollout.service.scripted import TOKEN, USER, scripted

pytest.importorskip("starlette")

from podium_serve.app import make_app
from podium_serve.repeats import Repeats, _replay
from podium_serve.server import Server

PATH = "/sessions/s/v1/chat/completions"


def client_of(server: Server) -> httpx2.AsyncClient:
    head = {"Authorization": f"Bearer {TOKEN}"}
    return httpx2.AsyncClient(base_url=server.url, headers=head, timeout=60, trust_env=False, verify=False)


async def ask(client: httpx2.AsyncClient, key: str, text: str = "hello", path: str = PATH, **more: Any) -> Any:
    body = {"messages": [{**USER, "content": text}], **more}
    return await client.post(path, json=body, headers={"Idempotency-Key": key} if key else {})


def rows_of(service: Service, name: str = "s") -> list[int]:
    """The numbers of the calls of each row of a session."""
    session = service.sessions.get(name)
    return [len(row.turns) for row in session.rows] if session is not None else []


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_request_gets_the_first_answer_and_is_one_row(stream: bool) -> None:
    service, source, _ = scripted("A.<|im_end|>", "B.<|im_end|>", "C.<|im_end|>")

    async def talk(server: Server) -> list[Any]:
        async with client_of(server) as client:
            keys = ["1", "1", "1", "2", ""]
            return [await ask(client, key, stream=stream) for key in keys]

    with Server(make_app(service, TOKEN)) as server:
        answers = asyncio.run(talk(server))
    texts = [answer.text for answer in answers]
    assert texts[0] == texts[1] == texts[2] and len({*texts}) == 3
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true", "true", None, None]
    assert len(source.prompts) == 3
    assert rows_of(service) == [1, 1, 1]


def test_a_request_that_is_repeated_while_the_first_is_under_way_joins_it() -> None:
    service, source, _ = scripted("A long answer.<|im_end|>", pause_s=0.01)

    async def talk(server: Server) -> list[Any]:
        async with client_of(server) as client:
            stream = [ask(client, "1", stream=True) for _ in range(3)]
            return await asyncio.gather(*stream)

    with Server(make_app(service, TOKEN)) as server:
        answers = asyncio.run(talk(server))
    assert len({answer.text for answer in answers}) == 1 and answers[0].text.endswith("data: [DONE]\n\n")
    assert (len(source.prompts), rows_of(service)) == (1, [1])


def test_a_client_that_gives_up_and_asks_again_has_one_row() -> None:
    """The reply is lost: the client's time is over, and it asks again on another connection."""
    service, source, _ = scripted(None, "A.<|im_end|>")

    async def talk(server: Server) -> Any:
        async with client_of(server) as client, client_of(server) as other:
            with pytest.raises(httpx2.TimeoutException):
                await client.post(
                    PATH,
                    json={"messages": [USER]},
                    headers={"Idempotency-Key": "1"},
                    timeout=httpx2.Timeout(60, read=0.3),
                )
            while not source.cancelled:  # noqa: ASYNC110 - another thread's loop counts
                await asyncio.sleep(0.01)
            return await ask(other, "1")

    with Server(make_app(service, TOKEN)) as server:
        answer = asyncio.run(talk(server))
    assert answer.json()["choices"][0]["message"]["content"] == "A."
    assert rows_of(service) == [1]


def test_the_first_client_may_leave_while_the_second_waits() -> None:
    service, source, _ = scripted(None, "A.<|im_end|>")
    go = asyncio.Event()
    stream = source.stream

    async def gated(*arguments: Any, **how: Any) -> Any:
        source.answers[0] = "A.<|im_end|>"
        while not go.is_set():  # noqa: ASYNC110 - another thread's loop sets it
            await asyncio.sleep(0.01)
        async for event in stream(*arguments, **how):
            yield event

    source.stream = gated  # type: ignore[method-assign]

    async def talk(server: Server) -> Any:
        async with client_of(server) as client, client_of(server) as other:
            first = asyncio.create_task(ask(client, "1"))
            second = asyncio.create_task(ask(other, "1"))
            while len(server.listener.visitors) < 2:  # noqa: ASYNC110 - another thread's loop accepts
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            first.cancel()
            await asyncio.sleep(0.2)
            go.set()
            return await second

    with Server(make_app(service, TOKEN)) as server:
        answer = asyncio.run(talk(server))
    assert answer.status_code == 200
    assert rows_of(service) == [1]


def test_a_key_is_not_taken_for_another_request_and_a_failure_is_not_kept() -> None:
    service, _, _ = scripted("A.<|im_end|>", GenerationError("lost"), "B.<|im_end|>", "C.<|im_end|>")

    async def talk(server: Server) -> list[Any]:
        async with client_of(server) as client:
            other = PATH.replace("/s/", "/t/")
            asked = [("1", "hello", PATH), ("1", "good bye", PATH), ("2", "x", PATH), ("2", "x", PATH)]
            answers = [await ask(client, *what) for what in [*asked, ("1", "hello", other)]]
            return [*answers, await ask(client, "k" * 257)]

    with Server(make_app(service, TOKEN)) as server:
        answers = asyncio.run(talk(server))
    assert [answer.status_code for answer in answers] == [200, 422, 500, 200, 200, 400]
    assert json.loads(answers[1].text)["error"]["code"] == "idempotency_key_reused"
    assert answers[4].json()["choices"][0]["message"]["content"] == "C."


def test_the_oldest_answers_make_room_for_new_ones() -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    async def talk() -> tuple[int, list[str]]:
        repeats, calls = Repeats(most_bytes=2500), list[str]()

        async def handler(request: Request) -> Response:
            calls.append(request.headers["idempotency-key"])
            return Response("x" * 1000)

        for key in ["0", "1", "2", "2", "1", "0"]:
            head = [(b"idempotency-key", key.encode())]
            scope = {"type": "http", "method": "POST", "path": "/x", "headers": head, "query_string": b""}
            response = await repeats.answer(Request(scope, _replay(b"{}")), handler)
            await response(scope, _replay(b""), lambda message: asyncio.sleep(0))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        return repeats._nbytes, calls

    nbytes, calls = asyncio.run(talk())
    assert nbytes <= 2500
    assert calls == ["0", "1", "2", "0"]
