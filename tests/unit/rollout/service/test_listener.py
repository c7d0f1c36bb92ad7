"""The listening socket of all three services: strangers, silent and slow clients, and too many of them."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest

from podium_agents.service.request_bodies import texts_of
from podium_view.listener import Listener, Phase, Visitor
from podium_view.server import ViewServer
from tests.integration.test_serve import NOBODY, OTHER_USERS
from tests.unit.rollout.service.scripted import TOKEN, USER, posted, scripted
from tests.waits import LONG_S, wait_until

pytest.importorskip("uvicorn")

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SLOW = {"limit_s": 5.0, "idle_s": 50.0, "look_s": 0.01}


class Clock:
    """A clock that goes on when a test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class ListeningService:
    """A service, its listener and the clock of that."""

    def __init__(self, listener: Listener, clock: Clock) -> None:
        self.listener, self.clock, self.port = listener, clock, listener.getsockname()[1]

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LONG_S)
        connection.sendall(sent)
        return connection

    def phases(self) -> list[Phase]:
        with self.listener.lock:
            return [visitor.phase for visitor in self.listener.visitors.values()]

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.listener.look()
        self.listener.look()

    def answers(self) -> bool:
        with closing(self.connect(GET)) as connection:
            return connection.recv(100).startswith((b"HTTP/1.1 200", b"HTTP/1.1 403 Forbidden\r\nServer: podium"))


@contextmanager
def serve(kind: str, *answers: Any, **how: Any) -> Iterator[ListeningService]:
    from podium_serve.app import make_app
    from podium_serve.server import Server

    clock = Clock()
    how = {**SLOW, "look_s": 1e6, "clock": clock, **how}
    if kind == "view":
        with ViewServer([]) as server:
            server.socket.close()
            server.socket = listener = Listener(socket.create_server(("127.0.0.1", 0), backlog=1024), **how)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            yield ListeningService(listener, clock)
            server.shutdown()
            thread.join()
        return
    service, _, _ = scripted(*answers)
    with Server(make_app(service, TOKEN), **how) as running:
        yield ListeningService(running.listener, clock)


KINDS = pytest.mark.parametrize("kind", ["serve", "view"])


