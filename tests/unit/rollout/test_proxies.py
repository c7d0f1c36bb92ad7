"""Addresses that are asked without the proxy of the environment, as Python and its HTTP clients read that."""

from __future__ import annotations

import os
from urllib.request import getproxies, proxy_bypass

import pytest

from podium_agents.proxies import spare_proxy

NAMES = ("no_proxy", "NO_PROXY")


@pytest.fixture(autouse=True)
def behind_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example.org:3128")
    for name in NAMES:
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("name", NAMES)
def test_an_address_is_spared_beside_what_the_user_spares(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read one of the two variables, most of them the first that is there."""
    monkeypatch.setenv(name, "intern.example.org, 10.0.0.1")
    assert not proxy_bypass("node7")
    for _ in range(2):
        assert spare_proxy("http://node7:4321/v1") == "http://node7:4321/v1"
    assert [os.environ[each] for each in NAMES] == ["intern.example.org,10.0.0.1,node7"] * 2
    assert all(map(proxy_bypass, ("node7", "intern.example.org", "10.0.0.1")))
    assert not proxy_bypass("example.com") and getproxies()["http"] == "http://proxy.example.org:3128"


def test_what_is_spared_or_needs_no_proxy_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    spare_proxy("http://node7:4321/v1")
    assert [os.environ[name] for name in NAMES] == ["*", "*"]
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    spare_proxy("http://node7:4321/v1")
    assert not any(name in os.environ for name in NAMES)


@pytest.mark.parametrize(
    ("url", "is_spared"),
    [
        ("http://localhost:8000/mcp", True),
        ("ws://127.0.0.2:8000/ws", True),
        ("http://[::1]:8000", True),
        ("https://mcp.example.org", False),
        ("http://10.0.0.2:8000", False),
    ],
)
def test_of_addresses_that_a_user_names_those_of_this_machine_are_spared(url: str, is_spared: bool) -> None:
    spare_proxy(url, only_here=True)
    assert (os.environ["no_proxy"] != "") == is_spared
