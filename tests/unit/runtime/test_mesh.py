"""Ranks over named axes."""

from __future__ import annotations

import itertools

import pytest

from podium.errors import ConfigError
from podium.runtime import Mesh


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh(pp=2, dp=3, tp=2)
    places = [{"pp": p, "dp": d, "tp": t} for p, d, t in itertools.product(range(2), range(3), range(2))]
    assert [mesh.coordinate(rank) for rank in range(12)] == places
    assert mesh.along("dp") == (0, 0, 1, 1, 2, 2) * 2
    assert repr(mesh) == "Mesh(pp=2, dp=3, tp=2)"


@pytest.mark.parametrize(
    ("output", "axis", "ranks"),
    [
        ({}, "dp", (0, 2, 4)),
        ({"pp": -1}, "dp", (6, 8, 10)),
        ({"pp": 1, "tp": 1}, "dp", (7, 9, 11)),
        ({"pp": -1}, "tp", (6, 7)),
        ({"pp": -1}, "pp", (0, 6)),
    ],
)
def test_one_rank_for_each_coordinate_collects(output: dict[str, int], axis: str, ranks: tuple[int, ...]) -> None:
    assert Mesh(pp=2, dp=3, tp=2, output=output).collectors(axis) == ranks


def test_meshes_compare_by_axes_in_order_and_output() -> None:
    assert Mesh(dp=2, tp=3) == Mesh({"dp": 2, "tp": 3})
    assert hash(Mesh(dp=2)) == hash(Mesh({"dp": 2}))
    assert Mesh(dp=2, tp=3) != Mesh(tp=3, dp=2)
    assert Mesh(dp=2, pp=2) != Mesh(dp=2, pp=2, output={"pp": -1})


def test_wrong_meshes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="at least one axis"):
        Mesh()
    with pytest.raises(ConfigError, match="axis 'dp' has size 0"):
        Mesh(dp=0)
    with pytest.raises(ConfigError, match=r"no axis 'tp' in Mesh\(dp=2\); its axes are \['dp'\]"):
        Mesh(dp=2).collectors("tp")
    with pytest.raises(ConfigError, match="output of axis 'pp' is at 2"):
        Mesh(pp=2, output={"pp": 2})
    with pytest.raises(ConfigError, match="no axis 'tp'"):
        Mesh(pp=2, output={"tp": 0})
    for output, says in (
        ({"pp": "last"}, "output of axis 'pp' is 'last'"),
        (["pp"], r"output=\['pp'\]: expected an axis"),
    ):
        with pytest.raises(ConfigError, match=says):
            Mesh(pp=2, output=output)  # pyright: ignore[reportArgumentType] - the point
    for coordinates in ("ab", [(0, 0), (0, 1)]):
        with pytest.raises(ConfigError, match=r"rank 0 is at .*expected axes and numbers, as in"):
            Mesh.from_coordinates(coordinates)  # pyright: ignore[reportArgumentType] - the point
    with pytest.raises(ConfigError, match="rank 4 is outside"):
        Mesh(dp=4).coordinate(4)
