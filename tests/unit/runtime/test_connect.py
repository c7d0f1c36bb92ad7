"""Connecting by name."""

from __future__ import annotations

import pytest

import podium
from podium.errors import ConfigError


def test_hints_are_for_backends_that_know_them() -> None:
    with podium.connect("inline", hints={"nodes": 3, "colour": "red"}) as cluster:
        assert len(cluster.nodes) == 3
    with podium.connect("inline", hints={"nodes": 3}, nodes=2) as cluster:
        assert len(cluster.nodes) == 2


def test_an_option_that_the_backend_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"connect\('inline'\).*colour"):
        podium.connect("inline", colour="red")


def test_a_name_that_is_no_backend_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        podium.connect("locla")
