"""What a script passes as an object is recorded as such, and no later command puts a default in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

from podium.cli import main
from podium.config import load_config
from podium.data import Batch
from podium.errors import ConfigError, DataError
from podium.runs.run_reader import RunRecord
from podium.telemetry import Note, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt
from podium.workers import Policy
from podium_view.run import Run
from tests.integration.training import metrics_rows, tiny

HERE = f"of the script, {__name__}"
ROWS = [{"prompt": f"{n:02d}=", "answer": f"{n:02d}"} for n in range(40)]


def first(completion: str, row: Mapping[str, Any]) -> float:
    return float(completion[:1] == row["answer"][:1])


def renamed(completion: str, row: Mapping[str, Any]) -> float:
    return first(completion, row)


class Mine(Policy):
    """A worker of the script's own."""


class MyTrainer(PPOTrainer):
    """A trainer of the script's own."""


class WithMetric(PPOTrainer):
    """Returns one more metric."""

    name: ClassVar[str] = "mine"
    value: ClassVar[Any] = None

    def learn(self, scored: ScoredBatch) -> Mapping[str, float]:
        return {**super().learn(scored), self.name: self.value}


class Nested(PPOTrainer):
    """Begins another run while it trains."""

    refusals: ClassVar[list[str]] = []

    def score(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        with pytest.raises(ConfigError) as caught:
            train(Path(self.config.run.dir) / "inner")
        self.refusals.append(str(caught.value))
        return super().score(batch, prompts, step)


def train(folder: Path, reward: Any = first, cls: type[PPOTrainer] = PPOTrainer, **options: Any) -> Path:
    run = {"steps": 1, **options.pop("run", {})}
    data = {"train": ""} if "data" in options else {}
    config = tiny(GRPOConfig, folder, run=run, data=data, save={"every": 1})
    cls(config, cluster="inline", reward=reward, show=bool(options.pop("show", False)), **options).fit()
    return folder / "runs" / "run"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    return train(folder, [first, "exact"], MyTrainer, workers={"policy": Mine}, data=ROWS)


def run_command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out + err


RECORDED = {
    "reward.name": f'["a function {HERE}.first", "exact"]',
    "script.policy": f"a class {HERE}.Mine",
    "script.trainer": f"a class {HERE}.MyTrainer",
    "script.data": "a list of the script",
}


def test_the_run_records_them_where_every_reader_looks(made: Path) -> None:
    assert yaml.safe_load((made / "config.yaml").read_text())["reward"]["name"] == [f"a function {HERE}.first", "exact"]
    assert RunRecord(made).of_script == RECORDED
    shown = Run(made, "run").answer("settings")["values"]
    assert {key: shown[key] for key in RECORDED} == RECORDED
    log = (made / "logs" / "controller.log").read_text()
    assert f"a class {HERE}.Mine" not in log, "the report is shown only where somebody looks"


def test_the_report_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, show=True)
    assert f"reward.name  a function {HERE}.first" in capsys.readouterr().out


