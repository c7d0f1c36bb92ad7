"""A run's directory stays whole, whoever is killed and whoever else wants to write there."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from podium.data import fields
from podium.errors import ConfigError, DataError
from podium.rewards import Grade
from podium.runs.ledger import Ledger
from podium.runs.paths import resolve_resume, run_path
from podium.runs.run_reader import RunRecord
from podium.runs.run_writer import RunDirectory, Summary, library_versions
from podium.runs.trackers import load_tracker
from podium.telemetry import EvalFinished, PhaseStarted, StepFinished, emit, metrics
from podium.telemetry.sinks import JsonlSink
from podium.trainer import GRPOConfig, config_to_yaml
from podium.trainer.completion_files import CompletionsLog
from tests.integration.test_environment_plugins import write_package
from tests.integration.training import tiny
from tests.unit.trainer.test_completions import rollouts, scored


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with closing(RunDirectory(tmp_path / "runs" / "one")) as run:
        run.write_config("seed: 1\n")
        yield run


# Whose directory it is


def test_a_new_run_has_its_folders(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "b")
    assert {entry.name for entry in run.path.iterdir() if entry.is_dir()} == {"completions", "logs", "checkpoints"}
    assert run.trace_path == run.path / "trace.json"
    run.close()
    assert not (tmp_path / "a").exists(), "no run came of it"


@pytest.mark.parametrize("name", ["caf\udce9", "\udfff"], ids=["a byte that is not UTF-8", "half of a pair"])
def test_a_directory_whose_name_is_not_utf8_is_refused_before_a_step_is_trained(tmp_path: Path, name: str) -> None:
    """Safetensors cannot write there: the first checkpoint failed, after the first step."""
    with pytest.raises(ConfigError, match=r"the directory of a run is '.*\\ud.*', which is not UTF-8: .*rename"):
        RunDirectory(tmp_path / name / "run")
    assert [*tmp_path.iterdir()] == []


def test_a_directory_that_is_reached_from_one_whose_name_is_not_utf8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "caf\udce9").mkdir()
    (tmp_path / "link").symlink_to("caf\udce9")
    for folder in ("caf\udce9", "link"):
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(ConfigError, match="not UTF-8"):
            RunDirectory("run")
    with pytest.raises(ConfigError, match="not UTF-8"):
        RunDirectory(tmp_path / "link" / "run")


def test_another_run_is_not_overwritten(run: RunDirectory) -> None:
    run.write_config("run: {}")
    with pytest.raises(ConfigError, match=f"is being written to by process {os.getpid()}: "):
        RunDirectory(run.path)
    run.close()
    with JsonlSink(run.metrics_path) as sink:
        sink.handle(EvalFinished(step=0, items=2, figures={"accuracy": 0.5}))
    with pytest.raises(
        ConfigError, match=r"holds a run \(unfinished at step 0\): resume it \(--resume .*\), or choose another"
    ):
        RunDirectory(run.path)
    run.write_summary(Summary(task="copy", seed=0, steps=1, wall_s=1.0))
    with pytest.raises(ConfigError, match=r"holds a run \(finished at step 0\)"):
        RunDirectory(run.path)


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/../../x", "."])
def test_a_name_that_leads_out_of_the_runs_is_refused(tmp_path: Path, name: str) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"name": name})
    with pytest.raises(ConfigError, match=r"run\.name = .* names no directory inside run\.dir"):
        run_path(config, "grpo")


def test_auto_resumes_the_run_that_is_there_with_the_settings_that_it_learns_by(tmp_path: Path) -> None:
    asked = {"resume": "auto", "name": "one", "steps": 7}
    config = tiny(GRPOConfig, tmp_path, run=asked, save={"every": 3})
    assert resolve_resume(config).run.resume == ""
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config_to_yaml(tiny(GRPOConfig, tmp_path, run={"name": "one"})))
    assert resolve_resume(config).run.resume == str(path)
    other = tiny(GRPOConfig, tmp_path, run={**asked, "seed": 1}, optim={"lr": 0.5})
    assert resolve_resume(other).run.resume == "", "the run there has no results"
    (path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    with pytest.raises(
        ConfigError, match=r"other settings:\n  optim\.lr = 0\.5, and the run has 0\.01\n  run\.seed = 1, "
    ):
        resolve_resume(other)
    with pytest.raises(ConfigError, match=r"run\.resume = 'auto' .*: set run\.name"):
        resolve_resume(tiny(GRPOConfig, tmp_path, run={**asked, "name": ""}))


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run at .*typo"):
        RunDirectory(tmp_path / "typo", resume=True)
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("name", ["profile/update-0.json", "tensorboard/events.out"])
def test_a_second_name_of_a_file_that_a_library_writes_is_refused(run: RunDirectory, tmp_path: Path, name: str) -> None:
    run.write_config("run: {}")
    (tmp_path / "mine").write_text("mine")
    (run.path / name).parent.mkdir()
    os.link(tmp_path / "mine", run.path / name)
    run.close()
    with pytest.raises(DataError, match=rf"{name} is a link, or has another name"):
        RunDirectory(run.path, resume=True)


def test_no_link_leads_a_tracker_out_of_its_folder(run: RunDirectory, tmp_path: Path) -> None:
    run.write_config("run: {}")
    (run.path / "wandb" / "run-1").mkdir(parents=True)
    (run.path / "wandb" / "latest-run").symlink_to("run-1")
    run.close()
    RunDirectory(run.path, resume=True).close()
    for target in (tmp_path, "../..", "run-1/../../logs"):
        (run.path / "wandb" / "run-2").symlink_to(target)
        with pytest.raises(DataError, match=r"wandb/run-2 is a link out of its folder"):
            RunDirectory(run.path, resume=True)
        (run.path / "wandb" / "run-2").unlink()


@pytest.mark.parametrize("name", ["logs/controller.log", "logs/policy-0.log", "metrics.jsonl"])
def test_a_link_in_place_of_a_file_that_grows_is_refused(run: RunDirectory, tmp_path: Path, name: str) -> None:
    """A stranger's run would add lines to any file of the user's, such as one that a shell reads at its start."""
    run.config_path.write_text("")
    run.close()
    mine = tmp_path / "mine"
    (run.path / name).symlink_to(mine)
    with pytest.raises(DataError, match=rf"{re.escape(name)} is a link, or no regular file: .* remove it"):
        RunDirectory(run.path, resume=True)
    assert not mine.exists()


def test_foreign_files_and_files_in_the_way_are_named(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis\.tex\)"):
        RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match=r"thesis\.tex is a file"):
        RunDirectory(tmp_path / "thesis.tex")


def test_what_a_failed_start_left_is_no_obstacle(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    (first.logs / "policy-0.log").write_text("CUDA error")
    first.close()
    RunDirectory(tmp_path / "run").close()


def leave(run: RunDirectory, *states: str, steps: int | None = None) -> None:
    """Close a run whose one prompt went through ``states``, and which ended after ``steps`` if it did not fail."""
    with closing(Ledger(run.path / "ledger.jsonl")) as ledger:
        ledger.take(1, 1)
        for state in states:
            ledger.move(1, state)
    (run.completions.path / "step-000001.parquet").write_bytes(b"")
    if steps is not None:
        run.write_summary(Summary(task="copy", seed=0, steps=steps, wall_s=1.0, finished=False))
    run.close()


@pytest.mark.parametrize("steps", [None, 0])
def test_a_run_without_a_trained_step_and_an_evaluation_keeps_no_name(run: RunDirectory, steps: int | None) -> None:
    (run.path / "tensorboard").mkdir()
    leave(run, "rolled_out", steps=steps)
    with closing(RunDirectory(run.path)) as again:
        assert again.completions.names() == []
        again.write_config("seed: 2\n")
    assert RunRecord(run.path).state == "unfinished"
    assert (run.path / "config.1.yaml").read_text() == "seed: 1\n"


@pytest.mark.parametrize(("states", "steps"), [(["rolled_out", "graded", "trained"], None), (["rolled_out"], 1)])
def test_a_run_with_a_trained_step_keeps_its_name(run: RunDirectory, states: list[str], steps: int | None) -> None:
    leave(run, *states, steps=steps)
    with pytest.raises(ConfigError, match="holds a run"):
        RunDirectory(run.path)


def test_a_run_whose_ledger_is_damaged_keeps_its_name(run: RunDirectory) -> None:
    leave(run, "rolled_out")
    (run.path / "ledger.jsonl").write_text("no ledger\n")
    with pytest.raises(ConfigError, match="holds a run"):
        RunDirectory(run.path)


OTHER_WRITER = """
import sys
from podium.errors import ConfigError
from podium.runs.run_writer import RunDirectory
try:
    RunDirectory(sys.argv[1], resume=True)
