"""Requests to a service that scores: with its key, a limit of time, and an error that names the address."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from podium.errors import ConfigError, PodiumError

__all__ = ["PAUSE_S", "Endpoint", "pauses_s"]

T = TypeVar("T")

PAUSE_S: Final = 0.5  # before the second try; twice as long before each further one
_MOST_BYTES: Final = 1 << 24  # of an answer


@dataclass(frozen=True)
class Endpoint:
    """A service that gets and answers JSON.

    Attributes:
        subject: What errors call it, such as "the judge".
        option: How its options are written, such as "judge".
        url: Where requests go.
        key: The environment variable that has the key; "" for none.
        time_limit_s: The most seconds of a request.
        tries: How often it is asked.
        remedies: What to do about a status.
        wanted: What it should answer with.
    """

    subject: str
    option: str
    url: str
    key: str
    time_limit_s: float
    tries: int
    remedies: Mapping[int, str]
    wanted: str

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.option}(url={self.url!r}): expected an address such as http://127.0.0.1:8000")
        if self.tries < 1 or self.time_limit_s <= 0:
            raise ConfigError(f"{self.option}: expected retries of 0 or more, and time_limit_s above 0")

    async def send(self, body: Mapping[str, Any], read: Callable[[Any], T], *, is_last: bool) -> T | None:
        """Return what ``read`` makes of the answer; None if the service may be asked again.

        Raises:
            PodiumError: It does not answer, or with something else, and this was the last try.
        """
        try:
            return read(await asyncio.to_thread(self._post, json.dumps(body, default=str).encode()))
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            if not is_last and (error.code == 429 or error.code >= 500):
                return None
            remedy = self.remedies.get(error.code, "its own log may say more")
            raise PodiumError(
                f"{self.subject} at {self.url} answers with status {error.code}: {remedy}: {text}"
            ) from None
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            if not is_last:
                return None
            what = "does not answer" if isinstance(error, OSError) else f"gives no answer {self.wanted}"
            raise PodiumError(
                f"{self.subject} at {self.url} {what} ({type(error).__name__}: {error}), tried {self.tries} times "
                f"within {self.time_limit_s:g} s each: is the server up, and is url right?"
            ) from None

    def _post(self, data: bytes) -> Any:
        head = {"Content-Type": "application/json"}
        if self.key:
            head["Authorization"] = f"Bearer {self._read_key()}"
        # A proxy, which http_proxy names on many clusters, does not reach a service of this machine.
        handlers = [urllib.request.ProxyHandler({})] if _is_here(self.url) else []
        opener = urllib.request.build_opener(*handlers)
        with opener.open(urllib.request.Request(self.url, data, head), timeout=self.time_limit_s) as reply:
            return json.loads(reply.read(_MOST_BYTES))

    def _read_key(self) -> str:
        if not (key := os.environ.get(self.key, "")):
            raise PodiumError(
                f"{self.option}(api_key={self.key!r}): the variable is not set where rewards run: set it, and name it "
                f"in reward.env, as in --reward.env '[{self.key}]'"
            )
        return key


def _is_here(url: str) -> bool:
    """Whether the host of ``url`` is a name or an address of loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def pauses_s(tries: int) -> float:
    """Return the seconds between ``tries`` tries together."""
    return sum(PAUSE_S * 2**number for number in range(tries - 1))
