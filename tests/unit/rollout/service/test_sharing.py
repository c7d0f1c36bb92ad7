"""One client's thousands of sessions and prompts: what is remembered has a limit, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from podium.rollout.engines.requests import Request, RequestQueue
from podium.rollout.sampling import SamplingParams
from podium_agents.service.concurrency import Caller
from podium_agents.service.request_bodies import Refusal
from podium_agents.service.service import Service
from podium_agents.service.session_store import SessionStore
from podium_serve.concurrency import in_turns
from tests.unit.rollout.service.engine import engine_service
from tests.unit.rollout.service.scripted import TOKEN, USER, posted, say, scripted
from tests.waits import wait_until

pytest.importorskip("uvicorn")

LONG = {"role": "user", "content": "a" * 2000}


def limited(service: Service, most_bytes: int) -> Service:
    service.sessions = SessionStore(most_bytes)
    return service


@pytest.mark.exhaustive
def test_thousands_of_sessions_take_no_more_memory_than_the_limit_says() -> None:
    most, count = 8 << 20, 1500
    service, source, _ = scripted(*["A.<|im_end|>"] * count)
    limited(service, most)

    async def talk() -> None:
        for number in range(count):
            await say(service, [{**LONG}], f"session {number}")
            source.prompts.clear()

    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    asyncio.run(talk())
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 5 < len(service.sessions) < count // 4
    assert after - before < 1.5 * most
    assert service.sessions.get(f"session {count - 1}") is not None
    assert service.sessions.get("session 0") is None


def test_one_that_never_speaks_counts_too() -> None:
    store = SessionStore(1 << 20)
    for number in range(5000):
        store.open(str(number))
    assert 500 < len(store) <= 1024


def test_a_forgotten_session_is_told_so_and_a_new_conversation_under_its_name_is_none() -> None:
    service, _, _ = scripted(*["A.<|im_end|>"] * 40)
    limited(service, 1 << 20)

    async def talk() -> None:
        answer = await say(service, [LONG], "old")
        for number in range(20):
            await say(service, [LONG], str(number))
        with pytest.raises(Refusal, match=r"'old' was forgotten.*under another session name") as refused:
            await say(service, [LONG, answer, USER], "old")
        assert (refused.value.status, refused.value.code) == (410, "session_forgotten")
        await say(service, [LONG, answer, USER], "another name")
        await say(service, [USER], "old")
        await say(service, [USER, answer, USER], "old")

    asyncio.run(talk())


def test_a_session_with_a_request_in_flight_is_not_forgotten() -> None:
    service, source, _ = scripted("A.<|im_end|>", None, *["A.<|im_end|>"] * 20)
    limited(service, 1 << 20)

    async def talk() -> None:
        answer = await say(service, [LONG], "waits")
        waiting = asyncio.create_task(say(service, [LONG, answer, USER], "waits"))
        await asyncio.to_thread(wait_until, lambda: len(source.prompts) == 2)
        for number in range(20):
            await say(service, [LONG], str(number))
        assert service.sessions.get("waits") is not None
        assert service.sessions.get("0") is None
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(talk())


@pytest.mark.parametrize("where", ["path", "header", "metadata"])
def test_the_name_of_a_session_has_a_length(where: str) -> None:
    from podium_serve.app import make_app
    from podium_serve.load_balancer import make_load_balancer
    from podium_serve.server import Server

    service, _, _ = scripted()
    name = "n" * 257
    with Server(make_app(service, TOKEN)) as server, Server(make_load_balancer([server.url], TOKEN)) as balancer:
        for url in (server.url, balancer.url):
            prefix = f"/sessions/{name}" if where == "path" else ""
            body = {"messages": [USER], **({"metadata": {"session_id": name}} if where == "metadata" else {})}
            headers = {"Authorization": f"Bearer {TOKEN}", **({"X-Session-ID": name} if where == "header" else {})}
            asked = urllib.request.Request(f"{url}{prefix}/v1/chat/completions", json.dumps(body).encode(), headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=60)
            assert refused.value.code == 400
            assert b"257 characters; 256 are the limit" in refused.value.read()
            refused.value.close()
    assert len(service.sessions) == 0


def requests(queue: RequestQueue, who: str, count: int, caller: Caller) -> list[Request]:
    made = list[Request]()
    for number in range(count):
        turn = queue.next_turn()
        caller.priority = turn if caller.priority is None else min(turn, caller.priority - 1)
        made.append(
            Request(
                id=f"{who}{number}",
                prompt=[1],
                params=SamplingParams(max_new_tokens=1),
                seed=0,
                priority=caller.priority,
            )
        )
    return made


def test_the_prompts_of_a_request_take_turns_with_those_of_others_and_none_waits_for_ever() -> None:
    queue, many = RequestQueue(), Caller(1 << 30)
    queue.push(requests(queue, "A", 4096, many))
    begun = [request.id for request in queue.take(128)]
    order = list[Any]()
    for number in range(300):  # there are always others
        queue.push(requests(queue, f"B{number}.", 1, Caller(1 << 30)))
        order += [request.id for request in queue.take(1)]
    assert len(begun) == 128
    first = order.index("B0.0")
    assert first <= 2, "a newcomer comes after the next one of the many, and before the others"
    assert any(id.startswith("A") for id in order[-60:]), "the many go on, however many others come"
    rest = [request.id for request in queue.take(10_000)]
    assert len({*begun, *order, *rest}) == 4096 + 300


def test_equal_requests_of_many_clients_stay_in_their_order() -> None:
    queue = RequestQueue()
    for number in range(50):
        queue.push(requests(queue, f"{number}.", 1, Caller(1 << 30)))
    assert [request.id for request in queue] == [f"{number}.0" for number in range(50)]
    assert {request.priority for request in queue} == {0}, "and calls of the engine beside them come no earlier"


def test_a_request_holds_half_of_the_tokens_at_most() -> None:
    service, _, _ = scripted(*[None] * 64)
    service.most_tokens, service.context = 40_000, 1 << 12

    async def ask() -> None:
        caller = service.caller()
        holding = 0

        async def hold() -> None:
            nonlocal holding
            async with caller.hold(4000):
                holding += 1
                try:
                    assert holding <= 5
                    await asyncio.sleep(0)
                finally:
                    holding -= 1

        works = [asyncio.create_task(hold()) for _ in range(64)]
        await asyncio.sleep(0)
        assert holding == 5
        works[3].cancel()
        works[40].cancel()
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) == 2
        assert [outcome for outcome in outcomes if isinstance(outcome, AssertionError)] == []
        async with caller.hold(1 << 40):
            pass  # one alone may be as large as it is

    asyncio.run(ask())


def test_work_on_many_texts_lets_others_run() -> None:
    """Each item takes longer than a turn."""

    def work() -> Iterator[str]:
        for _ in range(6):
            time.sleep(0.02)
            yield "item"

    async def both() -> list[str]:
        order = list[str]()

        async def other() -> None:
            for _ in range(3):
                order.append("other")
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await in_turns(order.append(item) for item in work())
        await task
        return order

    assert asyncio.run(both())[:6] == ["item", "other"] * 3


@pytest.mark.exhaustive
def test_four_thousand_prompts_do_not_hold_up_another_request() -> None:
    """The other one has its answer while most of the many wait; so had the many all been submitted before."""
    from podium_serve.app import make_app
    from podium_serve.server import Server

    service, drawn = engine_service()
    with Server(make_app(service, TOKEN)) as server:
        many = {"prompt": ["ab"] * 4096, "max_tokens": 4, "temperature": 0}
        statuses = list[int]()
        asking = threading.Thread(target=lambda: statuses.append(posted(f"{server.url}/v1/completions", many)[0]))
        asking.start()
        assert wait_until(lambda: drawn() >= 8)
        assert posted(f"{server.url}/v1/completions", {"prompt": "cd", "max_tokens": 2})[0] == 200
        at_answer = drawn()
        asking.join()
    assert statuses == [200]
    assert at_answer < 2048
