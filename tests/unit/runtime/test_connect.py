"""Backends by name, and errors that survive a process boundary."""

from __future__ import annotations

import inspect
import pickle

import pytest

import podium
from podium import errors
from podium.errors import ConfigError, PodiumError
from podium.runtime import backends


def test_podiums_own_backends_come_through_the_public_door() -> None:
    assert {"inline", "local"} <= set(backends())


def test_an_unknown_backend_or_option_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no backend 'locall'.*'inline', 'local'.*did you mean 'local'"):
        podium.connect("locall")
    with pytest.raises(ConfigError, match=r"connect\('inline'\): .*'thread'"):
        podium.connect("inline", thread=True)
    with pytest.raises(ConfigError, match=r"connect\('local', preload='torch'\).*\['torch'\]"):
        podium.connect("local", preload="torch")
    for backend in ("inline", "local"):
        with pytest.raises(ConfigError, match="at least one"):
            podium.connect(backend, nodes=0)


def test_several_pretended_nodes_make_a_layout() -> None:
    with podium.connect("inline", nodes=2) as cluster:
        assert [slot.node for slot in cluster.pool([1, 2])] == ["node-1", "node-0", "node-0"]
        assert repr(cluster) == "<Cluster inline groups=[]>"


def tree() -> list[type[PodiumError]]:
    found = [value for name, value in vars(errors).items() if inspect.isclass(value) and name in errors.__all__]
    return [cls for cls in found if issubclass(cls, PodiumError)]


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_every_error_pickles_with_all_it_carries(cls: type[PodiumError]) -> None:
    extra = {
        "WorkerDied": {"rank": 1, "node": "n", "cause": "signal SIGKILL", "role": "r", "last_words": ["a", "b"]},
        "EndpointError": {"method": "m", "rank": 2, "role": "r", "remote_traceback": "tb"},
        "WorkerStartError": {"rank": 3, "remote_traceback": "tb"},
        "DeadlineExceeded": {"method": "m", "running": [1, 2]},
    }.get(cls.__name__, {})
    error = cls("what happened", **extra)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (str(again), again.__dict__) == ("what happened", error.__dict__)
    assert {name for name in extra if hasattr(again, name)} == set(extra)


def test_errors_are_also_what_python_would_raise() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
