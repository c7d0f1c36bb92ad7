"""Weights that are in the same process already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.workers.publication.contract import Publication, is_behind

if TYPE_CHECKING:
    from podium.workers.generator import Generator

__all__ = ["ColocatedPublication"]


class ColocatedPublication(Publication):
    """The generator reads the policy's own parameters, or gathers them into its copy: one call a publication.

    Args:
        generator: its handle; in each of its hosts there is a policy.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def init(self) -> None:
        """Nothing: the engine is made from the policy's own model."""

    def publish(self, version: int) -> None:
        is_behind(self._generator.refresh(version), version)

    def is_stale(self, version: int) -> bool:
        return any(held is None or held < version for held in self._generator.weights_version())

    def close(self) -> None:
        """Nothing is kept."""
