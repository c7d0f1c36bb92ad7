"""The files at the root, which people and their tools read first, say what is true."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import podium
from podium.cli import COMMANDS
from podium.models import char_tokenizer
from podium.runs.config import InferenceConfig
from podium.runs.recipes import find_recipe, list_recipes
from podium.trainer import keys_of
from tests.integration.training import MODEL, write_copy_task
from tests.warm_python import run_python

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOME = "https://github.com/podium-rl/podium"
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "AGENTS.md", "llms.txt")
COMMAND_PAGES = (
    "README.md",
    "docs/quick-start.md",
    "docs/coming-from-trl.md",
    "docs/rewards.md",
    "docs/serve.md",
    "llms.txt",
    *(f"plugins/{path.parent.name}/README.md" for path in sorted((ROOT / "plugins").glob("*/README.md"))),
)


@pytest.mark.parametrize("name", ROOT_PAGES)
def test_every_link_of_a_page_at_the_root_leads_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path, _, anchor = target.partition("#")
        if path.startswith("https:"):
            continue
        assert (ROOT / path).exists(), target
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}, (
            target
        )


def test_the_readme_is_two_screens_with_a_picture() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 118
    pictures = re.findall(r"!\[([^\]]+)\]\((\S+)\)", text)
    assert len(pictures) == 1
    for description, path in pictures:
        assert len(description) > 40, "for those who do not see the picture"
        assert (ROOT / path).read_text().lstrip().startswith(("<svg", "<?xml"))


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_the_packages_that_make_env_installs_are_in_the_commands_of_a_page(page: str) -> None:
    """What a page shows then works: a command, the dry run, the fast engine, the curve."""
    (names,) = re.findall(
        r"^RUNTIME_PLUGINS := \$\(addprefix plugins/podium-,(.*)\)$", (ROOT / "Makefile").read_text(), re.M
    )
    text = (ROOT / page).read_text()
    listed = {name for group in re.findall(r"plugins/podium-\{([\w,]+)\}", text) for name in group.split(",")}
    listed |= {*re.findall(r"pip install .*?plugins/podium-(\w+)", text)}
    optional = {"agents", "preferences"} if page.startswith("docs") else set[str]()  # their pages have the command
    assert {*names.split()} - optional <= listed


def test_the_picture_of_the_terminal_loads_nothing_from_elsewhere() -> None:
    for path in (ROOT / "docs" / "pictures").glob("*.svg"):
        links = re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|url\(['\"]?(?!#)[^)]*\)|@import", path.read_text())
        assert links == [], path.name


@pytest.mark.parametrize("name", COMMAND_PAGES)
def test_the_commands_of_a_page_have_commands_and_keys_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    projects = [tomllib.loads(path.read_text())["project"] for path in ROOT.glob("plugins/*/pyproject.toml")]
    plugin_commands = {
        name for project in projects for name in project.get("entry-points", {}).get("podium.commands", ())
    }
    found = re.findall(r"(?:^|`)podium (\w+)(?: +([^#\n`]*))?", text, re.MULTILINE)
    assert found
    for command, rest in found:
        assert command in [*COMMANDS, *plugin_commands], command
        words = [word for word in shlex.split(rest or "") if word != "…"]
        recipe = words[0] if words and words[0] in list_recipes() else ""
        known = {key.path for key in keys_of(find_recipe(recipe).config if recipe else InferenceConfig)}
        for word in words:
            key = word.removeprefix("--").partition("=")[0]
            if word.startswith("--") and "." in key and not key.startswith("backend."):
                assert key in known or name == "docs/coming-from-trl.md", f"{command} {word}"


def test_the_script_of_the_readme_trains_as_printed(tmp_path: Path) -> None:
    """On a model of that name in the working directory, and for a step of a few prompts."""
    (script,) = re.findall(r"```python\n(# train.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in script.splitlines()[1:] if line]) == 8
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL["config"])).save_pretrained(
        tmp_path / "Qwen/Qwen3-0.6B"
    )
    char_tokenizer("0123456789= ").save_pretrained(tmp_path / "Qwen/Qwen3-0.6B")
    write_copy_task(tmp_path).rename(tmp_path / "train.jsonl")
    shorter = "run={'steps': 1}, batch={'prompts': 2}, sampling={'max_new_tokens': 2, 'n': 2}, eval={'items': 2}"
    (tmp_path / "train.py").write_text(
        script.replace('"train.jsonl")', f'"train.jsonl"), {shorter}').replace(
            "reward=reward)", "reward=reward, cluster='inline')"
        )
    )
    done = run_python("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out" in done.stdout
    names: dict[str, Any] = {}
    exec(script.partition("\nconfig = ")[0], names)
    assert [names["reward"](" 4 ", {"answer": answer}) for answer in ("4", 4, 5)] == [1.0, 1.0, 0.0]
    assert "--reward.name reward.py:reward" in (ROOT / "README.md").read_text()


def test_version_date_and_home_are_written_alike() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)[0]
    assert (version, date) == (podium.__version__, str(citation["date-released"]))
    assert citation["version"] == version
    assert citation["repository-code"] == HOME
    assert all(url.startswith(HOME) for url in PROJECT["project"]["urls"].values())


def test_continuous_integration_runs_the_same_as_here_on_the_oldest_and_the_newest_python() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    named = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line]
    assert job["strategy"]["matrix"]["python"] == [named[0], named[-1]]
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(template.read_text())


def test_the_rewards_of_the_pages_know_an_answer_that_is_a_number() -> None:
    """Data may hold text or a number as the answer; a comparison with a number would score 0 without an error."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r'== (row|example)\["(answer|solution)"\]', page.read_text()), page


def test_the_map_of_contributing_is_the_house() -> None:
    """It names every package and module of src/podium, floor by floor, and every plugin."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    diagram = re.search(r"```\nsrc/podium/(.*?)plugins/(.*?)```", text, flags=re.DOTALL)
    assert diagram is not None
    names = [name.removesuffix("/").removesuffix(".py") for name in re.findall(r"^  (\w\S*)", diagram[1], re.MULTILINE)]
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    floors = {name: number for number, layer in enumerate(layers) for name in layer.split(" | ")}
    assert sorted(names) == sorted(floors)
    assert [floors[name] for name in names] == sorted(floors.values())
    assert set(re.findall(r"podium-\w+", diagram[2])) == {path.parent.name for path in ROOT.glob("plugins/*/README.md")}
    rooms = re.findall(r"^    (\w+)/", diagram[1], re.MULTILINE)
    folders = [
        path.parent.name
        for name in ("trainer", "rollout")
        for path in (ROOT / "src/podium" / name).glob("*/__init__.py")
    ]
    assert sorted(rooms) == sorted(folders)