except ConfigError as error:
    print(error, flush=True)
sys.stdin.readline()
RunDirectory(sys.argv[1], resume=True)
print("opened")
"""


def test_two_processes_cannot_write_to_one_run(run: RunDirectory) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_WRITER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert f"being written to by process {os.getpid()}" in other.stdout.readline()
        run.close()
        assert other.communicate("go on\n")[0] == "opened\n"
    assert other.returncode == 0


def test_a_resumed_run_keeps_the_older_configuration_and_trace(run: RunDirectory) -> None:
    run.trace_path.write_text("[")
    run.close()
    again = RunDirectory(run.path, resume=True)
    again.close()
    assert again.trace_path.name == "trace-1.json"
    again.write_config("seed: 1\n")
    assert not (run.path / "config.1.yaml").exists()
    again.write_config("seed: 2\n")
    again.write_config("seed: 3\n")
    texts = {path.name: path.read_text() for path in run.path.glob("config*.yaml")}
    assert texts == {"config.yaml": "seed: 3\n", "config.1.yaml": "seed: 1\n", "config.2.yaml": "seed: 2\n"}


# Going on


def test_rewinding_forgets_later_steps(run: RunDirectory) -> None:
    with JsonlSink(run.metrics_path):
        emit(PhaseStarted("grpo", 3))
        for step in (1, 2, 3):
            emit(StepFinished(step, {"reward/mean": 0.5}))
            (run.completions.path / f"step-{step:06d}.parquet").touch()
    with run.metrics_path.open("a") as file:
        file.write('{"kind": "st')
    run.rewind(2)
    rows = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert [(row["phase"], row["step"]) for row in rows] == [("grpo", 1), ("grpo", 2)]
    assert run.completions.names() == ["step-000001.parquet", "step-000002.parquet"]
    run.rewind(1)
    assert len(run.metrics_path.read_text().splitlines()) == 1


def test_rewinding_forgets_an_evaluation_that_is_made_again(run: RunDirectory) -> None:
    with JsonlSink(run.metrics_path):
        for step in (1, 2):
            emit(StepFinished(step, {"reward/mean": 0.5}))
            emit(EvalFinished(step=step, items=1, figures={"accuracy": 1.0}))

    def list_rows() -> list[tuple[str, int]]:
        rows = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
        return [(row["kind"], row["step"]) for row in rows]

    run.rewind(2)
    assert list_rows() == [("step", 1), ("eval", 1), ("step", 2), ("eval", 2)]
    run.rewind(2, again=True)
    assert list_rows() == [("step", 1), ("eval", 1), ("step", 2)]


def test_a_file_that_is_no_summary_is_named(run: RunDirectory) -> None:
    for text in ("", "[]", '{"steps": null}'):
        run.summary_path.write_text(text)
        with pytest.raises(ConfigError, match=r"summary\.json is not the summary of a run"):
            run.rewind(3)


def test_rewinding_a_run_that_wrote_nothing(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    run.rewind(0)
    assert not caplog.text


def test_a_resume_without_its_metrics_is_warned_of(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    run.rewind(4)
    assert f"{run.metrics_path} is missing: the rows up to step 4 are not in the new one" in caplog.text
    assert not run.metrics_path.exists()


# What it writes


def test_the_summary_is_valid_json_with_versions(run: RunDirectory) -> None:
    run.write_summary(
        Summary(
            task="copy",
            seed=3,
            steps=160,
            wall_s=math.inf,
            metric="accuracy",
            before={"accuracy": 0.25},
            after={"accuracy": 0.75},
            items=500,
            tokens_per_s={"generate": 1000.0, "update": math.nan},
        )
    )
    read = json.loads(run.summary_path.read_text())
    assert read["tokens_per_s"] == {"generate": 1000.0, "update": None}
    assert (read["before"], read["after"], read["wall_s"]) == ({"accuracy": 0.25}, {"accuracy": 0.75}, None)
    assert read["versions"] == library_versions()
    assert {"python", "torch", "transformers"} <= set(read["versions"])


def test_the_controllers_log_is_kept(run: RunDirectory) -> None:
    before = (list(logging.getLogger().handlers), logging.getLogger("podium").level)
    with run.controller_log() as path:
        logging.getLogger("podium.trainer").info("step 1 took long")
        run.log("a row of the terminal")
    run.log("too late")
    logging.getLogger("podium.trainer").info("afterwards")
    assert "INFO podium.trainer: step 1 took long" in path.read_text()
    assert "afterwards" not in path.read_text()
    first, *_, last = path.read_text().splitlines()
    assert shlex.join(sys.orig_argv) in first
    assert last.endswith("a row of the terminal")
    assert (list(logging.getLogger().handlers), logging.getLogger("podium").level) == before


# The page about it


def test_the_examples_of_the_documentation_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    run.write_summary(Summary(task="copy", seed=0, steps=2, wall_s=1.0, tokens_per_s={"generate": 1000.0}))
    with JsonlSink(run.metrics_path):
        for step in (1, 2):
            emit(StepFinished(step, {"reward/mean": 0.5, "policy/entropy": 1.0, "tokens_per_s/step": 1000.0}))
        emit(EvalFinished(2, 500, {"reward_mean": 0.5}))  # no accuracy: the reward gives no verdicts
    batch = rollouts().with_columns({fields.FINISH_REASON: ["length", "length", "stop", "stop"]})
    with CompletionsLog(run.completions) as log:
        log.write(scored([Grade(0.5)] * 4, batch), None)
    monkeypatch.chdir(run.path)
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(example, {"__name__": "example"})
    assert capsys.readouterr().out == "step 40: reward 0.05\n"


def test_every_metric_of_the_documentation_exists_and_the_other_way_round() -> None:
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    table = page.partition("| metric | meaning |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.strip().splitlines()]
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    values = [value for name, value in vars(metrics).items() if name.isupper()]
    named = {name for value in values for name in (value.values() if isinstance(value, dict) else (value,))}
    prefixes = {metrics.TIME_PREFIX: "STAGE", metrics.TOKENS_PER_S_PREFIX: "STAGE"}
    prefixes |= {metrics.REWARD_PART_PREFIX: "NAME", metrics.AGENT_REWARD_PREFIX: "NAME"}
    prefixes |= {metrics.SOURCE_REWARD_PREFIX: "NAME"}
    stages = {metrics.STEP_S, metrics.TOKENS_PER_S}
    assert documented == named - {*prefixes} - stages | {prefix + what for prefix, what in prefixes.items()}


TRACKER = """
from pathlib import Path
from podium.errors import ConfigError
from podium.telemetry.sinks import Tracker

