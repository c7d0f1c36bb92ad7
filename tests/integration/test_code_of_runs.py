"""Code that a run names is loaded only if this user began the run, gives the name again, or has run the same code."""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.config import config_to_yaml, load_config
from podium.errors import ConfigError
from podium.functions import load_function
from podium.models import ModelConfig, load_model, load_tokenizer
from podium.rollout.engines import EngineConfig, find_engines
from podium.runs.checkpoint_folders import TrainerState
from podium.runs.named_code import list_code
from podium.trainer import GRPOConfig, PPOTrainer
from tests.integration.test_environment_plugins import write_package
from tests.integration.training import MODEL, tiny

ASKED = "names code that is not Podium's own, and there is no record on this machine"
REWARD = "import subprocess\n\n\ndef score(completion, row):\n    return float(len(completion))\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this user's records, which has none yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that a stranger's code makes."""
    return tmp_path / "code was run"


@pytest.fixture
def archive(tmp_path: Path, mark: Path) -> Path:
    """What somebody has sent: a run, and a program beside it."""
    folder = tmp_path / "archive"
    run = folder / "run"
    model = ModelConfig(**MODEL)
    load_model(model).save_pretrained(run / "model")
    load_tokenizer(model.tokenizer).save_pretrained(run / "model")
    (folder / "beside.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "def score(completion, row): return 1.0\n"
        "def sync(steps): ...\n"
        "def loss(inputs, config): ...\n"
        "async def play(task, client): return 1.0\n"
    )
    (run / "link.py").symlink_to(folder / "beside.py")
    return folder


def write_run(archive: Path, tmp_path: Path, **sections: Mapping[str, Any]) -> Path:
    """Write the configuration of the run in the archive."""
    (archive / "run" / "config.yaml").write_text(config_to_yaml(tiny(GRPOConfig, tmp_path, **sections)))
    return archive / "run"


