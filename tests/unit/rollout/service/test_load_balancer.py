"""What a load balancer and a service take from the network, and what they leave outside."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

import pytest

from podium_serve import exchange, serve_load_balancer
from tests.unit.rollout.service.scripted import TOKEN, USER, posted, scripted
from tests.waits import LONG_S, wait_until

pytest.importorskip("uvicorn")


@contextlib.contextmanager
def served(*answers: str, balanced: bool = True) -> Iterator[tuple[str, Any]]:
    """Serve what ``answers`` say. Gives the address, which is the load balancer's if there is one, and the service."""
    from podium_serve.app import make_app
    from podium_serve.server import Server

    service, _, _ = scripted(*answers)
    with Server(make_app(service, TOKEN)) as server:
        if not balanced:
            yield server.url, service
            return
        with serve_load_balancer([server.url], token=TOKEN) as before:
            yield before.url, service


@contextlib.contextmanager
def stranger() -> Iterator[tuple[int, list[str]]]:
    """Another server of this machine. Gives its port, and the paths that it was asked for."""
    paths: list[str] = []

    class Listening(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Listening) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port, paths
        server.shutdown()


@contextlib.contextmanager
def holding(count: int) -> Iterator[tuple[list[str], list[list[int]], threading.Event]]:
    """Services that answer when the event is set. Gives their addresses, and for each the limits that it was asked."""
    taken, go = [list[int]() for _ in range(count)], threading.Event()

    def make(own: list[int]) -> type[BaseHTTPRequestHandler]:
        class Holding(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                own.append(body["max_tokens"])
                assert go.wait(LONG_S)
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *_: Any) -> None:
                """Say nothing."""

        return Holding

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), make(own))) for own in taken]
        for server in servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
        yield [f"http://127.0.0.1:{server.server_port}" for server in servers], taken, go


def raw(url: str, head: str, body: bytes = b"", token: str = "") -> int:
    """Send a request as it is. Returns the status of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    given = f"Authorization: Bearer {token}\r\n" if token else ""
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        connection.sendall(f"{head}\r\nHost: x\r\n{given}\r\n".encode() + body)
        return int(connection.recv(64).split()[1])


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("target", ["%2F@127.0.0.1:{}/", "@127.0.0.1:{}/", "//127.0.0.1:{}/", "http://127.0.0.1:{}/"])
def test_no_path_makes_the_load_balancer_ask_another_server(target: str, token: str) -> None:
    with served() as (url, _), stranger() as (port, paths):
        status = raw(url, f"GET {target.format(port)} HTTP/1.1", token=token)
    assert (status, paths) == (404, [])


@pytest.mark.parametrize("session", ["a", "b%2Fv1@x", "%25", "..", "ä?#"])
def test_a_session_reaches_its_service_under_its_name(session: str) -> None:
    from urllib.parse import quote

    with served("A.<|im_end|>") as (url, service):
        path = quote(session, safe="%") if "%" not in session else session
        status, answer = posted(f"{url}/sessions/{path}/v1/chat/completions", {"messages": [USER]})
        if "%2F" in session:
            assert status == 404, "a name is one part of the path"
            return
        assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (200, "A.")
        assert list(service.sessions) == ["%" if session == "%25" else session]


def test_services_get_as_many_tokens_and_not_as_many_requests() -> None:
    with holding(2) as (urls, taken, go), serve_load_balancer(urls, token=TOKEN) as balancer:
        url, asking = f"{balancer.url}/v1/chat/completions", list[threading.Thread]()
        for limit in (1000, 10, 20, 30):
            body = {"messages": [USER], "max_tokens": limit}
            asking.append(threading.Thread(target=posted, args=(url, body)))
            asking[-1].start()
            assert wait_until(lambda: sum(map(len, taken)) == len(asking))
        go.set()
        for one in asking:
            one.join(LONG_S)
    assert taken == [[1000], [10, 20, 30]]


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sessions/a/v1/completions", "/inference/v1/generate"])
def test_without_the_token_a_body_is_not_waited_for(path: str, balanced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_READING_S", 1e6)  # the body never comes, and who waits for it never answers
    with served(balanced=balanced) as (url, _):
        assert raw(url, f"POST {path} HTTP/1.1\r\nContent-Length: 1000", b"{") == 401


@pytest.mark.parametrize("balanced", [False, True])
def test_a_body_that_does_not_come_is_given_up(balanced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_READING_S", 0.2)
    with served(balanced=balanced) as (url, _):
        assert raw(url, "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1000", b"{", TOKEN) == 408


def test_a_load_balancer_answers_as_its_services_do() -> None:
    with served("A.<|im_end|>") as (url, _):
        assert raw(url, "GET /health HTTP/1.1") == 200
        assert raw(url, "GET /v1/models HTTP/1.1") == 401
        assert raw(url, "GET /metrics HTTP/1.1", token=TOKEN) == 200
        assert raw(url, "GET /elsewhere HTTP/1.1", token=TOKEN) == 404
        assert raw(url, "GET /v1/completions HTTP/1.1", token=TOKEN) == 405
        assert posted(f"{url}/v1/chat/completions", b"{".decode())[0] == 400
        status, answer = posted(f"{url}/v1/chat/completions", {"messages": [USER], "stream": True})
        assert status == 200 and answer.endswith("data: [DONE]\n\n")
