"""Environments of installed packages are found by name through the entry point group ``podium.environments``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.config import config_to_yaml
from podium.errors import ConfigError
from podium.rollout.engines import find_engines
from podium.rollout.environments import EnvironmentConfig, find_environments
from podium.runs.named_code import check_code
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium_agents.environments.resolve import resolve_environment
from tests.integration.test_environments import TEMPLATE
from tests.integration.training import metrics_rows, tiny

COUNTING = '''
from podium_agents import Step


class Counting:
    """The model is asked twice for digits."""

    def __init__(self, ask="=", judge="none", modules=(), notes=None):
        self.ask, self.turns = ask, 0

    def reset(self, task):
        return task["prompt"]

    def step(self, answer):
        self.turns += 1
        digits = sum(character.isdigit() for character in answer)
        return Step(say=self.ask, reward=digits / 3, done=self.turns == 2)

    @staticmethod
    def tasks(split):
        return [{"prompt": f"{number}=", "answer": None} for number in range(20)]
'''
MODULES = {
    "counting": COUNTING,
    "raising": "raise RuntimeError('no driver')",
    "unwritten": "def (",
    "lacking": "import a_library_that_is_not_there",
    "empty": "",
    "constant": "Environment = 3",
    "plain": "class Environment: ...",
}


def write_package(folder: Path, name: str, points: dict[str, str], group: str = "podium.environments") -> None:
    """Write the metadata that pip leaves of an installed package, in which entry points stand."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{point} = {value}\n" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an environment that works and some that do not."""
    site = tmp_path / "site"
    site.mkdir()
    for name, text in MODULES.items():
        (site / f"{tmp_path.name}_{name}.py").write_text(text)  # no module of another test has this name
    points = {name: f"{tmp_path.name}_{name}:Environment" for name in MODULES}
    points |= {"counting": f"{tmp_path.name}_counting:Counting", "absent": "a_module_that_is_not_there:Environment"}
    write_package(site, "podium-worlds", points)
    monkeypatch.syspath_prepend(site)


def options_of(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """The sections of a run in the environment of the package."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return {
        "data": {"train": "", "chat_template": str(tmp_path / "chat.jinja")},
        "environment": {"name": "counting", "options": options},
    }


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_an_environment_of_a_package_is_trained_in_by_its_name(processes: int, tmp_path: Path) -> None:
    sections = options_of(tmp_path, ask="+", processes=processes)
    config = tiny(GRPOConfig, tmp_path, **sections, run={"steps": 1}, batch={"prompts": 2}, eval={"items": 2})
    PPOTrainer(config, cluster="inline", show=False).fit()
    (row,) = metrics_rows(tmp_path / "runs" / "run")
    assert (row[metrics.SESSIONS_FAILED], row[metrics.SESSIONS_TURNS]) == (0, 2)
    assert row[metrics.MISMATCH_MAX] < 1e-5
    assert row[metrics.REWARD_MEAN] > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raising", r"cannot be loaded: .*_raising\.py:1: RuntimeError: no driver$"),
        ("unwritten", r"cannot be loaded: .*_unwritten\.py:1: SyntaxError"),
        ("lacking", r"cannot be loaded: .*_lacking\.py:1: ModuleNotFoundError: No module named 'a_library_that_is"),
        ("empty", "cannot be loaded: AttributeError: module '.*_empty' has no attribute 'Environment'"),
        ("absent", "cannot be loaded: ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("constant", "is no class or function but of type int"),
    ],
)
def test_a_package_that_is_broken_is_named_with_its_error(name: str, says: str) -> None:
    start = rf"^environment\.name = '{name}': \w+:Environment of the package podium-worlds "
    with pytest.raises(ConfigError, match=start + says):
        resolve_environment(EnvironmentConfig(name=name))


def test_what_is_no_environment_or_has_no_such_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.name = 'plain' is no environment"):
        resolve_environment(EnvironmentConfig(name="plain"))
    with pytest.raises(ConfigError, match=r"its options are ask, judge, modules, notes.*did you mean ask"):
        resolve_environment(EnvironmentConfig(name="counting", options={"aks": "?"}))


