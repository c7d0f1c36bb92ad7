"""A policy and a generator on CPUs that say that they are on one GPU. torch shares tensors of both by one function."""

from __future__ import annotations

from typing import Any

from podium.data import InPlace
from podium.runtime import endpoint, first
from podium.workers import Generator, Policy
from podium.workers.weight_sync.on_device import Site

GPU = "GPU-1"


class Lender(Policy):
    """A policy that says that its weights are on a GPU."""

    @endpoint()
    def weight_site(self) -> Site:
        return super().weight_site()._replace(device=GPU)

    @endpoint(collect=first(), returns="ref")
    def weights_in_place(self) -> InPlace | None:
        """Nothing in the host's memory can be read where it is."""

    @endpoint()
    def lent_count(self) -> int:
        """How many tensors are lent."""
        return len(self._lent)


class Borrower(Generator):
    """A generator that says that it computes on the same GPU."""

    opened = 0

    @endpoint(concurrent=True)
    def device_site(self) -> Site:
        return super().device_site()._replace(device=GPU)

    @endpoint(concurrent=True)
    def open_weights(self, loans: Any) -> str:
        self.opened += 1
        return super().open_weights(loans)

    @endpoint()
    def holds(self) -> tuple[int, bool]:
        """How often weights were to be opened, and whether some still are."""
        return self.opened, self._opened is not None
