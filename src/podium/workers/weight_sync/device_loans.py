"""The controller's end of the sync on a device: which generators copy the policy's weights there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from podium.runtime import wait
from podium.telemetry import Note, emit
from podium.workers.weight_sync.on_device import route

if TYPE_CHECKING:
    from podium.runtime import Call, Handle
    from podium.workers.policy import Policy
    from podium.workers.weight_sync.receiver import WeightReceiver


class DeviceLoans:
    """The controller's end: which generators copy the weights on their device, in each sync.

    Args:
        policy: The policy's handle.
    """

    def __init__(self, policy: Handle[Policy]) -> None:
        self._policy = policy
        self._possible = True  # whether a rank of the policy has weights on a device that can share them
        self._refused: dict[Handle[WeightReceiver], str] = {}  # not asked again: handles that nobody opens stay taken
        self._said: list[str] = []
        self._out = False

    def open(self, generators: Sequence[Handle[WeightReceiver]]) -> list[Handle[WeightReceiver]]:
        """Lend the weights, and return the generators that have opened them. The others must get buckets.

        A note says which way the weights go, whenever that changes.
        """
        lenders = self._policy.weight_site() if self._possible else []
        self._possible = any(lender.device for lender in lenders)
        if not self._possible:
            return []
        why: dict[Handle[WeightReceiver], str] = {}
        routes: dict[Handle[WeightReceiver], list[int]] = {}
        for generator in generators:
            way = self._refused.get(generator) or route(lenders, generator.device_site())
            if isinstance(way, str):
                why[generator] = way
            else:
                routes[generator] = way
        refused = self._lend(routes, len(lenders)) if routes else {}
        self._refused |= refused
        why |= refused
        self._say(len(generators) - len(why), list(why.values()))
        return [generator for generator in generators if generator not in why]

    def refuse(self, generator: Handle[WeightReceiver], why: str) -> None:
        """Lend nothing to this generator from now on."""
        self._refused[generator] = why
        emit(Note(f"weight sync: {why}; a generator gets its weights through host memory from now on"))

    def end(self) -> None:
        """Let the policy let go of what it lent. Idempotent."""
        if self._out:
            self._out = False
            self._policy.lend_weights([])

    def _lend(
        self, routes: Mapping[Handle[WeightReceiver], list[int]], ranks: int
    ) -> dict[Handle[WeightReceiver], str]:
        """Lend the weights to these generators; return why some of them cannot open theirs."""
        counts = [sum(way.count(rank) for way in routes.values()) for rank in range(ranks)]
        self._out = True
        lent = self._policy.lend_weights(counts)
        loans = [list(loan.loans) for loan in lent]
        refused: dict[Handle[WeightReceiver], str] = {}
        calls: dict[Handle[WeightReceiver], Call[list[str]]] = {}
        for generator, way in routes.items():
            if why := next((lent[rank].why for rank in way if lent[rank].why), ""):
                refused[generator] = why
            else:
                calls[generator] = generator.open_weights.submit([loans[rank].pop() for rank in way])
        wait([*calls.values()])  # none of them may still be opening when an error ends the sync
        for generator, call in calls.items():
            if why := next(filter(None, call.result()), ""):
                refused[generator] = why
        return refused

    def _say(self, opened: int, why: list[str]) -> None:
        text = [f"{opened} of {opened + len(why)} generators copy the policy's weights on their device, by CUDA IPC"]
        text += [f"{why.count(reason)} get them through host memory: {reason}" for reason in dict.fromkeys(why)]
        if text != self._said:
            self._said = text
            emit(Note("weight sync: " + "; ".join(text)))
