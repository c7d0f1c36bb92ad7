"""Ranks laid out over named axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from podium.errors import ConfigError

__all__ = ["Mesh"]


class Mesh:
    """World ranks as a grid of named axes, the last axis varying fastest.

    ``output`` says at which coordinate of an axis a result comes out. Results of the other axes come out at coordinate
    0. Results of a pipeline come out at its last stage:

    >>> mesh = Mesh(pp=2, dp=2, tp=2, output={"pp": -1})
    >>> mesh.coordinate(5)
    {'pp': 1, 'dp': 0, 'tp': 1}
    >>> mesh.collectors("dp")
    (4, 6)

    Raises:
        ConfigError: There are no axes, a size is below 1, or an ``output`` is outside its axis.
    """

    def __init__(
        self, axes: Mapping[str, int] | None = None, /, *, output: Mapping[str, int] | None = None, **sizes: int
    ) -> None:
        self.axes: dict[str, int] = {**(axes or {}), **sizes}
        if not self.axes:
            raise ConfigError("a mesh needs at least one axis, as in Mesh(dp=4)")
        for axis, size in self.axes.items():
            if size < 1:
                raise ConfigError(f"mesh axis {axis!r} has size {size}; sizes start at 1")
        self.output: dict[str, int] = {}
        for axis, at in (output or {}).items():
            if not -self.axis_size(axis) <= at < self.axis_size(axis):
                raise ConfigError(f"output of axis {axis!r} is at {at}, but the axis has {self.axes[axis]} coordinates")
            self.output[axis] = at % self.axes[axis]
        self.size = math.prod(self.axes.values())
        grid = itertools.product(*(range(size) for size in self.axes.values()))
        self._places = [dict(zip(self.axes, place, strict=True)) for place in grid]
        self._collectors: dict[str, tuple[int, ...]] = {}  # by axis: every call that shards asks

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.axes.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (repr(self), self.output) == (repr(other), other.output)

    def __hash__(self) -> int:
        return hash(repr(self))

    def axis_size(self, axis: str) -> int:
        """Number of coordinates along ``axis``; ConfigError names the axes there are."""
        try:
            return self.axes[axis]
        except KeyError:
            raise ConfigError(f"no axis {axis!r} in {self}; its axes are {list(self.axes)}") from None

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on each axis."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank {rank} is outside {self} of {self.size} ranks")
        return dict(self._places[rank])

    def along(self, axis: str) -> tuple[int, ...]:
        """For each rank in order, its coordinate on ``axis``."""
        self.axis_size(axis)
        return tuple(place[axis] for place in self._places)

    def collectors(self, axis: str) -> tuple[int, ...]:
        """One rank for each coordinate of ``axis``, in that order: the ranks whose results are taken."""
        if axis not in self._collectors:
            self.axis_size(axis)
            others = {name: self.output.get(name, 0) for name in self.axes if name != axis}
            chosen = (rank for rank, place in enumerate(self._places) if others.items() <= place.items())
            self._collectors[axis] = tuple(chosen)
        return self._collectors[axis]