def test_commands_that_read_the_run_say_so(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("runs", made), ("changes", made)):
        status, text = run_command(capsys, *words)
        assert status == 0
        assert all(value in text.replace("'", '"') for value in RECORDED.values())
    assert run_command(capsys, "export", made, "--to", tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(value in card.replace("'", '"') for key, value in RECORDED.items())


def test_commands_that_need_them_ask_by_name(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"reward.name is a function {HERE}.first, which the run's configuration cannot hold: run that script, or"
    for words in (
        ("eval", made, "--backend", "inline"),
        ("train", "grpo", "--resume", made, "--run.steps", 2, "--backend", "inline"),
        ("train", "grpo", "--config", made / "config.yaml", "--run.name", "another", "--dry-run"),
    ):
        status, text = run_command(capsys, *words)
        assert status != 0
        assert asked in text
        assert f"--reward.name {__name__}:first" in text
    status, text = run_command(capsys, "eval", made, "--backend", "inline", "--reward.name", "exact")
    assert status == 0
    assert f"the run had a class {HERE}.Mine, as its policy, which is not used here" in text


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file.name: file.read_bytes() for file in made.glob("*.*") if not file.name.startswith("trace")}
    words = ("train", "grpo", "--resume", made, "--run.steps", 2, "--backend", "inline", "--reward.name", "gsm8k")
    status, text = run_command(capsys, *words)
    assert status != 0
    assert f"passed its own policy (a class {HERE}.Mine), trainer (a class {HERE}.MyTrainer), which" in text
    after = {file.name: file.read_bytes() for file in made.glob("*.*") if not file.name.startswith("trace")}
    assert after == before


def test_the_script_resumes_its_run_with_an_edited_function_and_not_without_one(tmp_path: Path) -> None:
    run = train(tmp_path)
    train(tmp_path, renamed, run={"steps": 2, "resume": "auto"})
    train(tmp_path, renamed, run={"steps": 3, "resume": str(run)})
    assert RunRecord(run).of_script == {"reward.name": f"a function {HERE}.renamed"}
    with pytest.raises(ConfigError, match=r"reward\.name = 'fraction', and the run has 'a function of the script"):
        train(tmp_path, None, run={"steps": 4, "resume": "auto"})
    with pytest.raises(ConfigError, match=r"passed its own reward \(a function of the script, .*\.renamed\)"):
        train(tmp_path, None, run={"steps": 4, "resume": str(run)})


def test_a_resume_with_the_runs_own_configuration_needs_the_function_too(tmp_path: Path) -> None:
    run = train(tmp_path)
    overrides = ["--run.resume", str(run), "--run.steps", "2"]
    config = load_config(GRPOConfig, run / "config.yaml", overrides)
    with pytest.raises(ConfigError, match=r"reward\.name is a function of the script"):
        PPOTrainer(config, cluster="inline", show=False).fit()
    PPOTrainer(config, cluster="inline", reward=first, show=False).fit()
    config = load_config(
        GRPOConfig, run / "config.yaml", [*overrides[:2], "--run.steps", "3", "--reward.name", "exact"]
    )
    with pytest.raises(ConfigError, match=r"passed its own reward \(a function of the script, .*\.first\)"):
        PPOTrainer(config, cluster="inline", show=False).fit()
    assert RunRecord(run).of_script == {"reward.name": f"a function {HERE}.first"}


@pytest.mark.parametrize("value", [None, "high", [1.0, 2.0]])
def test_a_metric_of_ones_own_that_is_no_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setattr(WithMetric, "value", value)
    with pytest.raises(DataError, match=r"step 1: the metric 'mine' is .*: expected a number"):
        train(tmp_path, cls=WithMetric)


@pytest.mark.parametrize(
    ("name", "what"),
    [("time", "a field of each row"), ("progress/epoch", "a metric that the run measures"), ("time/step", "a metric")],
)
def test_a_metric_of_ones_own_that_would_be_dropped_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    monkeypatch.setattr(WithMetric, "name", name)
    monkeypatch.setattr(WithMetric, "value", 1.0)
    message = rf"step 1: the metric '{name}', .* has the name of {what}.* such as 'mine/{name}'"
    with pytest.raises(DataError, match=message):
        train(tmp_path, cls=WithMetric)


def test_a_metric_of_ones_own_may_be_a_number_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WithMetric, "value", torch.tensor(1.5))
    assert [row["mine"] for row in metrics_rows(train(tmp_path, cls=WithMetric))] == [1.5]


def test_a_process_trains_one_run_at_a_time_whose_files_have_its_metrics_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "inner").mkdir(parents=True)
    outer = train(tmp_path, cls=Nested, run={"steps": 2})
    first_line = Nested.refusals[0]
    assert len(Nested.refusals) == 2
    assert f"{outer} trains in this process" in first_line
    assert f"begin {tmp_path}/runs/inner/runs/run when it has ended" in first_line
    assert [row["step"] for row in metrics_rows(outer) if row["kind"] == "step"] == [1, 2]
    assert not (tmp_path / "runs" / "inner" / "runs" / "run").exists()
    inner = train(tmp_path / "runs" / "inner")  # the first one has ended
    assert [row["step"] for row in metrics_rows(inner) if row["kind"] == "step"] == [1]


def test_names_of_the_main_module_are_those_of_a_script(tmp_path: Path) -> None:
    """On inline they work while that script runs. Another program has another main module."""
    from podium.algorithms import AlgorithmConfig, check_functions

    with pytest.raises(ConfigError, match=r"is a function of the script that started the run.*path/file\.py:my_loss"):
        check_functions(AlgorithmConfig(loss="__main__:my_loss"))


def test_a_trainer_of_podium_and_a_named_reward_are_no_objects(tmp_path: Path) -> None:
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        run = train(tmp_path, None)
    finally:
        unsubscribe()
    assert RunRecord(run).of_script == {}
    assert load_config(GRPOConfig, run / "config.yaml").reward.name == "fraction"
