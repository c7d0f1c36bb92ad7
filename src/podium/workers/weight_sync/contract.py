"""The contract of a weight sync, and the sync within one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.workers.generator import Generator

__all__ = ["ColocatedSync", "WeightSync", "is_behind"]


class WeightSync(ABC):
    """Brings the policy's weights to the generators. The controller holds it.

    A version is a number that the caller gives to the weights as they are at that moment. A run gives the step.
    """

    @abstractmethod
    def init(self) -> None:
        """Check, before anything is trained, that the weights fit the generators' models.

        Raises:
            EndpointError: they do not fit; its cause is a ConfigError that names the tensor.
        """

    @abstractmethod
    def sync(self, version: int) -> None:
        """Make the policy's weights, as they are now, those that the next token is drawn from.

        Generators that hold ``version`` already are left alone. Generators that were restarted get all weights. If
        this fails, the generators that had begun to receive draw nothing until the next sync, which sends all weights.

        Raises:
            ConfigError: a generator holds a later version.
            WorkerDied, EndpointError: the policy or a generator failed.
        """

    @abstractmethod
    def is_stale(self, version: int) -> bool:
        """Whether a generator's weights are older than ``version``, or never came because it was restarted."""

    @abstractmethod
    def close(self) -> None:
        """Drop what is kept between syncs. Idempotent; the workers go on."""


class ColocatedSync(WeightSync):
    """The generator reads the policy's own parameters, or gathers them into a copy. A sync is one call.

    Args:
        generator: the generator's handle; each of its processes holds a policy too.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def init(self) -> None:
        """Check nothing: the engine is made from the policy's own model."""

    def sync(self, version: int) -> None:
        is_behind(self._generator.refresh(version), version)

    def is_stale(self, version: int) -> bool:
        return any(held is None or held < version for held in self._generator.weights_version())

    def close(self) -> None:
        """Drop nothing: nothing is kept."""


def is_behind(held: Iterable[int | None], version: int) -> bool:
    """Whether a rank needs ``version``, given the version that each rank holds (None: no synced weights).

    Raises:
        ConfigError: a rank holds a later version.
    """
    versions = list(held)
    latest = max((own for own in versions if own is not None), default=version)
    if latest > version:
        raise ConfigError(
            f"sync({version}): a generator has the weights of version {latest}; versions only go forward, so that a "
            "token's version says which weights drew it"
        )
    return any(own != version for own in versions)
