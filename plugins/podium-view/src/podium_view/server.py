"""The server of ``podium view``. It listens on loopback only, it only reads, and it answers only requests that have its
key.

Other pages in the same browser can send requests to loopback too. They are refused as follows:

- The address holds 256 random bits, so that it cannot be guessed.
- The ``Host`` of a request must be a name of loopback. A site that lets its own name point to 127.0.0.1, in order to
  read the answers (DNS rebinding), sends its own name.
- ``Origin`` and ``Sec-Fetch-Site``, which browsers add, must not name another site.
- No answer may be framed, embedded, sniffed or cached, and no request's path ever becomes the name of a file.
"""

import hmac
import json
import logging
import secrets
import socket
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, cast
from urllib.parse import urlsplit

from podium.errors import ConfigError, DataError
from podium_view.listener import Listener, Phase
from podium_view.page import page
from podium_view.run import Run

__all__ = ["ViewServer"]

_MOST_CONNECTIONS: Final = 64  # each has a thread; a browser opens six
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class ViewServer(ThreadingHTTPServer):
    """Serves ``runs`` at ``url``, on loopback. ``port`` 0 takes a free one. Call ``serve_forever``.

    Raises:
        ConfigError: The port is in use, or this user may not use it.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, runs: Sequence[Run], port: int = 0) -> None:
        self.runs = list(runs)
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__(("127.0.0.1", port), _Handler, bind_and_activate=False)
            self.socket.close()
            self.socket = Listener(socket.create_server(("127.0.0.1", port), backlog=1024), most=_MOST_CONNECTIONS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} of 127.0.0.1 cannot be used ({error}); --port 0 takes a free one"
            ) from error
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "localhost", self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.getLogger("podium.view").debug("a request failed", exc_info=True)  # for example, the browser was closed

    def answer(self, path: str) -> Any:
        """Return the answer to ``path``: ``state``, ``runs``, or the number of a run and a path for ``Run.answer``.
        Raises the same errors."""
        if path == "state":
            return [run.signature() for run in self.runs]
        if path == "runs":
            return [run.answer("about") for run in self.runs]
        number, _, rest = path.partition("/")
        if not (number.isascii() and number.isdigit() and len(number) < 6):
            raise LookupError(path)
        return self.runs[int(number)].answer(rest)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "podium"
    sys_version = ""
    timeout = 60  # for the client to take an answer; the listener limits what it sends

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.connection.enter(Phase.IDLE)

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        self.connection.enter(Phase.ANSWER)
        return is_whole

    def do_GET(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", refusal.encode())
            return
        path = urlsplit(self.path).path.split("/", 2)[2]
        if not path:
            names = ", ".join(run.name for run in self.view.runs)
            self._send(HTTPStatus.OK, "text/html", page(f"{names} · podium view").encode("utf-8", "replace"))
            return
        try:
            status, answer = HTTPStatus.OK, self.view.answer(path)
        except DataError as error:
            status, answer = HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
        except LookupError:
            status, answer = HTTPStatus.NOT_FOUND, {"error": "there is no such page"}
        self._send(status, "application/json", encode_answer(answer))

    do_HEAD = do_GET

    @property
    def view(self) -> ViewServer:
        return cast("ViewServer", self.server)

    def _refusal(self) -> str | None:
        """Return why this request is answered with 403; None if it is allowed."""
        host = self.headers.get("Host", "")
        if _hostname(f"http://{host}") not in _LOOPBACK:
            return "This address answers only to 127.0.0.1 and localhost."
        origin = self.headers.get("Origin")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if (origin is not None and origin != f"http://{host}") or site not in ("none", "same-origin"):
            return "This address does not answer to other sites."
        parts = urlsplit(self.path).path.split("/", 2)
        if len(parts) < 3 or not hmac.compare_digest(parts[1].encode(), self.view.token.encode()):
            return "The address lacks its key: take the whole address that `podium view` has printed."
        return None

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # the terminal shows the address, and no requests


def encode_answer(answer: Any) -> bytes:
    """Return ``answer`` as JSON. A lone surrogate, which has no UTF-8, is written as an escape."""
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
