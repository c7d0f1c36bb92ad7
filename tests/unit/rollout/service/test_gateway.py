"""The address of a run's sessions: when it answers, at which port, and whom each session's key lets in."""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from podium.errors import ConfigError, GenerationError, PodiumError
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium_agents.service.keys import SessionKeys
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Session
from podium_serve import gateway as gateway_module
from podium_serve.gateway import Gateway
from tests.unit.rollout.service.scripted import USER, posted, scripted

pytest.importorskip("uvicorn")

ASK = {"messages": [USER]}


@asynccontextmanager
async def reachable(service: Service, *names: str) -> AsyncIterator[tuple[Gateway, str, dict[str, Session]]]:
    """Open sessions of a call, as training has them, and give their gateway and its address."""
    service.rules = SamplingParams(max_new_tokens=64)
    gateway = Gateway()
    async with gateway.open(service, "1-1") as address:
        sessions = {name: service.open_session(name) for name in names}
        yield gateway, await asyncio.to_thread(address), sessions
    await asyncio.to_thread(gateway.close)


async def ask(url: str, token: str, body: Any = ASK, path: str = "/v1/chat/completions") -> tuple[int, str]:
    """Post to a path. Returns the status and the body of the answer."""
    return await asyncio.to_thread(posted, f"{url}{path}", body, token)


def refuses(url: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


def test_it_has_one_address_until_it_is_closed_and_says_which_sessions_are_over() -> None:
    service, _, _ = scripted("A.<|im_end|>")

    async def talk() -> tuple[Any, ...]:
        gateway, address = Gateway(), ""
        statuses: list[int] = []
        for call in ("1-1", "1-2"):
            async with gateway.open(service, call) as get_address:
                url = await asyncio.to_thread(get_address)
                assert url == (address or url)
                address = url
                if call == "1-1":
                    statuses.append((await ask(f"{url}/sessions/1-1-0", gateway.keys.key_of("1-1-0")))[0])
        late = await ask(f"{url}/sessions/1-1-0", gateway.keys.key_of("1-1-0"))
        await asyncio.to_thread(gateway.close)
        return statuses, late, refuses(url), get_address

    statuses, late, is_closed, get_address = asyncio.run(talk())
    assert (statuses, late[0], is_closed) == ([200], 404, True)
    assert "'1-1-0' is over" in late[1]
    with pytest.raises(GenerationError, match="after the sessions of its call had ended"):
        get_address()


def test_a_thread_that_outlives_its_call_gets_no_address() -> None:
    service, _, _ = scripted()
    over, said = threading.Event(), list[str]()

    def late(address: Callable[[], str]) -> None:
        over.wait()
        try:
            said.append(address())
        except GenerationError as error:
            said.append(str(error))

    async def live() -> None:
        async with Gateway().open(service, "1-1") as address:
            thread = threading.Thread(target=late, args=(address,))
            thread.start()
        over.set()
        await asyncio.to_thread(thread.join)

    asyncio.run(live())
    assert "had ended" in said[0]


# How the bearer of another session's key may try to speak in the session 1-1-1: by path, header or body.
ATTEMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "path": ("/sessions/1-1-1/v1/chat/completions", {}),
    "agent": ("/sessions/1-1-1.critic/v1/chat/completions", {}),
    "agent of itself": ("/sessions/1-1-1.1-1-10/v1/chat/completions", {}),
    "encoded": ("/sessions/1-1%2D1/v1/chat/completions", {}),
    "body": ("/v1/chat/completions", {"metadata": {"session_id": "1-1-1"}}),
    "agent in body": ("/v1/chat/completions", {"metadata": {"session_id": "1-1-1.critic"}}),
    "guess": ("/sessions/1-1-7/v1/chat/completions", {}),
    "models": ("/sessions/1-1-1/v1/models", {}),
    "metrics": ("/metrics", {}),
    "tokens": ("/inference/v1/generate", {}),
}


@pytest.mark.parametrize("how", ATTEMPTS)
def test_a_key_of_one_session_reaches_no_other(how: str) -> None:
    service, source, _ = scripted("A.<|im_end|>", "B.<|im_end|>")
    path, extra = ATTEMPTS[how]

    async def attack() -> tuple[list[int], list[int]]:
        async with reachable(service, "1-1-1", "1-1-10") as (gateway, url, sessions):
            service.open_session("1-1-1.critic")
            code = gateway.keys.key_of("1-1-10").partition(".")[2]
            tokens = [gateway.keys.key_of("1-1-10"), f"1-1-1.{code}", "1-1-1.", "1-1-1", code, "", ".", "é" * 50]
            tokens += [SessionKeys().key_of("1-1-1")]  # of another worker, or of the run before it was resumed
            statuses = [(await ask(url, token, {**ASK, **extra}, path))[0] for token in tokens]
            return statuses, [len(session.calls) for session in sessions.values()]

    statuses, calls = asyncio.run(attack())
    assert {*statuses} <= {401, 404, 405}
    assert (calls, source.prompts) == ([0, 0], [])


