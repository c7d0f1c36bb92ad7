"""Handles of colocated workers."""

from __future__ import annotations

import pytest

import podium
from podium import Worker, colocate, endpoint
from podium.errors import ConfigError


class Named(Worker):
    @endpoint
    def role(self) -> str:
        return self.ctx.role


@pytest.mark.parametrize("name", ["values", "items", "keys", "get", "__len__", "__dict__"])
def test_a_name_that_the_mapping_of_handles_needs_itself_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be named '{name}'"):
        colocate(**{"actor": Named.bind(), name: Named.bind()})


def test_handles_are_found_as_attributes_and_as_a_mapping() -> None:
    with podium.connect("inline") as cluster:
        both = cluster.start(colocate(actor=Named.bind(), _critic=Named.bind()), distributed=False)
        assert list(both) == ["actor", "_critic"]
        assert [handle.role() for handle in both.values()] == [["actor"], ["_critic"]]
        assert both["actor"] is both.actor
        assert both._critic is both["_critic"]
        with pytest.raises(AttributeError, match=r"no worker 'policy' here; there are \['_critic', 'actor'\]"):
            both.policy  # noqa: B018 - it raises
