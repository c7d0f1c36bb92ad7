"""The service against clients that go away, send too much, or send anything at all."""

from __future__ import annotations

import http.client
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from tests.integration.test_serve import TOKEN, USER, Served, served
from tests.waits import LONG_S, wait_until

__all__ = ["served"]

PATHS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/models", "/metrics", "/health")


def port_of(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


def head_of(path: str, length: int | str, token: str = TOKEN) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def idle(served: Served) -> bool:
    client: Any = served.service.source
    return client.in_flight == 0 and client.engine.idle


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_goes_away_frees_its_slots(served: Served, path: str, stream: bool, n: int, slow: None) -> None:
    asked = {"messages": [USER]} if "chat" in path else {"prompt": "hello"}
    body = json.dumps({**asked, "max_tokens": 480, "stream": stream, "n": n, "temperature": 5}).encode()
    with socket.create_connection(("127.0.0.1", port_of(served))) as connection:
        connection.sendall(head_of(path, len(body)) + body)
        assert wait_until(lambda: served.service.source.in_flight > 0)
        if stream and "chat" in path:
            assert connection.recv(100)
    assert wait_until(lambda: idle(served))
    assert served.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2})[0] == 200


@pytest.fixture
def slow(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each token take a quarter of a second and none end an answer, so that a request lasts for two minutes."""
    monkeypatch.setattr(served.service, "stop_token_ids", ())
    client: Any = served.service.source
    advance = client.engine.advance

    def slowly(interrupted: Any) -> Any:
        def later() -> bool:
            time.sleep(0.25)
            return interrupted()

        return advance(later)

    monkeypatch.setattr(client.engine, "advance", slowly)


def test_a_hundred_megabytes_are_refused_and_not_kept(served: Served) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connection = http.client.HTTPConnection("127.0.0.1", port_of(served), timeout=60)
    with closing(connection):
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Authorization", f"Bearer {TOKEN}")
        connection.putheader("Content-Length", str(100 << 20))
        connection.endheaders()
        for _ in range(100):
            connection.send(b" " * (1 << 20))
        answer = connection.getresponse()
        assert (answer.status, b"larger than 16 MiB" in answer.read()) == (413, True)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 60 << 10, f"{grown >> 10} MiB more"


def test_half_requests_and_no_http_at_all_leave_the_service_alive(served: Served) -> None:
    pieces = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),  # somebody speaks TLS
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000,
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: nan\r\n\r\n",
        head_of("/v1/chat/completions", 1000) + b'{"messages"',
        head_of("/v1/chat/completions", -1),
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n\r\n\r\n",
    ]
    for piece in pieces:
        with socket.create_connection(("127.0.0.1", port_of(served)), timeout=5) as connection, suppress(OSError):
            connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            assert b" 500 " not in connection.recv(4096)[:40]
    assert served.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2})[0] == 200


def anything(chance: random.Random, depth: int = 0) -> Any:
    leaves = [
        *(None, True, False, 0, -1, 1, 3, 0.5, 1e-300, 1e300, float("nan"), float("inf"), 10**30, -(2**63), "", "a"),
        *("\x00", "\ud800", "é" * 9, "none", "auto", "user", "tiny", [], {}, [5, 6], [[5], [6]], ["a", 5], [-1]),
        *([10**9], ["a"] * 3),
    ]
    if depth > 2 or chance.random() < 0.7:
        return chance.choice(leaves)
    if chance.random() < 0.5:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    names = ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "parameters", "x", "id"]
    return {chance.choice(names): anything(chance, depth + 1) for _ in range(chance.randrange(5))}


def body_of(chance: random.Random, path: str) -> Any:
    fields = [
        *("n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "stream", "stream_options", "tools"),
        *("model", "return_token_ids", "logprobs", "max_tokens", "max_completion_tokens", "tool_choice", "metadata"),
        *("response_format", "echo", "suffix", "best_of", "logit_bias", "user", "prompt", "messages", "token_ids"),
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": anything(chance)}}
    said = [
        USER,
        {"role": "assistant", "content": anything(chance), "tool_calls": [call]},
        {"role": "tool", "content": "x"},
    ]
    base: dict[str, Any] = {"max_tokens": 2}
    if "chat" in path:
        base["messages"] = chance.choice([[USER], said, [{"role": "user", "content": anything(chance)}]])
    elif "generate" in path:
        base = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, chance.choice(fields): anything(chance)}}
    else:
        base["prompt"] = "ab"
    for _ in range(chance.randrange(3)):
        base[chance.choice(fields)] = anything(chance)
    return base if chance.random() < 0.95 else anything(chance)


def mangled(chance: random.Random, content: bytes) -> bytes:
    if not content or chance.random() < 0.9:
        return content
    at = chance.randrange(len(content))
    return content[:at] + bytes([chance.randrange(256)]) + content[at + chance.randrange(3) :]


@pytest.fixture
def alone() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert wait_until(lambda: threading.active_count() <= before + 2)


def test_whatever_is_sent_gets_an_answer_and_never_a_500(served: Served, alone: None) -> None:
    chance = random.Random(14)
    seen = set[int]()
    connection = http.client.HTTPConnection("127.0.0.1", port_of(served), timeout=LONG_S)
    for _ in range(150):
        path = chance.choice(PATHS[:3]) if chance.random() < 0.9 else chance.choice(PATHS)
        if chance.random() < 0.2:
            path = f"/sessions/{chance.choice(['a', '%00', '%ff', 'a%2fb', '..'])}{path}"
        content = mangled(chance, json.dumps(body_of(chance, path)).encode())
        method = "POST" if chance.random() < 0.97 else chance.choice(["GET", "DELETE", "PUT", "OPTIONS", "HEAD"])
        connection.request(method, path, content, {"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status < 500, (path, content, said)
        assert b'"type": "server_error"' not in said, (path, content, said)
        if answer.status >= 400 and method != "HEAD":
            assert json.loads(said)["error"]["message"], (path, content)
        seen.add(answer.status)
    connection.close()
    assert {200, 400, 404, 405} <= seen
    assert wait_until(lambda: idle(served))