def read_refusal(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


FUNCTIONS: dict[str, tuple[str, Any]] = {
    "a function that another module imports": ("reward.name", "torch._jit_internal:builtins.exec"),
    "a function that runs its text": ("reward.name", "sympy:sympify"),
    "a function of the standard library": ("reward.name", "runpy:run_path"),
    "a reward in a list": ("reward.name", ["exact", "torch.utils.cpp_extension:subprocess.getoutput"]),
    "a function of Podium's that is no reward": ("reward.name", "podium.functions:importlib.import_module"),
    "a name behind one of Podium's": ("reward.name", "podium.rewards.text:exact"),
    "a schedule": ("run.schedule", "torch.utils.cpp_extension:subprocess.getoutput"),
    "a file beside the run": ("reward.name", "ARCHIVE/beside.py:score"),
    "a link to a file beside the run": ("reward.name", "ARCHIVE/run/link.py:score"),
    "a schedule beside the run": ("run.schedule", "ARCHIVE/beside.py:sync"),
    "a loss": ("algorithm.loss", "ARCHIVE/beside.py:loss"),
    "an advantage": ("algorithm.advantage", "ARCHIVE/beside.py:loss"),
    "an environment": ("environment.name", "ARCHIVE/beside.py:play"),
    "a kernel of the hub": ("model.attention", "somebody/kernel"),
    "options of a loader": ("data.options", {"trust_remote_code": True}),
}


@pytest.mark.everyday(
    "a reward in a list", "a function that runs its text", "a schedule", "a file beside the run", "an environment"
)
@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_strangers_run_is_not_resumed_with_its_code(
    what: str, archive: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, value = FUNCTIONS[what]
    section, _, field = key.partition(".")
    value = json.loads(json.dumps(value).replace("ARCHIVE", str(archive)))
    run = write_run(archive, tmp_path, **{section: {field: value}})
    (run / ".lock").write_text("")
    doors = [
        ["train", "grpo", "--resume", str(run), "--dry-run"],
        ["train", "grpo", "--run.resume", str(run), "--dry-run"],
        ["train", "grpo", "--config", str(run / "config.yaml"), "--run.name", "mine", "--dry-run"],
    ]
    if section not in ("run", "algorithm", "model"):  # which an evaluation does not use
        doors.append(["eval", str(run), "--backend", "inline"])
    for door in doors:
        assert main(door) == 2, door
        refusal = read_refusal(capsys)
        assert ASKED in refusal or "is code in the directory of the run itself" in refusal, door
        assert f"--{key}" in refusal
    for resume in ({}, {"run.resume": str(run)}):
        with pytest.raises(ConfigError, match=re.escape(key)):
            load_config(GRPOConfig, run / "config.yaml", [f"--{name}={text}" for name, text in resume.items()])
    assert not mark.exists()


def install_engine(
    archive: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    name: str,
    value: str = "beside:play",
) -> None:
    """Put the metadata of a package with an engine on the path."""
    write_package(archive, "strangers", {name: value}, "podium.engines")
    monkeypatch.syspath_prepend(archive)
    find_engines.cache_clear()
    request.addfinalizer(find_engines.cache_clear)


def test_no_door_loads_the_engine_of_a_strangers_run(
    archive: Path,
    mark: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    install_engine(archive, monkeypatch, request, "strange")
    run = write_run(archive, tmp_path, engine={"name": "strange"})
    shutil.copytree(run / "model", run / "checkpoints" / "step-000001" / "policy")
    (run / "checkpoints" / "step-000001" / "trainer.json").write_text(json.dumps(asdict(TrainerState(step=1))))
    for model in (str(run), str(run / "checkpoints" / "step-000001"), f"{run}@1"):
        for door in (["eval", model], ["sample", model, "--prompt", "1="], ["serve", model, "--backend", "inline"]):
            assert main(door) == 2, door
            assert f"{ASKED} that" in read_refusal(capsys), door
    assert main(["train", "grpo", "--resume", str(run), "--dry-run"]) == 2
    assert main(["export", str(run), "--to", str(tmp_path / "exported")]) == 0  # which needs no engine
    assert not mark.exists()


@pytest.mark.parametrize("value", ["beside:play", "podium_beside:play"])
def test_no_package_takes_the_name_of_an_engine_of_podiums_own(
    archive: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, value: str
) -> None:
    install_engine(archive, monkeypatch, request, "native", value)
    if value != "beside:play":  # of two packages with one name, Python has the last one on the path last
        monkeypatch.setattr(sys, "path", [*filter(str(archive).__ne__, sys.path), str(archive)])
    assert find_engines()["native"].value == "podium_native:NativeEngine"
    assert not mark.exists()


def test_the_engine_of_an_installed_package_is_no_code_of_a_run_and_its_options_are() -> None:
    if "vllm" not in find_engines():
        pytest.skip("podium-vllm is not installed")
    config = GRPOConfig(model=ModelConfig(**MODEL), engine=EngineConfig(name="vllm", options={"module": "beside"}))
    assert list(list_code(config)) == [(("engine", "options", "module"), "beside")]


REWARDS = {
    "a name of its own": ("strangers", "strange", "beside:score"),
    "the metadata of a package of Podium's": ("podium-rewards", "math", "beside:score"),
    "a module of a package of Podium's": ("podium-rewards", "math", "podium_rewards.symbolic:mathematics"),
}


@pytest.mark.parametrize("what", REWARDS)
def test_no_door_loads_a_reward_whose_package_is_not_where_packages_are_installed(
    what: str,
    archive: Path,
    mark: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where Python looks into the working directory first, and a stranger's archive is unpacked there."""
    package, name, value = REWARDS[what]
    write_package(archive, package, {name: value}, "podium.rewards")
    monkeypatch.syspath_prepend(archive)
    run = write_run(archive, tmp_path, reward={"name": name})
    (run / ".lock").write_text("")
    for door in (
        ["train", "grpo", "--resume", str(run), "--dry-run"],
        ["train", "grpo", "--config", str(run / "config.yaml"), "--run.name", "mine", "--dry-run"],
        ["eval", str(run), "--backend", "inline"],
    ):
        assert main(door) == 2, door
        assert f"--reward.name {name}" in read_refusal(capsys), door
    assert not mark.exists()


def test_no_door_loads_a_tracker_whose_package_is_not_where_packages_are_installed(
    archive: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(archive, "strangers", {"strange": "beside:score"}, "podium.trackers")
    monkeypatch.syspath_prepend(archive)
    run = write_run(archive, tmp_path, run={"trackers": {"strange": {"project": "sums"}}})
    (run / ".lock").write_text("")
    for door in (
        ["train", "grpo", "--resume", str(run), "--dry-run"],
        ["train", "grpo", "--config", str(run / "config.yaml"), "--run.name", "mine", "--dry-run"],
    ):
        assert main(door) == 2, door
        assert "--run.trackers '{" in read_refusal(capsys), door
    assert not mark.exists()


def test_a_module_of_the_working_directory_is_no_installed_reward(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("podium_rewards")
    config = tiny(GRPOConfig, tmp_path, reward={"name": "math"})
    assert [keys for keys, _ in list_code(config) if keys[0] == "reward"] == []
    (archive / "podium_rewards.py").write_text((archive / "beside.py").read_text())
    monkeypatch.chdir(archive)
    assert [keys for keys, _ in list_code(config) if keys[0] == "reward"] == [("reward", "name")]


def test_samples_and_exports_of_a_strangers_run_need_no_functions(
    archive: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = f"{archive}/beside.py"
    run = write_run(
        archive,
        tmp_path,
        reward={"name": f"{beside}:score"},
        run={"schedule": f"{beside}:sync"},
        environment={"name": f"{beside}:play", "options": {"judge": f"{beside}:score"}},
    )
    assert main(["sample", str(run), "--prompt", "1="]) == 0
    assert main(["export", str(run), "--to", str(tmp_path / "exported")]) == 0
    assert main(["runs", str(archive)]) == 0
    assert not mark.exists()


def test_an_export_loads_no_kernel_that_a_run_names(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = {**MODEL, "attention": "somebody/kernel", "lora": {"rank": 2}}
    run = write_run(archive, tmp_path, model=lora)
    step = run / "checkpoints" / "step-000001"
    (step / "policy").mkdir(parents=True)
    (step / "trainer.json").write_text("{}")
    for door in (["export", str(step), "--to", str(tmp_path / "exported")], ["sample", f"{run}@1", "--prompt", "1="]):
        assert main(door) == 2
        assert "--model.attention somebody/kernel" in read_refusal(capsys)


OPTIONS = [{"ask": "os:system"}, {"ask": "+"}, {"notes": ["bash", "-c", "x"]}, {"notes": {"a": {"b": "python"}}}]


@pytest.mark.parametrize("options", [*OPTIONS, {"trust_remote_code": True}])
def test_all_options_of_an_environment_are_given_again(
    options: dict[str, Any], archive: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(
        archive, tmp_path, environment={"name": "a.py:play", "options": {**options, "at_once": 3, "count": 4}}
    )
    assert main(["eval", str(run), "--environment.name", "b.py:play"]) == 2
    refusal = read_refusal(capsys)
    assert ASKED in refusal
    assert f"--environment.options.{next(iter(options))}" in refusal
    assert "--environment.name" not in refusal
    assert "options.count" not in refusal


# -- the user's own runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the user's, with a reward, in which a run was begun and stopped after a step."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "reward.py").write_text(REWARD)
    monkeypatch.chdir(project)
    sections = {"run": {"steps": 1}, "reward": {"name": "reward.py:score"}, "eval": {"items": 0}, "save": {"every": 1}}
    PPOTrainer(tiny(GRPOConfig, project, **sections), cluster="inline", show=False).fit()
    return project


def resume(run: Path, *arguments: str) -> int:
    """Resume a run as its user does, and check its configuration, data and functions."""
    return main(["train", "grpo", "--resume", str(run), "--run.steps", "2", "--dry-run", *arguments])


def test_a_run_of_ones_own_is_resumed_and_evaluated_without_a_word(project: Path) -> None:
    run = project / "runs" / "run"
    assert main(["train", "grpo", "--resume", str(run), "--run.steps", "2", "--backend", "inline"]) == 0
    (project / "reward.py").write_text(f"{REWARD}\n# mended\n")
    assert resume(run) == 0
    assert main(["eval", str(run), "--backend", "inline", "--eval.items", "2"]) == 0
    PPOTrainer(load_config(GRPOConfig, run / "config.yaml"), cluster="inline", show=False)
    (run / ".id").chmod(0o400)
    assert resume(run) == 0


def test_a_project_that_was_moved_with_its_run_is_resumed(project: Path, tmp_path: Path) -> None:
    (project / "runs").rename(tmp_path / "elsewhere")
    assert resume(tmp_path / "elsewhere" / "run") == 0
    (tmp_path / "elsewhere").rename(project / "runs")
    os.chdir(tmp_path)
    project.rename(tmp_path / "moved")
    assert resume(tmp_path / "moved" / "runs" / "run") == 0


def test_a_copy_of_a_run_does_not_bring_code_in_its_place(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's id is copied, and ``places.json`` leads to a file whose neighbors are a stranger's."""
    os.chdir(tmp_path)
    shutil.copytree(project, tmp_path / "received")
    project.rename(tmp_path / "away")
    (tmp_path / "received" / "subprocess.py").write_text("open('pwned', 'w')\n")
    assert resume(tmp_path / "received" / "runs" / "run") == 2
    assert f"{ASKED} that" in read_refusal(capsys)


def test_the_id_of_a_run_of_ones_own_brings_no_other_names(
    project: Path, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (f"{archive}/beside.py:score", "reward.py:subprocess.getoutput", f"{project}/reward.py:subprocess.run"):
        run = write_run(archive, tmp_path, reward={"name": name})
        shutil.copy(project / "runs" / "run" / ".id", run / ".id")
        assert resume(run) == 2
        assert f"{ASKED} that" in read_refusal(capsys)
    for text in ("../../x", "\0" * 32, "", "f" * 32, "é" * 32):
        (run / ".id").write_text(text)
        assert resume(run) == 2


def test_code_that_ones_own_runs_have_run_is_loaded_while_it_is_unchanged(
    project: Path, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(archive, tmp_path, reward={"name": f"{project}/reward.py:score"})
    assert resume(run) == 0
    (project / "reward.py").write_text(f"{REWARD}\n# changed\n")
    assert resume(run) == 2
    assert f"{ASKED} that" in read_refusal(capsys)
    copied = archive / "reward.py"
    copied.write_text(REWARD)
    run = write_run(archive, tmp_path, reward={"name": f"{copied}:score"})  # its neighbors are a stranger's
    assert resume(run) == 2
    run = write_run(archive, tmp_path, run={"schedule": f"{project}/reward.py:score"})
    assert resume(run) == 2


def test_names_that_are_given_again_are_remembered_with_their_checksums(
    archive: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections: dict[str, Any] = {"run": {"steps": 1}, "eval": {"items": 0}}
    run = write_run(archive, tmp_path, reward={"name": f"{archive}/beside.py:score"}, **sections)
    command = ["train", "grpo", "--resume", str(run), "--backend", "inline"]
    assert main(command) == 2
    flags = read_refusal(capsys).partition("if it may run: ")[2]
    assert not mark.exists()
    assert main([*command, *shlex.split(flags)]) == 0
    assert mark.exists()
    assert main([*command, "--run.steps", "2"]) == 0
    with (archive / "beside.py").open("a") as file:
        file.write("# changed\n")
    assert main([*command, "--run.steps", "3"]) == 2
    assert "beside.py has changed since" in read_refusal(capsys)


@pytest.mark.everyday("open to all")
@pytest.mark.parametrize(
    "home",
    (None, "a file", "relative", "below the run", "open to all"),
)
def test_without_a_place_for_records_the_names_are_asked_for(
    home: str | None, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = project / "runs" / "run"
    monkeypatch.delenv("XDG_STATE_HOME")
    (tmp_path / "file").write_text("")
    places: dict[str, Path | str] = {"a file": tmp_path / "file", "relative": "state"}
    places |= {"below the run": run / "state", "open to all": tmp_path / "open"}
    (tmp_path / "open" / "podium" / "runs").mkdir(parents=True)
    shutil.copytree(tmp_path / "state" / "podium", tmp_path / "open" / "podium", dirs_exist_ok=True)
    (tmp_path / "open" / "podium" / "runs").chmod(0o777)
    shutil.copytree(tmp_path / "state", run / "state")
    monkeypatch.setenv("HOME", str(tmp_path / ("no home" if home == "relative" else "file")))
    if home:
        monkeypatch.setenv("XDG_STATE_HOME", str(places.get(home, home)))
    assert resume(run) == 2
    refusal = read_refusal(capsys)
    assert f"--reward.name {project}/reward.py:score" in refusal
    assert ("XDG_STATE_HOME" in refusal) == (home != "relative")
    assert resume(run, "--reward.name", "reward.py:score") == 0
    sections: dict[str, Any] = {"run": {"steps": 2, "resume": "auto"}, "eval": {"items": 0}, "save": {"every": 1}}
    config = tiny(GRPOConfig, project, reward={"name": "reward.py:score"}, **sections)
    PPOTrainer(config, cluster="inline", show=False).fit()  # a script has the names itself
    resumed = replace(config, run=replace(config.run, resume=str(run), steps=3))
    PPOTrainer(resumed, cluster="inline", show=False).fit()


def test_bytecode_beside_a_file_is_not_run(mark: Path, tmp_path: Path) -> None:
    """The user who reads a file and gives its name would otherwise run a text that nobody has seen."""
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    cached = Path(importlib.util.cache_from_source(str(file)))
    cached.parent.mkdir()
    code = compile(f"open({str(mark)!r}, 'w')\ndef score(completion, row): ...", str(file), "exec")
    unchecked = (0b01).to_bytes(4, "little") + bytes(8)
    cached.write_bytes(importlib.util.MAGIC_NUMBER + unchecked + marshal.dumps(code))
    assert load_function(f"{file}:score", key="reward.name")("12", {}) == 2.0
    assert not mark.exists()


def test_records_are_few_and_short(project: Path, state: Path) -> None:
    (record,) = (state / "podium" / "runs").iterdir()
    assert record.stat().st_size < 1000
    assert (state / "podium" / "runs").stat().st_mode & 0o077 == 0
    config = tiny(GRPOConfig, project, run={"steps": 1, "name": "plain"}, eval={"items": 0})
    assert not list(list_code(config))
    PPOTrainer(config, cluster="inline", show=False).fit()  # names nothing but Podium's own
    assert list((state / "podium" / "runs").iterdir()) == [record]
    assert time.time() >= record.stat().st_mtime
