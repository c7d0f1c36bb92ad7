"""Sessions that a service elsewhere lives: offered by the run, opened by the service, rewarded now or later.

    live() ─▶ offered ──POST /sessions──▶ open ──/end or /reward──▶ over ──/reward──▶ rewarded ─▶ trained
                 └─ open_limit_s            └─ time_limit_s          └─ reward_limit_s      each: left out, and counted

Sessions of one group have one task, which the first request that opens one of them names. Those of an evaluation have
the tasks that the run holds out, and are opened first, since the run waits for them. All of this happens in the event
loop of the rollout worker.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from podium.spelling import write_count
from podium_agents.environments.client import Reply
from podium_agents.environments.contract import Outcome
from podium_agents.environments.runner import Ending

if TYPE_CHECKING:
    from podium_agents.environments.client import Client
    from podium_agents.environments.contract import Task

__all__ = ["Offer", "Offers"]

_REMEMBERED: Final = 4096  # sessions that are over


@dataclass(eq=False)
class _Group:
    """The sessions of one task, which is "" until a request names it. Nobody has opened those of ``waiting``."""

    size: int
    is_evaluation: bool
    task: str = ""
    waiting: deque[Offer] = field(default_factory=deque)


@dataclass(eq=False)
class Offer:
    """A session that a service may live.

    Attributes:
        name: Its name.
        row: The row of the data that it is of.
        client: Its client, once the worker has room for it.
        outcome: What it earned; None before its reward came.
        failure: Why the service gave it up; "" if it did not.
        left_out: Which limit it ran over, or that it was given up.
        turns: How many answers the model has given.
    """

    name: str
    group: _Group
    row: Task
    client: Client | None = None
    outcome: Outcome | None = None
    failure: str = ""
    left_out: str = ""
    turns: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    rewarded: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_evaluation(self) -> bool:
        """Whether it is not trained on."""
        return self.group.is_evaluation

    def end(self, failure: str = "") -> None:
        """Take no more requests to the model. With ``failure`` the session is left out for this reason."""
        self.failure = self.failure or failure
        if self.client is not None:
            self.client.end_calls()
            self.turns = sum(relative.turns for relative in self.client.family)
        self.over.set()
        if self.failure:
            self.rewarded.set()

    def settle(self, outcome: Outcome) -> None:
        """End the session with what it earned."""
        self.outcome = outcome
        self.end()
        self.rewarded.set()

    def reward_turn(self, value: float, turn: int) -> None:
        """Reward an answer of the model by its number. Raises ValueError if there is none of this number."""
        if self.client is None:
            raise ValueError(f"the session {self.name!r} has its reward already, or is left out")
        if not 0 <= turn < self.client.turns:
            raise ValueError(
                f"turn is {turn}, and the session has {write_count(self.client.turns, 'answer')}, the first of them 0"
            )
        self.client.reward(value, Reply({}, "", self.client.session_id, turn))


class Offers:
    """The sessions of a rollout worker that are offered.

    Args:
        time_limit_s: The most seconds from the request that opens a session to its end.
        open_limit_s: The most seconds in which somebody opens it.
        reward_limit_s: The most seconds from its end to its reward.
        names_tasks: Whether the service names tasks. Else the rows of the data are the tasks.
    """

    def __init__(self, time_limit_s: float, open_limit_s: float, reward_limit_s: float, *, names_tasks: bool) -> None:
        self.time_limit_s, self.open_limit_s, self.reward_limit_s = time_limit_s, open_limit_s, reward_limit_s
        self.names_tasks = names_tasks
        self._offers: dict[str, Offer] = {}
        self._groups: list[_Group] = []
        self._done: OrderedDict[str, Offer] = OrderedDict()
        self._changed = asyncio.Event()
        self._is_closed = False

    def plan(
        self, names: Sequence[str], groups: Sequence[int], rows: Sequence[Task], *, is_evaluation: bool = False
    ) -> None:
        """Announce sessions, in the order in which the worker has room for them.

        Args:
            names: S names.
            groups: S numbers of their groups.
            rows: S rows of the data.
            is_evaluation: Whether they are not for training. Their rows are their tasks then.
        """
        by_number = {number: _Group(groups.count(number), is_evaluation) for number in dict.fromkeys(groups)}
        for name, number, row in zip(names, groups, rows, strict=True):
            offer = self._offers[name] = Offer(name, by_number[number], row)
            by_number[number].waiting.append(offer)
        self._groups += by_number.values()

    def get(self, name: str) -> Offer | None:
        """Return a session that was opened, also one that is over since a while."""
        offer = self._offers.get(name) or self._done.get(name)
        return offer if offer is not None and offer.opened.is_set() else None

    def task_of(self, offer: Offer) -> Task | None:
        """Return the task that the run gives a session; None where the service has named it."""
        return None if self.names_tasks and not offer.is_evaluation else offer.row

    async def open(self, task: Any, wait_s: float, evaluation: bool | None = None) -> Offer | None:
        """Return a session of a task for a service to live; None if none is wanted within ``wait_s``.

        With ``evaluation`` it is one of an evaluation, or never one; None is for both, those of an evaluation first.

        Raises:
            ValueError: The task is missing, or must not be named.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while (offer := self._take(task, evaluation)) is None:
            changed, rest_s = self._changed, until_s - loop.time()
            if rest_s <= 0 or self._is_closed:
                return None
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), rest_s)
        offer.opened.set()
        return offer

    def _take(self, task: Any, evaluation: bool | None) -> Offer | None:
        if (not self.names_tasks or evaluation) and task is not None:
            raise ValueError("task is set, but the run chooses the task of this session: leave task out")
        held_out = [g for g in self._groups if g.is_evaluation and g.waiting and g.waiting[0].client is not None]
        waiting = [group for group in self._groups if not group.is_evaluation and group.waiting]
        if evaluation or (held_out and evaluation is None):
            groups = held_out
        elif not self.names_tasks:
            groups = waiting
        else:
            key = "" if task is None else json.dumps(task, sort_keys=True)
            if not key and any(group.size > 1 for group in waiting):
                raise ValueError(
                    "task is missing: the sessions of one task are compared, and sampling.n of them make a group; send "
                    "a value that identifies the task, such as the prompt, or train with sampling.n = 1"
                )
            groups = [group for group in waiting if key and group.task == key] or [g for g in waiting if not g.task]
            if groups and groups[0].waiting[0].client is not None:
                groups[0].task = key or "null"
        if not groups or groups[0].waiting[0].client is None:  # the worker has no room for it so far
            return None
        return groups[0].waiting.popleft()

    async def live(self, client: Client) -> Ending:
        """Offer a session, and return how it ended."""
        offer = self._offers[client.session_id]
        offer.client = client
        self._notify()
        try:
            offer.left_out = await self._wait(offer)
            return Ending(offer.outcome or Outcome(), offer.left_out)
        finally:
            self._forget(offer)

    async def _wait(self, offer: Offer) -> str:
        """Wait for all that a session needs. Returns why it is left out; "" if it is not."""
        if not await _came(offer.opened, self.open_limit_s):
            return f"no service opened it within open_limit_s = {self.open_limit_s:g}"
        if not await _came(offer.over, self.time_limit_s):
            offer.end()
            return f"the service did not end it within time_limit_s = {self.time_limit_s:g}"
        if not await _came(offer.rewarded, self.reward_limit_s):
            return f"its reward did not come within reward_limit_s = {self.reward_limit_s:g}"
        return f"the service gave it up: {offer.failure}" if offer.failure else ""

    def _forget(self, offer: Offer) -> None:
        """Let go of what was recorded in a session. That it was there is remembered for requests that come late."""
        del self._offers[offer.name]
        with suppress(ValueError):
            offer.group.waiting.remove(offer)
        if not offer.group.waiting and offer.group in self._groups:
            self._groups.remove(offer.group)
        offer.client = None
        self._done[offer.name] = offer
        while len(self._done) > _REMEMBERED:
            self._done.popitem(last=False)

    def read_outcome(self, body: Mapping[str, Any]) -> Outcome:
        """Return what a request says that a session earned. Raises ValueError for what is no finite number."""
        reward, agents = body.get("reward"), body.get("agents", {})
        parts = {"score": reward} if not isinstance(reward, Mapping) else dict(reward)
        if "score" not in parts:
            raise ValueError(f'reward is {reward!r}: a mapping of named numbers has the entry "score"')
        if not isinstance(agents, Mapping):
            raise ValueError(f"agents is {agents!r}: expected rewards by the names of agents")
        numbers = {name: self.read_number(value, name) for name, value in parts.items()}
        return Outcome(
            score=numbers.pop("score"),
            parts=numbers,
            agents={name: self.read_number(value, f"agents.{name}") for name, value in agents.items()},
        )

    def read_number(self, value: Any, name: str) -> float:
        """Return a finite number of a request. Raises ValueError for anything else."""
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e9 or value != value:
            raise ValueError(f"{'reward' if name == 'score' else name} is {value!r}: expected a finite number")
        return float(value)

    def close(self) -> None:
        """Let nobody wait for a session any more."""
        self._is_closed = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _came(event: asyncio.Event, limit_s: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
    return event.is_set()
