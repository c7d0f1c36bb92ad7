"""Which ranks wait in a collective for a rank that has failed.

    rank 0   all_reduce 1   all_reduce 2   KeyError                 2 collectives begun: it begins no third
    rank 1   all_reduce 1   all_reduce 2   all_reduce 3 …           3 collectives begun: it waits for rank 0
    rank 2   all_reduce 1   all_reduce 2   computes …               2 collectives begun: it may end by itself

A rank that waits is freed by destroying the process groups of the failed rank, after which the group of workers needs
a restart. Where no rank waits, the group stays whole: the same error on two ranks, of which one is later, breaks
nothing.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

FIRST_LOOK_S, LAST_LOOK_S = 0.02, 1.0  # between two looks, which grow rarer while a rank computes


class Collectives(NamedTuple):
    """The collectives of one rank.

    Attributes:
        begun: By process group, the number of collectives that the rank has begun.
        inside: The stack of the endpoint that is inside torch.distributed now; "" if none is.
    """

    begun: Mapping[str, int]
    inside: str

    def is_ahead_of(self, other: "Collectives") -> bool:
        """Whether this rank has begun a collective of a common process group that the other one has not."""
        return any(count > other.begun[group] for group, count in self.begun.items() if group in other.begun)


def find_waiting_siblings(
    failed: int,
    ask: Callable[[], Mapping[int, Collectives | None]],
    is_over: Callable[[], bool],
    wait_until: Callable[[Callable[[], bool], float], None],
) -> list[int]:
    """Look at the ranks that still run a call which ``failed`` has left, until one waits for it or the call is over.

    A rank waits if it has begun more collectives than the failed one. Sending and receiving between two ranks is not
    counted by torch, so a rank waits as well if two looks find it at the same place inside torch.distributed.

    Args:
        failed: The rank that raised.
        ask: Returns the collectives of ``failed`` and of all ranks that still run, of those that answer. None stands
            for a rank without a process group.
        is_over: Whether all ranks have answered, or nobody needs to know any more.
        wait_until: Waits until a condition holds, and no longer than some seconds.

    Returns:
        The ranks that wait, in order. The list is empty if the call is over, and if ``failed`` has no process group in
        which another rank could wait for it.
    """
    before: dict[int, Collectives] = {}
    pause_s = FIRST_LOOK_S
    while not is_over():
        states = ask()
        if failed in states and states[failed] is None:
            return []
        siblings = {rank: state for rank, state in states.items() if state is not None}
        reference = siblings.pop(failed, None)
        waiting = [
            rank
            for rank, state in siblings.items()
            if (reference is not None and state.is_ahead_of(reference)) or (state.inside and state == before.get(rank))
        ]
        if waiting:
            return sorted(waiting)
        before = siblings
        wait_until(is_over, pause_s)
        pause_s = min(2 * pause_s, LAST_LOOK_S)
    return []