class Notes(Tracker):
    def __init__(self, path):
        super().__init__()
        self.path = path

    @classmethod
    def of_run(cls, run):
        return cls(run.make_folder("notes") / f"{run.name} {run.options['project']} {run.is_resumed} {run.read_id()}")

    def handle(self, event):
        with self.path.open("a") as file:
            file.write(type(event).__name__)

class Missing(Notes):
    @classmethod
    def check(cls):
        raise ConfigError("install pen and paper")
"""


def test_a_package_brings_a_tracker_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"{tmp_path.name}_notes"  # no module of another test has this name
    (tmp_path / f"{module}.py").write_text(TRACKER)
    points = {"notes": f"{module}:Notes", "missing": f"{module}:Missing", "wrong": f"{module}:Path"}
    write_package(tmp_path, "notes", points, "podium.trackers")
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny(GRPOConfig, tmp_path, run={"trackers": {"notes": {"project": "sums"}}})
    names: list[str] = []
    for resume in (False, True):
        run = RunDirectory(tmp_path / "run", resume=resume)
        *files, notes = run.sinks(config, None)
        with notes:
            emit(StepFinished(1, {"loss": 1.0}))
        for sink in files:
            sink.close()
        run.write_config("")
        names = sorted(path.name for path in (run.path / "notes").iterdir())
        run.close()
    (first, second), number = (name.rsplit(" ", 1) for name in names), names[0].rpartition(" ")[2]
    assert (first, second) == (["run sums False", number], ["run sums True", number])
    assert [path.read_text() for path in (tmp_path / "run" / "notes").iterdir()] == ["StepFinished"] * 2
    for name, message in (
        ("note", r"run\.trackers names 'note', and no tracker .*did you mean notes.* group podium\.trackers"),
        ("missing", "install pen and paper"),
        ("wrong", r"run\.trackers names 'wrong': .*:Path is no class of podium\.telemetry\.sinks\.Tracker"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tracker(name)


def test_an_unknown_option_of_trackers_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run\.trackers\.wandb\.projekt .*did you mean run\.trackers\.wandb\.project"
    ):
        tiny(GRPOConfig, tmp_path, run={"trackers": {"wandb": {"projekt": "x"}}})