def status(connection: socket.socket) -> int:
    """The status of the next answer, which is read as a whole."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def ended(connection: socket.socket) -> bytes:
    """All that comes until the other end closes the connection."""
    parts = list[bytes]()
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    connection.close()
    return b"".join(parts)


@contextmanager
def strangers(user: int, port: int, count: int) -> Iterator[Callable[[], int]]:
    """Another user, who holds ``count`` silent connections. Gives how many of them are still open."""
    script = (
        "import resource, socket, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        "held = [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]\n"
        "print('here', flush=True)\n"
        "for line in sys.stdin:\n"
        "    is_open = 0\n"
        "    for one in held:\n"
        "        one.setblocking(False)\n"
        "        try:\n"
        "            while one.recv(4096): pass\n"
        "        except BlockingIOError: is_open += 1\n"
        "        except OSError: pass\n"
        "    print(is_open, flush=True)\n"
    )
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", script, str(port), str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", user=user, group=user, extra_groups=[],
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        assert stdout.readline() == "here\n"

        def count_open() -> int:
            stdin.write("\n")
            stdin.flush()
            return int(stdout.readline())

        yield count_open
        stdin.close()


@OTHER_USERS
@pytest.mark.parametrize("kind", ["serve", "view", "gateway"])
def test_another_user_gets_an_answer_and_no_place(kind: str) -> None:
    """1,524 connections are more than the 1,024 open files that most systems allow."""
    from podium_serve.gateway import Gateway

    def check(port: int, answers: Callable[[], bool], places: Callable[[], int]) -> None:
        with strangers(NOBODY, port, 1524) as count_open:
            assert answers()
            assert wait_until(lambda: count_open() == 0)
            assert wait_until(lambda: places() == 0)

    if kind != "gateway":
        with serve(kind, most=8) as service:
            check(service.port, service.answers, lambda: len(service.phases()))
        return

    async def live() -> None:
        gateway = Gateway()
        async with gateway.open(scripted()[0], "s") as address:
            url = await asyncio.to_thread(address)
            await asyncio.to_thread(
                check, int(url.rpartition(":")[2]), lambda: posted(f"{url}/v1/none", {})[0] == 404, lambda: 0
            )
        await asyncio.to_thread(gateway.close)

    asyncio.run(live())


@KINDS
def test_a_head_that_does_not_end_is_answered_and_closed_although_its_bytes_move(kind: str) -> None:
    with serve(kind) as service:
        silent, slow, kept = service.connect(), service.connect(GET[:1]), service.connect(GET)
        assert status(kept) in (200, 403)
        assert wait_until(lambda: sorted(map(str, service.phases())) == ["Phase.HEAD", "Phase.IDLE", "Phase.SILENT"])
        for letter in GET[1:5]:
            service.pass_time(1.0)
            slow.send(bytes([letter]))
        assert len(service.phases()) == 3
        service.pass_time(1.5)
        assert ended(silent) == b""
        assert b"408 Request Timeout" in (said := ended(slow)) and b"the whole head of the request did not come" in said
        assert wait_until(lambda: service.phases() == [Phase.IDLE])
        kept.sendall(GET)
        assert status(kept) in (200, 403), "a client that keeps its connection has longer between requests"
        assert wait_until(lambda: service.phases() == [Phase.IDLE])
        service.pass_time(51.0)
        assert b"408" not in ended(kept)


def test_a_body_may_take_long_as_long_as_it_moves_and_one_that_does_not_is_closed() -> None:
    body = json.dumps({"messages": [USER]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    with serve("serve", "A.<|im_end|>") as service:
        begun = head + f"Content-Length: {len(body)}\r\n\r\n".encode()
        still = service.connect(begun + body[:3])
        assert wait_until(lambda: service.phases() == [Phase.BODY])
        service.pass_time(5.1)
        assert b"more of the body of the request did not come" in ended(still)
        assert wait_until(lambda: not service.phases())
        moving = service.connect(begun)
        assert wait_until(lambda: service.phases() == [Phase.BODY])
        (visitor,) = service.listener.visitors.values()
        for letter in body[:20]:
            service.pass_time(4.0)
            moving.send(bytes([letter]))
            assert wait_until(lambda: visitor.since_s == service.clock.now_s)
        moving.send(body[20:])
        assert status(moving) == 200
        moving.close()


def test_what_a_client_goes_on_sending_after_its_answer_does_not_keep_it() -> None:
    with serve("serve") as service:
        sender = service.connect(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        assert b"401 Unauthorized" in sender.recv(1 << 12)
        assert wait_until(lambda: service.phases() == [Phase.REST])
        for _ in range(5):
            sender.send(b"a")
            service.pass_time(1.1)
        ended(sender)
        assert wait_until(lambda: not service.phases())


@KINDS
def test_no_part_of_an_answer_waits_until_the_client_has_acknowledged_the_one_before(kind: str) -> None:
    with serve(kind) as service, closing(service.connect(GET)) as connection:
        assert status(connection) in (200, 403)
        (visitor,) = service.listener.visitors.values()
        assert visitor.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_answer_may_take_as_long_as_it_takes() -> None:
    with serve("serve", None) as service:
        body = json.dumps({"messages": [USER], "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        with closing(service.connect(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)) as stream:
            assert b"200 OK" in stream.recv(100)
            service.pass_time(86400.0)
            assert service.phases() == [Phase.ANSWER]


def test_a_client_that_does_not_read_its_answer_is_closed_and_one_that_reads_slowly_is_not() -> None:
    """Their answers go on for ever, as streams do. One of them is read, a little between any two looks.

    The kernel may take more of the other's bytes at any time, which looks like reading and puts its end off.
    """
    clock = Clock()
    listener = Listener(socket.create_server(("127.0.0.1", 0)), **{**SLOW, "look_s": 1e6, "clock": clock})
    service = ListeningService(listener, clock)

    def fill(visitor: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                visitor.send(b"x" * 65536)

    with ExitStack() as stack:
        stack.enter_context(closing(listener))
        connections, visitors = list[socket.socket](), list[Visitor]()
        for _ in range(2):
            connections.append(stack.enter_context(closing(service.connect())))
            listener.setblocking(True)
            visitor, _ = listener.accept()
            assert isinstance(visitor, Visitor)
            visitors.append(stack.enter_context(closing(visitor)))
            visitor.setblocking(False)
            visitor.enter(Phase.ANSWER)
            fill(visitor)
        reader, _ = connections
        service.pass_time(0.0)
        for turn in range(1000):
            before = visitors[0].unread
            read = 0
            while read < 1 << 20:
                read += len(reader.recv(1 << 20))
            assert wait_until(lambda: (visitors[0].note_reading(), visitors[0].unread != before)[1])  # noqa: B023
            fill(visitors[0])
            service.pass_time(20.0)
            if turn > 3 and visitors[1].phase is Phase.LEAVING:
                break
        assert [visitor.phase for visitor in visitors] == [Phase.ANSWER, Phase.LEAVING]


def test_time_that_stood_still_closes_nobody_whose_bytes_are_here() -> None:
    with serve("serve") as service:
        client = service.connect(GET[:5])
        assert wait_until(lambda: service.phases() == [Phase.HEAD])
        service.clock.now_s += 3600.0
        service.listener.look()
        client.sendall(GET[5:])
        assert status(client) == 200
        assert wait_until(lambda: service.phases() == [Phase.IDLE])
        service.listener.look()
        assert service.phases() == [Phase.IDLE]
        client.close()


@KINDS
def test_at_the_cap_the_idle_go_first_and_the_warning_comes_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with serve(kind, most=4) as service, caplog.at_level(logging.WARNING):
        idle, silent = service.connect(GET), list[socket.socket]()
        assert status(idle) in (200, 403)
        assert wait_until(lambda: service.phases() == [Phase.IDLE])
        for number in range(1, 4):
            service.clock.now_s += 0.1
            silent.append(service.connect())
            assert wait_until(lambda number=number: len(service.phases()) == 1 + number)  # type: ignore[misc]
        assert service.answers()
        ended(idle)
        assert wait_until(lambda: service.phases().count(Phase.SILENT) == 3)
        assert service.answers() and service.answers()
        for connection in silent:
            connection.close()
    (warning,) = [record.getMessage() for record in caplog.records if "ulimit -n" in record.getMessage()]
    assert "has 4 connections" in warning


def test_where_all_are_answered_another_one_is_told_so() -> None:
    body = json.dumps({"messages": [USER]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    asked = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with serve("serve", None, None, most=2) as service:
        both = [service.connect(asked) for _ in range(2)]
        assert wait_until(lambda: service.phases() == [Phase.ANSWER] * 2)
        refused = ended(service.connect())
        assert b"503 Service Unavailable" in refused and b"Retry-After: 1" in refused
        for connection in both:
            connection.close()


def test_the_cap_is_below_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    with closing(Listener(socket.create_server(("127.0.0.1", 0)))) as listener:
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
        assert 256 < listener.most < 1024 // 2, "a load balancer opens two for each"


@KINDS
@pytest.mark.parametrize(
    "sent",
    [
        GET[:-2] + b"".join(b"X-%d: %s\r\n" % (number, b"a" * 8000) for number in range(200)) + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        GET + b"\x00\xff\x16\x03garbage \r\n\r\n",
        GET * 500,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    ],
    ids=["huge heads", "a huge address", "garbage after a request", "500 at once", "TLS"],
)
def test_whatever_comes_the_next_one_is_answered(kind: str, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with serve(kind) as service:
        with closing(service.connect()) as connection, suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)  # half closed
            assert ended(connection)
        assert service.answers()
        assert wait_until(lambda: not service.phases()), "a client that has closed its half holds nothing"
    assert "Traceback" not in caplog.text


def test_garbage_in_a_body_while_its_answer_is_under_way_ends_that_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serve("serve") as service:
        sender = service.connect(head)
        assert b"401 Unauthorized" in sender.recv(1 << 12)
        sender.sendall(b"what is no chunk\r\n" * 9)
        ended(sender)
        assert service.answers()
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text


def test_a_front_without_room_for_a_descriptor_closes_the_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve("serve") as service:
        idle = service.connect(GET)
        assert status(idle) in (200, 403)
        assert wait_until(lambda: service.phases() == [Phase.IDLE])
        failures = iter([OSError(24, os.strerror(24))])
        accept = socket.socket.accept

        def accept_later(listening: socket.socket) -> Any:
            if listening is service.listener and (failure := next(failures, None)):
                raise failure
            return accept(listening)

        monkeypatch.setattr(socket.socket, "accept", accept_later)
        assert service.answers()
        ended(idle)


_LONG = "y" * 14_000_000


def _call(arguments: str) -> dict[str, Any]:
    """A message of the assistant that calls a tool."""
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


_LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
_VAST: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 50_000}),
    "parts": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 9000}]}
    ),
    "tools": ("/v1/chat/completions", {"messages": [USER], "tools": [_LOOK] * 9000}),
    "a tool": (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [{**_LOOK, "function": {**_LOOK["function"], "description": _LONG}}]},
    ),
    "arguments": ("/v1/chat/completions", {"messages": [USER, _call(f'{{"x": "{_LONG}"}}'), USER]}),
    "reasoning": (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": _LONG}, USER]},
    ),
    "template variables": (
        "/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {f"k{n}": n for n in range(60_000)}}
    ),
    "stop texts": ("/v1/chat/completions", {"messages": [USER], "stop": [f"s{n}" for n in range(60_000)]}),
    "responses": ("/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": ""}] * 50_000}),
    "anthropic": (
        "/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": ""}] * 50_000}
    ),
    "conversation to tokenize": ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 50_000}),
    "ids": ("/detokenize", {"tokens": [5] * 1_000_000}),
}  # fmt: skip


@pytest.mark.everyday("messages", "arguments", "a tool", "responses", "anthropic", "parts")
@pytest.mark.parametrize("what", _VAST)
def test_a_request_of_too_much_is_refused_before_its_prompt_is_written(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one request would hold up all others for up to half a minute."""
    from podium_serve.app import make_app
    from podium_serve.server import Server

    service, source, _ = scripted("ok")
    written = list[object]()
    monkeypatch.setattr(type(service.form), "prompt", lambda *args, **more: written.append(args) or [1])
    monkeypatch.setattr(service, "decode", lambda *args, **more: written.append(args) or "")
    path, body = _VAST[what]
    with Server(make_app(service, TOKEN)) as server:
        status, text = posted(server.url + path, body)
    assert status in (400, 413), text[:300]
    assert not written
    assert not source.prompts


def test_a_long_conversation_with_tools_and_pictures_is_no_vast_one() -> None:
    from podium_serve.exchange import as_json

    messages = [USER, {"role": "assistant", "content": "yes"}] * 500
    as_json(json.dumps({"messages": [*messages, USER], "tools": [_LOOK] * 200}).encode())
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    assert sum(map(len, texts_of([{"role": "user", "content": [picture]}]))) < 100
