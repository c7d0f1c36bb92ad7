"""The contract of a weight publication: four verbs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from podium.errors import ConfigError

__all__ = ["Publication", "is_behind"]


class Publication(ABC):
    """How the policy's weights become those that the generators draw from. Held by the controller.

    A version is a number that somebody gives to the weights as they are when they are published; a run gives the step.
    """

    @abstractmethod
    def init(self) -> None:
        """Find out, before anything is trained, whether the weights fit.

        Raises:
            EndpointError: they do not; ConfigError names the tensor.
        """

    @abstractmethod
    def publish(self, version: int) -> None:
        """Make the policy's weights, as they are now, those that the next token is drawn from.

        Nothing happens where ``version`` is there already. Generators that were restarted get all of it. When this
        fails, those that had begun draw nothing until the next publication, which sends all of it again.

        Raises:
            ConfigError: a generator has a later version.
            WorkerDied, EndpointError: a policy or generator failed.
        """

    @abstractmethod
    def is_stale(self, version: int) -> bool:
        """Whether some generator's weights are older than ``version``, or its own because it was started since."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is kept between publications. Idempotent; the workers go on."""


def is_behind(held: Iterable[int | None], version: int) -> bool:
    """Whether one of the ranks, which hold these versions (None: no published one), needs ``version``.

    Raises:
        ConfigError: a rank holds a later version.
    """
    versions = list(held)
    latest = max((own for own in versions if own is not None), default=version)
    if latest > version:
        raise ConfigError(
            f"publish({version}): a generator has the weights of version {latest}; versions only go forward, so that a "
            "token's version says which weights drew it"
        )
    return any(own != version for own in versions)
