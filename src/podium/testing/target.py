"""The backend under test, and checks that many tests share."""

from collections.abc import Callable
from typing import Any, Literal

import pytest

import podium
from podium.runtime import Bound, Capabilities, Cluster

__all__ = ["Target", "need", "refuses", "started"]


class Target:
    """A backend by name with the options of ``podium.connect``."""

    def __init__(self, backend: str, **options: Any) -> None:
        self.backend = backend
        self.options = options

    def __str__(self) -> str:
        return "-".join([self.backend, *(f"{name}={value}" for name, value in self.options.items())])

    def connect(self) -> Cluster:
        """Return a new cluster, which the caller closes."""
        return podium.connect(self.backend, **self.options)


def need(cluster: Cluster, *names: str) -> None:
    """Skip the test unless the backend declares all of these fields of :class:`~podium.runtime.Capabilities`."""
    can: Capabilities = cluster.capabilities
    for name in names:
        if not getattr(can, name):
            pytest.skip(f"backend {cluster.backend_name!r} declares {name}=False")


def started(bound: Bound[Any], slots: int, *, scope: Literal["class", "function"] = "class", **options: Any) -> Any:
    """Return a fixture: a group in a pool of its own. ``options`` are those of ``cluster.start``."""

    @pytest.fixture(scope=scope)
    @classmethod
    def group(cls: type[object], cluster: Cluster) -> Any:
        return cluster.start(bound, cluster.pool([slots]), **options)

    return group


def refuses(error: type[Exception], says: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Check that a call raises ``error`` with a message that matches ``says``."""
    with pytest.raises(error, match=says):
        function(*args, **kwargs)
