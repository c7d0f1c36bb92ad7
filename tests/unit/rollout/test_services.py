"""The doors of packages that run sessions and that speak HTTP: what they say where none is installed, and that
podium-agents and podium-serve fit them.
"""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pytest

from podium.cli import find_commands, main
from podium.config import build_config
from podium.errors import ConfigError
from podium.rollout.environments import SessionPackage, load_rollout_worker, load_sessions
from podium.trainer import PRELOAD, GRPOConfig
from podium.trainer.checks.preflight import check_services, check_settings
from podium.trainer.sessions import Sessions
from podium_agents.services import HttpService, load_service, open_gateway

REMEDY = r"pip install \./plugins/podium-NAME"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no package be installed but Podium, and the one that runs sessions."""
    monkeypatch.setattr(
        "podium.functions.list_entry_points",
        lambda **names: entry_points(**names) if names["group"] == "podium.sessions" else (),
    )
    monkeypatch.setattr("podium.cli.list_entry_points", lambda **_: ())


def test_the_installed_service_has_the_functions_of_the_contract() -> None:
    service = load_service("a test")
    names = [name for name in vars(HttpService) if not name.startswith("_")]
    assert len(names) == 4
    for name in names:
        wanted = [*inspect.signature(getattr(HttpService, name)).parameters][1:]
        assert [*inspect.signature(getattr(service, name)).parameters][: len(wanted)] == wanted
    assert find_commands()["serve"].load()


def test_the_package_of_sessions_has_what_the_contract_names() -> None:
    sessions = load_sessions("a test")
    for name in SessionPackage.__annotations__:
        assert callable(getattr(sessions, name))
    for name in ("list_arguments", "check_services", "connect_engine", "serve_engine"):
        wanted = [*inspect.signature(getattr(SessionPackage, name)).parameters][1:]
        assert [*inspect.signature(getattr(sessions, name)).parameters] == wanted
    assert {name for name in vars(Sessions) if not name.startswith("_")} <= {*vars(sessions.Sessions)}
    assert load_rollout_worker("a test").__module__ in PRELOAD


def test_without_a_package_of_sessions_a_run_in_an_environment_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("podium.functions.list_entry_points", lambda **_: ())
    config = build_config(GRPOConfig, {"environment": {"name": "tests.unit.rollout.test_services:play"}})
    with pytest.raises(ConfigError, match=f"environment.name = 'tests.* a package that runs sessions.*{REMEDY}"):
        check_settings(config)
    for load in (load_rollout_worker, load_sessions):
        with pytest.raises(ConfigError, match=f"a test needs a package that runs sessions.*{REMEDY}"):
            load("a test")


def test_without_a_service_the_error_says_what_needs_it_and_how_to_install_one(bare: None) -> None:
    with pytest.raises(ConfigError, match=f"a test needs a package for HTTP.*{REMEDY}"):
        load_service("a test")
    with pytest.raises(ConfigError, match=f"environment.options.host and ports needs.*{REMEDY}"):
        open_gateway("0.0.0.0", (0,))
    with pytest.raises(ConfigError, match=f"environment.options.host and ports needs.*{REMEDY}"):
        open_gateway("127.0.0.1", (8900,))


def test_sessions_without_an_address_need_no_service(bare: None) -> None:
    gateway, service = open_gateway("127.0.0.1", range(1)), Any

    async def live() -> None:
        async with gateway.open(service, "1-1") as address:  # type: ignore[arg-type] - a gateway without HTTP asks none
            key = gateway.keys.key_of("1-1-0")
            assert gateway.keys.scope_of(key) == "1-1-0"
            with pytest.raises(ConfigError, match=f"an agent that requests the address of the model.*{REMEDY}"):
                address()

    asyncio.run(live())
    gateway.close()


def test_the_command_that_is_missing_is_answered_by_the_packages_that_bring_commands(
    bare: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "runs/one"])
    error = capsys.readouterr().err
    assert "there is no command 'serve'" in error and "pip install ./plugins/podium-NAME" in error


@pytest.mark.parametrize(
    ("layout", "name"), [("split", "tests.unit.rollout.test_services:play"), ("colocated", "service")]
)
def test_a_run_whose_sessions_need_a_service_is_refused_before_its_workers_start(
    bare: None, layout: str, name: str
) -> None:
    config = build_config(GRPOConfig, {"environment": {"name": name}, "placement": {"layout": layout}})
    with pytest.raises(ConfigError, match=f"needs a package for HTTP.*{REMEDY}"):
        check_services(config)


def test_a_run_whose_sessions_stay_in_their_processes_needs_no_service(bare: None) -> None:
    environment = {"name": "tests.unit.rollout.test_services:play"}
    check_services(build_config(GRPOConfig, {"environment": environment, "placement": {"layout": "colocated"}}))


async def play(task: Any, client: Any) -> float:
    return 0.0


def test_two_packages_with_a_service_are_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("http", module, "podium.services") for module in ("first_package", "second_package")]
    monkeypatch.setattr("podium.functions.list_entry_points", lambda **_: entries)
    with pytest.raises(ConfigError, match="first_package and second_package: uninstall all of them but one"):
        load_service("a test")
