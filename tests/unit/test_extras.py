"""Commands that errors propose install other people's packages, and never Podium, whose name may be somebody else's."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.extras import install_command
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
