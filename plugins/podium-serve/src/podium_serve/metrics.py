"""What a service has done, as Prometheus reads it: https://prometheus.io/docs/instrumenting/exposition_formats/."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

__all__ = ["Metrics", "add_line"]

_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_GONE: Final = 499  # the client went away before there was an answer

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Metrics:
    """Counts requests and tokens.

    Attributes:
        running: Requests without a complete answer so far.
        tokens: Tokens by kind, "prompt" and "completion".
    """

    def __init__(self) -> None:
        self.running = 0
        self.tokens: Counter[str] = Counter()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, list[int]] = {}
        self._sums_s: Counter[str] = Counter()

    def measured(self, app: App, paths: Iterable[str]) -> App:
        """Return ``app`` with its requests counted by path, those to other than ``paths`` as "other"."""
        known_paths = frozenset(paths)

        async def run(scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            begun_s, status = time.monotonic(), _GONE
            path = _path(scope["path"])

            async def note(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            self.running += 1
            try:
                await app(scope, receive, note)
            finally:
                self.running -= 1
                self._note(path if path in known_paths else "other", status, time.monotonic() - begun_s)

        return run

    def _note(self, path: str, status: int, lasted_s: float) -> None:
        self._requests[path, status] += 1
        self._sums_s[path] += lasted_s  # pyright: ignore[reportArgumentType] - a Counter adds seconds as well
        counts = self._seconds.setdefault(path, [0] * (len(_BUCKETS_S) + 1))
        counts[bisect_left(_BUCKETS_S, lasted_s)] += 1

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all metrics as text; ``gauges`` are further numbers, each with its description."""
        lines = _head("requests_total", "counter", "Requests by path and status; 499 for clients that went away.")
        for (path, status), count in sorted(self._requests.items()):
            lines.append(f'podium_requests_total{{path="{path}",code="{status}"}} {count}')
        lines += _head("tokens_total", "counter", "Tokens that were read and drawn.")
        lines += [f'podium_tokens_total{{kind="{kind}"}} {self.tokens[kind]}' for kind in ("prompt", "completion")]
        lines += _head("request_seconds", "histogram", "Seconds from a request to the end of its answer.")
        for path, counts in sorted(self._seconds.items()):
            total = 0
            for bound, count in zip((*map(str, _BUCKETS_S), "+Inf"), counts, strict=True):
                total += count
                lines.append(f'podium_request_seconds_bucket{{path="{path}",le="{bound}"}} {total}')
            lines.append(f'podium_request_seconds_sum{{path="{path}"}} {self._sums_s[path]:.6f}')
            lines.append(f'podium_request_seconds_count{{path="{path}"}} {total}')
        for name, (what, value) in {"requests_running": (_RUNNING, self.running), **gauges}.items():
            lines += [*_head(name, "gauge", what), f"podium_{name} {value}"]
        return "\n".join(lines) + "\n"


_RUNNING: Final = "Requests that have no whole answer yet, this one among them."


def _head(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP podium_{name} {what}", f"# TYPE podium_{name} {kind}"]


def _path(path: str) -> str:
    """The path without the session in it."""
    if path.startswith("/sessions/"):
        return "/" + path.removeprefix("/sessions/").partition("/")[2]
    return path


def add_line(texts: Iterable[str]) -> str:
    """Return one text of several services' metrics: samples of one name are added, but versions are the largest."""
    families: dict[str, dict[str, float]] = {}  # by the comments above the samples
    for text in texts:
        family, head = dict[str, float](), ""
        for line in text.splitlines():
            if line.startswith("#"):
                head = f"{head}{line}\n" if line.startswith("# TYPE") else f"{line}\n"
                family = families.setdefault(head, {}) if line.startswith("# TYPE") else family
                continue
            name, _, value = line.rpartition(" ")
            both = family.get(name, 0.0), float(value)
            family[name] = max(both) if "version" in name else sum(both)
    return "".join(
        head + "".join(f"{name} {value:.12g}\n" for name, value in family.items()) for head, family in families.items()
    )