def test_a_name_that_is_not_installed_is_answered_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo", "--environment.name", "countin"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "environment.name = 'countin': no environment of this name is installed; installed are absent" in words
    assert "did you mean counting?; an environment of your own is path/file.py:countin or module:countin" in words
    assert "packages add others through the entry point group podium.environments" in words
    assert {"counting", *MODULES} <= find_environments().keys()


def test_where_none_is_installed_the_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(
        ConfigError, match=r"none is installed; .* packages add others .* entry point group podium\.environments"
    ):
        EnvironmentConfig(name="counting")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's run with programs in it, which is the working directory. They leave a mark when they run."""
    run, mark = tmp_path / "runs" / "run", str(tmp_path / "code was run")
    (run / "model").mkdir(parents=True)
    (run / "python").write_text(f"#!/bin/sh\ntouch {mark!r}\n")
    (run / "python").chmod(0o755)
    (run / "code.py").write_text(f"open({mark!r}, 'w')\ndef play(task, client): return 1.0\n")
    monkeypatch.chdir(run)
    return run


INSIDE, ASKED = "is code in the directory of the run itself", "names code that is not Podium's own"


@pytest.mark.everyday(
    "options0-judge-is code in the directory of the run itself",
    "options2-judge-names code that is not Podium's own",
    "options4-modules-names code that is not Podium's own",
    "options6-notes-is code in the directory of the run itself",
)
@pytest.mark.parametrize(
    ("options", "key", "why"),
    [
        ({"judge": "code.py:play"}, "judge", INSIDE),
        ({"judge": "code:play"}, "judge", INSIDE),
        ({"judge": "os:system"}, "judge", ASKED),
        ({"modules": ["json", "code"]}, "modules", ASKED),
        ({"modules": [{"judge": "builtins:exec"}]}, "modules", ASKED),
        ({"judge": "model/../python"}, "judge", INSIDE),
        ({"notes": "python"}, "notes", INSIDE),  # a program is refused in any option
        ({"notes": {"a": ["../run/code.py:play"]}}, "notes.a", INSIDE),
    ],
)
def test_a_resume_and_an_evaluation_run_no_code_of_a_strangers_run(
    options: dict[str, Any], key: str, why: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(GRPOConfig, tmp_path, **options_of(tmp_path, **options))
    (run / "config.yaml").write_text(config_to_yaml(config))
    for command in (["train", "grpo", "--resume", str(run), "--dry-run"], ["eval", str(run)]):
        assert main(command) == 2
        words = " ".join(capsys.readouterr().err.split())
        assert f"environment.options.{key} = " in words
        assert why in words
    assert not (tmp_path / "code was run").exists()


@pytest.mark.parametrize("section", ["environment", "engine"])
@pytest.mark.parametrize("value", ["code:play", "code"])
def test_a_strangers_run_brings_no_code_by_metadata_of_a_package(
    value: str,
    section: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """``python -m podium`` looks for packages in the working directory, too."""
    write_package(run, "strangers", {"strange": value}, f"podium.{section}s")
    monkeypatch.syspath_prepend(run)
    find_engines.cache_clear()
    request.addfinalizer(find_engines.cache_clear)
    config = tiny(GRPOConfig, tmp_path, **{section: {"name": "strange", "options": {"judge": "none"}}})
    (run / "config.yaml").write_text(config_to_yaml(config))
    for command in (["train", "grpo", "--resume", str(run), "--dry-run"], ["eval", str(run)]):
        assert main(command) == 2
        words = " ".join(capsys.readouterr().err.split())
        assert f"{section}.name = 'strange'" in words
        assert INSIDE in words
    assert not (tmp_path / "code was run").exists()


def test_options_that_lead_nowhere_into_the_run_may_be_given_again(run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "ask": "os:system",  # not declared as code
        "judge": "math_verify:verify",
        "modules": ["random", "http://127.0.0.1:80", "~nobody: hi", "\0", "", ":", "a:", "x" * 5000, "a/b", "/bin/sh"],
        "notes": ["a: b.py: c", "y" * 5000, "~nobody/x.py:f", "\0.py:f"],
    }
    check_code(run, tiny(GRPOConfig, tmp_path, **options_of(tmp_path, **options)), ["environment"])
