"""What a handle and its annotation are at run time. tests/typing shows what they are to a type checker."""

from collections.abc import Iterator
from typing import Any

import pytest

import podium
from podium import Cluster, Handle, Worker, colocate, endpoint
from podium.errors import ConfigError
from podium.runtime import Colocated


class Echo(Worker):
    label = "a"

    @property
    def size(self) -> int:
        return 1

    @endpoint
    def echo(self, value: int) -> int:
        return value


class Louder(Echo):
    pass


class Other(Worker):
    pass


class Pair(Colocated):
    first: Handle[Echo]
    second: "Handle[Other] | None"
    third: "Handle[Other]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with podium.connect("inline") as cluster:
        yield cluster


def test_colocated_workers_are_of_the_classes_that_are_declared() -> None:
    given: dict[str, Any] = {"first": Louder.bind(), "second": Other.bind(), "third": Other.bind()}
    assert colocate(Pair, **given).kwargs == given
    with pytest.raises(ConfigError, match=r"colocate\(Pair, .*declares first as Handle\[Echo\]; given is Other\.bind"):
        colocate(Pair, **{**given, "first": Other.bind()})
    with pytest.raises(ConfigError, match=r"declares third as Handle\[Other\]; given is Echo\.bind"):
        colocate(Pair, **{**given, "third": Echo.bind()})

    class Local(Worker):
        pass

    class Mine(Colocated):
        one: "Handle[Local]"

    assert colocate(Mine, one=Local.bind()).cls is Mine


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("size", r"'size' is no endpoint .*; Echo\.size is no method: group\.run\(lambda worker: worker\.size\) reads"),
        ("label", r"Echo\.label is no method: group\.run\(lambda worker: worker\.label\) reads it"),
        ("bind", r"'bind' is no endpoint of Echo; its endpoints are \['echo'\]$"),
        ("ctx", r"'ctx' is no endpoint of Echo; its endpoints are \['echo'\]$"),
    ],
)
def test_what_a_class_has_besides_endpoints_is_named(cluster: Cluster, name: str, says: str) -> None:
    handle = cluster.start(Echo.bind(), name=f"named_{name}")
    with pytest.raises(AttributeError, match=says):
        getattr(handle, name)


def test_a_worker_has_no_group() -> None:
    with pytest.raises(AttributeError, match=r"Echo\.group exists on the controller's handle"):
        getattr(Echo(), "group")  # noqa: B009 - a type checker reports the attribute


def test_an_attribute_of_a_handle_cannot_be_set_and_a_number_is_no_pool(cluster: Cluster) -> None:
    handle: Any = cluster.start(Echo.bind(), name="fixed")
    with pytest.raises(
        AttributeError, match=r"fixed\.level cannot be set: .*fixed\.group\.run\(setattr, 'level', value\)"
    ):
        handle.level = 3
    handle.group.run(setattr, "level", 7)
    assert handle.group.run(getattr, "level") == [7]
    number: Any = 2
    with pytest.raises(ConfigError, match=r"start\(pool=2\): a pool is reserved by the cluster, as cluster\.pool\(2\)"):
        cluster.start(Echo.bind(), number)
