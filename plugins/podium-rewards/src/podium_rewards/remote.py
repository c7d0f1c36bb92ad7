"""A service that scores completions, asked by HTTP for many of them at once.

completion, row ─▶ batch (full, or after gather_s) ─▶ POST {"items": [...]} ─▶ {"scores": [...]} ─▶ a score each
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from podium.errors import ConfigError
from podium.spelling import write_count
from podium_rewards.endpoint import PAUSE_S, Endpoint, pauses_s

__all__ = ["RemoteReward", "ask_service"]

_LEAST_S: Final = 1.0
_REMEDIES: Final = {
    401: "its key is wrong: set the variable that api_key names, and name it in reward.env",
    403: "its key may not ask for scores",
    404: "url must be the whole address that scores are asked of",
    413: "lower batch",
}


def ask_service(url: str, **options: Any) -> RemoteReward:
    """Return a reward that asks a service for scores. Name it as ``reward.name: my_service.py:score``.

    Args:
        url: The address that gets ``POST`` requests.
        options: As of :class:`RemoteReward`.

    Raises:
        ConfigError: An option is wrong.
    """
    return RemoteReward(url, **options)


class RemoteReward:
    """A service that scores completions.

    A request has ``{"items": [{"completion": …, "row": {…}}, …]}``, and the answer ``{"scores": […]}`` in the same
    order. A score is a number, a mapping with ``score`` and further parts, or null to leave a completion out.

    Args:
        url: The address that gets the requests.
        api_key: The environment variable that has the key, which is sent as a bearer token; "" for none.
        columns: The columns of the row that are sent; () sends all. Values that JSON does not have are sent as text.
        batch: The most completions of a request.
        gather_s: How long the first completion of a batch waits for others.
        time_limit_s: The most seconds of a request.
        retries: How often a request is sent again.
        at_once: The most requests at the same time.

    Raises:
        ConfigError: An option is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        columns: Sequence[str] = (),
        batch: int = 16,
        gather_s: float = 0.05,
        time_limit_s: float = 60.0,
        retries: int = 2,
        at_once: int = 4,
    ) -> None:
        wanted = 'like {"scores": [1.0, 0.0]}, with a number, a mapping or null for each item'
        self._endpoint = Endpoint(
            "the service", "ask_service", url, api_key, time_limit_s, retries + 1, _REMEDIES, wanted
        )
        if batch < 1 or at_once < 1 or gather_s < 0 or isinstance(columns, str):
            raise ConfigError(
                "ask_service: expected batch and at_once from 1 on, gather_s from 0 on, a list of columns"
            )
        self._columns, self._batch, self._gather_s, self._at_once = tuple(columns), batch, gather_s, at_once
        self._state: _State | None = None
        self.most_items = batch * at_once  # no completion waits for a request that is not its own
        self.least_limit_s = gather_s + (retries + 1) * time_limit_s + pauses_s(retries + 1) + _LEAST_S

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_state": None}

    def check_columns(self, columns: frozenset[str]) -> None:
        """Check that rows have the columns that are sent. Raises ConfigError."""
        if missing := [name for name in self._columns if name not in columns]:
            raise ConfigError(
                f"ask_service sends the column {missing[0]!r}, which not every row has: they have "
                f"{', '.join(sorted(columns)) or 'none'}"
            )

    async def __call__(self, completion: str, row: Mapping[str, Any]) -> Any:
        """Return the score that the service has for a completion.

        Raises:
            PodiumError: The service does not answer, or with something else.
        """
        if self._state is None:
            self._state = _State(self._at_once)
        sent = {name: row[name] for name in self._columns} if self._columns else dict(row)
        lot = self._state.join({"completion": completion, "row": sent}, self)
        index = len(lot.items) - 1
        return (await asyncio.shield(lot.scores))[index]

    async def send(self, lot: _Lot, state: _State) -> None:
        """Send a batch once it is full or has waited, and give each completion its score."""
        if len(lot.items) < self._batch:
            try:
                await asyncio.wait_for(lot.full.wait(), self._gather_s)
            except TimeoutError:
                state.close(lot)
        try:
            async with state.room:
                lot.scores.set_result(await self._ask(lot.items))
        except Exception as error:  # noqa: BLE001 - it belongs to each completion of the batch
            lot.scores.set_exception(error)

    async def _ask(self, items: Sequence[Mapping[str, Any]]) -> list[Any]:
        def read(reply: Any) -> list[Any]:
            scores = reply["scores"]
            if not isinstance(scores, list) or len(scores) != len(items):
                raise ValueError(f"{write_count(len(scores), 'score')} for {write_count(len(items), 'item')}")
            for score in scores:
                if isinstance(score, bool) or not isinstance(score, int | float | dict | None):
                    raise ValueError(f"{score!r:.60} is no score")
            return scores

        tries = self._endpoint.tries
        for number in range(tries):
            if number:
                await asyncio.sleep(PAUSE_S * 2 ** (number - 1))
            scores = await self._endpoint.send({"items": [*items]}, read, is_last=number == tries - 1)
            if scores is not None:
                return scores
        raise AssertionError("the last try returns or raises")

    def is_full(self, lot: _Lot) -> bool:
        """Whether no further completion fits."""
        return len(lot.items) >= self._batch


class _Lot:
    """Completions that are sent together."""

    def __init__(self) -> None:
        self.items, self.full = list[Mapping[str, Any]](), asyncio.Event()
        self.scores: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None


class _State:
    """What a reward holds in a grading process."""

    def __init__(self, at_once: int) -> None:
        self.room = asyncio.Semaphore(at_once)
        self._open: _Lot | None = None

    def join(self, item: Mapping[str, Any], reward: RemoteReward) -> _Lot:
        """Put a completion to others that wait, or begin a batch."""
        lot = self._open or _Lot()
        lot.items.append(item)
        self._open = lot
        if reward.is_full(lot):
            self.close(lot)
            lot.full.set()
        if lot.task is None:
            lot.task = asyncio.ensure_future(reward.send(lot, self))
        return lot

    def close(self, lot: _Lot) -> None:
        """Let no further completion join."""
        if self._open is lot:
            self._open = None
