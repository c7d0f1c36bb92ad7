"""The names of the package: each function has one, and without the package each is answered by its command."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, AlgorithmConfig, NamedFunctions, check_functions
from podium.cli.presets import list_presets, read_preset
from podium.errors import ConfigError

FOLDER = Path(__file__).parents[1]
GROUPS: dict[str, Any] = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"]
KINDS = {"advantages": ADVANTAGES, "losses": LOSSES, "corrections": CORRECTIONS}


@pytest.mark.parametrize("kind", KINDS)
def test_each_module_is_a_name_of_its_group(kind: str) -> None:
    modules = {path.stem for path in (FOLDER / "src" / "podium_algorithms" / kind).glob("*.py")} - {"__init__"}
    assert modules == GROUPS[f"podium.{kind}"].keys()
    for name in modules:
        assert KINDS[kind].declaration(name).function == f"podium_algorithms.{kind}.{name}:{name}"


def test_the_core_names_no_function_of_the_package() -> None:
    names = {name for kind in KINDS for name in GROUPS[f"podium.{kind}"]} - {"pass_at_k"}  # a figure of the core's, too
    word = re.compile(rf"\b({'|'.join(names)})\b")
    named = list[str]()
    for path in Path(podium.__file__).parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings and help of settings
        texts = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in prose)
        named += [f"{path.name}:{node.lineno}: {node.value}" for node in texts if word.search(str(node.value))]
    assert named == []


def test_each_preset_is_a_file() -> None:
    files = {path.stem for path in (FOLDER / "src" / "podium_algorithms" / "presets").glob("*.yaml")}
    assert files == GROUPS["podium.presets"].keys() <= {*list_presets()}


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_others(group: str, name: str | None = None) -> EntryPoints:
        entries = [entry for entry in entry_points(group=group) if name in (None, entry.name)]
        return EntryPoints(entry for entry in entries if not entry.value.startswith("podium_algorithms"))

    for module in ("functions", "algorithms.declarations", "cli.presets"):
        monkeypatch.setattr(f"podium.{module}.list_entry_points", list_others)


@pytest.mark.everyday("functions5-maxrl", "functions16-sapo", "functions20-kpop")
@pytest.mark.parametrize(
    ("functions", "name"), [(KINDS[kind], name) for kind in KINDS for name in GROUPS[f"podium.{kind}"]]
)
def test_a_name_is_answered_by_the_command_that_installs_it(
    functions: NamedFunctions, name: str, without_package: None
) -> None:
    assert name not in functions
    values: dict[str, Any] = {functions.key.partition(".")[2]: name}
    with pytest.raises(ConfigError, match=rf"{functions.key} = '{name}': expected .*podium-algorithms") as caught:
        AlgorithmConfig(**values)
    assert "did you mean" not in str(caught.value)


def test_a_preset_is_answered_by_the_command_that_installs_it(without_package: None) -> None:
    assert "dppo" not in list_presets()
    with pytest.raises(ConfigError, match=r"--recipe dppo: there is no such preset.*podium-algorithms") as caught:
        read_preset("dppo")
    assert "did you mean" not in str(caught.value)


def test_a_package_of_anybodys_may_name_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is code of a user's until it is installed where Python installs packages."""
    entry = EntryPoint("mine", "podium_algorithms.losses.gmpo:gmpo", LOSSES.group)

    def list_mine(group: str, **wanted: Any) -> EntryPoints:
        return EntryPoints([entry]).select(group=group, **wanted)

    for module in ("functions", "algorithms.declarations"):
        monkeypatch.setattr(f"podium.{module}.list_entry_points", list_mine)
    config = AlgorithmConfig(loss="mine")
    check_functions(config)
    assert config.clip_bounds == (0.4, 0.4)
    assert "mine" not in LOSSES
