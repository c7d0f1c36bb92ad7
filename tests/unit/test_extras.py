"""Commands that errors propose install other people's packages, and never Podium, whose name may be somebody else's."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from podium.extras import explain_packages, install_command
from tests.unit.test_package import canonical

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
SOURCES = sorted([*(ROOT / "src").rglob("*"), *ROOT.glob("plugins/*/src/**/*")])


def read_extras() -> Iterator[tuple[str, str]]:
    """Each package with each of its extras, but for that of its developers, which no error proposes."""
    for path in PROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        yield from ((project["name"], extra) for extra in project.get("optional-dependencies", ()) if extra != "dev")


def read_texts(path: Path) -> Iterator[str]:
    """The texts of a source file. An expression in a formatted text is {}, and texts in a row are one."""
    if path.suffix == ".yaml":
        yield path.read_text()
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize(("package", "extra"), [*read_extras()])
def test_the_command_names_the_packages_of_the_extra(package: str, extra: str) -> None:
    path = ROOT / "pyproject.toml" if package == "podium" else ROOT / "plugins" / package / "pyproject.toml"
    extras = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    wanted: set[str] = set()
    for item in extras[extra]:
        nested = re.fullmatch(r"podium\[(.*)\]", item)
        wanted |= {canonical(part) for part in extras[nested[1]]} if nested else {canonical(item)}
    words = shlex.split(install_command(extra, package=package))
    assert words[:2] == ["pip", "install"]
    assert {canonical(word) for word in words[2:]} >= wanted - {"podium"}
    assert not any(word.startswith("podium") for word in words)


def test_the_command_can_name_a_package_of_the_extra_alone() -> None:
    assert re.fullmatch(r"pip install 'httpx>=[\d.]+'", install_command("renderers", "httpx", package="podium-agents"))


def test_without_metadata_the_command_names_the_extra_or_the_package() -> None:
    assert install_command("math", package="not-installed") == "pip install math"
    assert install_command("agents", "httpx", package="not-installed") == "pip install httpx"


def test_no_text_proposes_to_install_podium_by_name() -> None:
    """A command is that of install_command, or installs what lies here (-e .), or one package by its plain name."""
    commands: list[str] = []
    for path in SOURCES:
        if path.suffix in (".py", ".yaml"):
            for text in read_texts(path):
                assert "podium[" not in text, path
                commands += re.findall(r"pip install\s+(\S+)", text)
    plain = {
        "flash-attn",
        "inspect-ai",
        "lighteval[litellm]",
        "lm-eval[api]",
        "/plugins/podium-NAME",
        "/plugins/podium-vllm",
    }
    assert {command.strip("`'\".,);}") for command in commands} <= {*plain, "-e", "command"}
    assert len(commands) >= 3


@pytest.mark.parametrize(
    ("path", "group", "name"),
    sorted(
        (path.parent.name, group, name)
        for path in PROJECTS[1:]
        for group, names in tomllib.loads(path.read_text())["project"].get("entry-points", {}).items()
        for name in names
    ),
)
def test_in_a_clone_the_command_is_that_of_the_package_that_has_the_name(
    monkeypatch: pytest.MonkeyPatch, path: str, group: str, name: str
) -> None:
    """Podium knows no names of packages: the clone that it was installed from does."""
    install_from(monkeypatch, {"url": ROOT.as_uri(), "dir_info": {}})
    text, _, command = explain_packages(group, name).partition("; the missing one by: pip install ")
    assert text.endswith("podium-NAME")
    project = tomllib.loads((ROOT / "plugins" / path / "pyproject.toml").read_text())["project"]
    needed = {canonical(line) for line in project["dependencies"]} & {file.parent.name for file in PROJECTS[1:]}
    assert set(command.split()) == {f"{ROOT}/plugins/{directory}" for directory in {path, *needed}}


@pytest.mark.parametrize(
    "origin",
    [
        None,
        {"url": (ROOT / "dist/podium-0.1.0-py3-none-any.whl").as_uri(), "archive_info": {}},
        {"url": "https://github.com/podium-rl/podium", "vcs_info": {"vcs": "git", "commit_id": "0"}},
        {"url": "file:///nonexistent", "dir_info": {}},
    ],
)
def test_without_a_clone_the_command_names_no_package(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None
) -> None:
    install_from(monkeypatch, origin)
    assert explain_packages("podium.sessions", "sessions").endswith("by: pip install ./plugins/podium-NAME")


def test_a_name_of_no_package_and_a_broken_package_have_no_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / "a clone" / "plugins"
    for name, text in {
        "podium-broken": "[project",
        "podium-whole": "[project.entry-points.'podium.engines']\nx = 'y'",
    }.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "pyproject.toml").write_text(text)
    install_from(monkeypatch, {"url": directory.parent.as_uri(), "dir_info": {"editable": True}})
    assert explain_packages("podium.engines", "x").endswith(f": pip install '{directory}/podium-whole'")
    for group, name in (("podium.engines", "z"), ("podium.engines", ""), ("podium.backends", "x")):
        assert explain_packages(group, name).endswith("by: pip install ./plugins/podium-NAME")


def install_from(monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None) -> None:
    """Let Podium's metadata say that pip installed it from there."""
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr("podium.extras.distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