def test_a_guess_of_a_name_does_not_say_whether_there_is_such_a_session() -> None:
    async def attack() -> list[tuple[int, str]]:
        async with reachable(scripted()[0], "1-1-1", "1-1-2") as (gateway, url, _):
            key = gateway.keys.key_of("1-1-2")
            return [await ask(f"{url}/sessions/{name}", key) for name in ("1-1-1", "1-1-9", "9-9-9")]

    assert len({*asyncio.run(attack())}) == 1


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def spy(left: bytes, right: bytes) -> bool:
        lengths.append((len(left), len(right)))
        return compare(left, right)

    keys = SessionKeys()
    good = keys.key_of("1-1-1")
    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert keys.scope_of(good) == keys.scope_of(good) == "1-1-1"
    assert keys.scope_of(good[:-1] + ("A" if good[-1] != "A" else "B")) is None
    assert lengths == [(len(good), len(good))] * 3


def test_a_key_names_its_session_where_the_request_does_not_and_reaches_its_agents() -> None:
    service, _, _ = scripted("A.<|im_end|>", "B.<|im_end|>", "C.<|im_end|>")

    async def talk() -> list[int]:
        async with reachable(service, "1-1-1", "1-1-1.critic") as (gateway, url, sessions):
            key = gateway.keys.key_of("1-1-1")
            assert gateway.keys.key_of("1-1-1.critic") == key
            for path in ("", "/sessions/1-1-1", "/sessions/1-1-1.critic"):
                assert (await ask(url + path, key))[0] == 200
            return [len(session.calls) for session in sessions.values()]

    assert asyncio.run(talk()) == [2, 1]


def test_calls_that_overlap_have_one_address_and_their_own_sessions() -> None:
    first, _, _ = scripted("A.<|im_end|>")
    second, _, _ = scripted("B.<|im_end|>")

    async def talk() -> list[str]:
        gateway = Gateway()
        async with gateway.open(first, "1-1") as one, gateway.open(second, "2-2") as two:
            assert await asyncio.to_thread(one) == await asyncio.to_thread(two)
            url = two()
            said = [await ask(f"{url}/sessions/{name}", gateway.keys.key_of(name)) for name in ("2-2-0", "1-1-0")]
        await asyncio.to_thread(gateway.close)
        return [body for _, body in said]

    second_said, first_said = asyncio.run(talk())
    assert '"content":"B."' in second_said and '"content":"A."' in first_said


def test_each_worker_takes_the_first_free_port_of_the_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PodiumError, match=rf"environment\.options\.ports: port {port} of 127\.0\.0\.1 is in use; "):
            Gateway(ports=range(port, port + 1))
        second = Gateway(ports=range(port, port + 50))
        try:
            assert second._url.startswith("http://127.0.0.1:") and second._url != f"http://127.0.0.1:{port}"
        finally:
            second.close()


def test_a_host_that_is_not_here_is_named_before_anything_starts() -> None:
    with pytest.raises(PodiumError, match=r"environment\.options\.host = '203\.0\.113\.7': cannot listen at "):
        Gateway("203.0.113.7")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_is_written_as_one_that_others_reach(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            assert address in (gateway_module._ELSEWHERE, gateway_module._ELSEWHERE6)

        def getsockname(self) -> Any:
            return ("2001:db8::7", 1, 0, 0) if ":" in host else ("198.51.100.7", 1)

    monkeypatch.setattr(gateway_module.socket, "socket", Probe)
    expected = "2001:db8::7" if ":" in host else "198.51.100.7"
    assert gateway_module._public_host(host) == expected

    class Lonely(Probe):
        def connect(self, address: Any) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(gateway_module.socket, "socket", Lonely)
    with pytest.raises(PodiumError, match=r"none leads elsewhere .*: set it to the address by which agents reach"):
        gateway_module._public_host(host)


@pytest.mark.parametrize("ports", ["x", "1-", "-1", "70000", "9-8", "1-2-3", ""])
def test_a_range_of_ports_that_is_none_is_refused(ports: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.options\.ports = .*: expected a port from 0 to 65535"):
        EnvironmentConfig(name="x:y", options={"ports": ports})


def test_a_port_or_a_range_of_ports_is_read() -> None:
    assert EnvironmentConfig(name="x:y", options={"ports": 8900}).limits.port_range == range(8900, 8901)
    assert EnvironmentConfig(name="x:y", options={"ports": "8900-8902"}).limits.port_range == range(8900, 8903)
    assert EnvironmentConfig(name="x:y").limits.port_range == range(1)
