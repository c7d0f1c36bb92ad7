"""What a worker does in bench.suites.faults: fail, or be busy. Standard library, and torch to compute with."""

from __future__ import annotations

import time

NOBODY = -1
SIDE = 256  # of the matrices; one product takes about a tenth of a millisecond


def fail_or_work(rank: int, failing: int, lead_s: float, busy_s: float, computing: bool) -> None:
    """Raise on the rank `failing` after `lead_s`; be busy for `busy_s` on the others, asleep or computing.

    The exception carries its moment, in monotonic nanoseconds, a clock that all processes of a machine share.
    """
    if rank == failing:
        time.sleep(lead_s)
        raise RuntimeError(time.monotonic_ns())
    if not computing:
        time.sleep(busy_s)
        return
    import torch

    factor = torch.eye(SIDE)
    product = torch.ones(SIDE, SIDE)
    until = time.monotonic() + busy_s  # after torch's first call, which may import for as long
    while time.monotonic() < until:
        product = product @ factor
