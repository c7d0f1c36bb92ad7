"""Runs that end wrongly say so: hangs, models that are not finite, steps that are all skipped, lost checkpoints."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.data import Batch
from podium.errors import ConfigError, DeadlineExceeded, EndpointError, PodiumError
from podium.models import load_tokenizer
from podium.runs.checkpoint_folders import TrainerState
from podium.runtime import Cluster, concat, endpoint, first, shard
from podium.telemetry import Note, StepFinished, metrics, subscribe
from podium.trainer import GRPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from podium.workers import Generator, Policy
from tests.integration.training import losses, metrics_rows, tiny, write_copy_task
from tests.waits import LONG_S

WRONG_LOSSES = """
from podium.algorithms import TokenLoss

def nothing(inputs, config):
    return TokenLoss(inputs.logprobs_N * float("nan"))

def by_row(inputs, config):
    return TokenLoss(inputs.row_means(inputs.logprobs_N))

def sometimes(inputs, config):
    return TokenLoss(-inputs.logprobs_N * (float("nan") if inputs.step < 5 else 1.0))
"""


def train(config: Any, cluster: str = "inline", **options: Any) -> Path:
    trainer: Any = SFTTrainer if isinstance(config, SFTConfig) else PPOTrainer
    trainer(config, cluster=cluster, show=False, **options).fit()
    return Path(config.run.dir) / config.run.name


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    (tmp_path / "wrong_losses.py").write_text(WRONG_LOSSES)
    return f"{tmp_path}/wrong_losses.py"


def notes_of(train_it: Any) -> list[str]:
    """Notes on the mismatch that appear meanwhile."""
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        train_it()
    finally:
        unsubscribe()
    return [text for text in notes if "log-probabilities" in text]


# -- nothing was learned, or nothing that can be used


@pytest.mark.parametrize("cls", [GRPOConfig, SFTConfig])
def test_a_run_whose_every_step_was_skipped_ends_as_failed(tmp_path: Path, cls: type, wrong: str) -> None:
    algorithm = {"algorithm": {"loss": f"{wrong}:nothing", "minibatches": 2}} if cls is GRPOConfig else {}
    workers: dict[str, Any] = {} if cls is GRPOConfig else {"workers": {"policy": Nan}}
    with pytest.raises(PodiumError, match=r"each of the \d optimizer steps of the policy was skipped"):
        train(tiny(cls, tmp_path, eval={"items": 0}, **algorithm), "inline", **workers)
    run = tmp_path / "runs" / "run"
    assert not (run / "summary.json").exists()
    assert not (run / "model").exists()


class Nan(Policy):
    """A policy whose gradients are not finite."""

    @endpoint(dispatch=shard(args=("batch",)), collect=first())
    def update(self, batch: Batch) -> dict[str, float]:
        weights = batch.jagged("loss_weights")
        return super().update(batch.with_columns({"loss_weights": weights.like(weights.values * math.nan)}))


def test_skipped_steps_are_counted_over_minibatches_and_steps(tmp_path: Path, wrong: str) -> None:
    algorithm = {"loss": f"{wrong}:sometimes", "minibatches": 2}
    run = train(tiny(GRPOConfig, tmp_path, run={"steps": 4}, algorithm=algorithm, eval={"items": 0}))
    assert [row[metrics.SKIPPED_STEPS] for row in metrics_rows(run)] == [2, 4, 5, 5]


def test_a_loss_of_the_wrong_shape_ends_the_run(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(
        EndpointError, match=r"wrong_losses\.py:by_row' returned loss_N of shape \[16\]; expected one value"
    ):
        train(tiny(GRPOConfig, tmp_path, algorithm={"loss": f"{wrong}:by_row"}, eval={"items": 0}))


class Exploding(Policy):
    """A policy that an update makes infinite, as a huge weight decay does in the end."""

    @endpoint(dispatch=shard(args=("batch",)), collect=first())
    def update(self, batch: Batch) -> dict[str, float]:
        found = super().update(batch)
        if self.engine.step_count == 2:
            with torch.no_grad():
                next(self.model.parameters()).mul_(math.inf)
        return found


def test_a_model_that_is_not_finite_is_neither_saved_nor_finished(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 2}, save={"every": 1}, eval={"items": 0})
    with pytest.raises(
        PodiumError, match=r"the parameter model\.embed_tokens\.weight of the policy is not finite after 2"
    ):
        train(config, workers={"policy": Exploding})
    run = tmp_path / "runs" / "run"
    assert (run / "checkpoints" / "latest").resolve().name == "step-000001"
    assert not (run / "model").exists()


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_an_infinite_rate_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.{key} = inf: expected a finite number"):
        tiny(GRPOConfig, tmp_path, optim={key: math.inf})


# -- trainer and generator disagree


class Shifted(Generator):
    """A generator whose log-probabilities are off by 0.1 and then by 0.7 nats."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat())
    def generate(self, prompts: Batch, sampling: Any) -> Batch:
        batch = super().generate(prompts, sampling)
        self.calls = getattr(self, "calls", 0) + 1
        shift = {1: 0.04, 2: 0.1, 3: 0.1}.get(self.calls, 0.7)
        logprobs = batch.jagged("rollout_logprobs")
        return batch.with_columns({"rollout_logprobs": logprobs.like(logprobs.values - shift)})


@pytest.mark.parametrize("minibatches", [1, 2])
def test_trainer_and_generator_that_disagree_are_noted_and_then_end_the_run(tmp_path: Path, minibatches: int) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 6}, algorithm={"minibatches": minibatches}, eval={"items": 0})

    def run() -> None:
        with pytest.raises(PodiumError, match=r"step 4: .* differ by 0\.7 nats on average.*max_mismatch = 0\.5"):
            train(config, workers={"generator": Shifted})

    (note,) = notes_of(run)
    assert note.startswith(
        "step 2: the generator's and the trainer's log-probabilities of the same tokens differ by 0.1 "
    )
    assert not (tmp_path / "runs" / "run" / "checkpoints" / "latest").exists()


class Broken(Generator):
    """A generator whose log-probabilities are no numbers."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat())
    def generate(self, prompts: Batch, sampling: Any) -> Batch:
        batch = super().generate(prompts, sampling)
        logprobs = batch.jagged("rollout_logprobs")
        return batch.with_columns({"rollout_logprobs": logprobs.like(logprobs.values * math.nan)})


def test_the_first_batch_counts_and_a_key_allows_what_it_says(tmp_path: Path) -> None:
    with pytest.raises(PodiumError, match=r"step 1: .* differ by nan"):
        train(tiny(GRPOConfig, tmp_path, eval={"items": 0}), workers={"generator": Broken})
    allowed = tiny(
        GRPOConfig, tmp_path, run={"name": "allowed", "steps": 4}, eval={"items": 0}, algorithm={"max_mismatch": None}
    )
    assert len(notes_of(lambda: train(allowed, workers={"generator": Shifted}))) == 1
    half = tiny(GRPOConfig, tmp_path, run={"name": "half"}, engine={"dtype": "bfloat16"}, eval={"items": 0})
    assert notes_of(lambda: train(half)) == []  # bfloat16's own noise
    assert 1e-6 < metrics_rows(tmp_path / "runs" / "half")[0][metrics.MISMATCH_MEAN] < 0.02


# -- hangs


class Stuck(Policy):
    """A policy whose update never ends."""

    @endpoint(dispatch=shard(args=("batch",)), collect=first())
    def update(self, batch: Batch) -> dict[str, float]:
        time.sleep(600)
        return {}


class StuckGenerator(Generator):
    """A generator that never answers."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat())
    def generate(self, prompts: Batch, sampling: Any) -> Batch:
        time.sleep(600)
        return prompts


@pytest.mark.parametrize(
    ("role", "worker", "step", "stage", "method"),
    [
        ("policy", Stuck, 1, "update", "update"),
        pytest.param("generator", StuckGenerator, 0, "evaluate", "generate", marks=pytest.mark.exhaustive),
    ],
)
def test_a_hang_is_named_by_its_stage_and_closing_does_not_hide_it(
    preloaded: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    worker: type,
    step: int,
    stage: str,
    method: str,
) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"timeout_s": LONG_S}, eval={"items": 4 * (step == 0)})
    monkeypatch.setattr("podium.runtime.process_set.CLOSE_WORKER_S", 1e6)  # an end that asks the stuck process hangs

    class Impatient(PPOTrainer):
        def resume(self) -> int:
            group = self.run.roles.workers[role].group
            submit = group.submit

            def submit_with_deadline(spec: Any, args: Any, kwargs: Any, timeout_s: float | None = None) -> Any:
                return submit(spec, args, kwargs, 4.0 if spec.name == method else timeout_s)

            monkeypatch.setattr(group, "submit", submit_with_deadline)
            return super().resume()

    passed = rf"^step {step}, stage {stage}: {role}\.{method} passed its deadline of 4 s"
    with pytest.raises(DeadlineExceeded, match=passed):
        # A cluster of the run's own ends with it; another one goes on without the stuck processes.
        cluster = "local" if role == "policy" else preloaded
        Impatient(config, cluster=cluster, workers={role: worker}, show=False).fit()


# -- files of a run


def test_a_resume_before_the_first_checkpoint_begins_again_with_one_evaluation(tmp_path: Path) -> None:
    class Interrupted(PPOTrainer):
        def learn(self, scored: Any) -> Any:
            raise KeyboardInterrupt

    config = tiny(GRPOConfig, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Interrupted(config, cluster="inline", show=False).fit()
    run = tmp_path / "runs" / "run"
    train(tiny(GRPOConfig, tmp_path, run={"resume": str(run)}))
    assert [row["step"] for row in metrics_rows(run, "eval")] == [0, 2]
    assert [row["step"] for row in metrics_rows(run)] == [1, 2]


def test_the_rows_of_steps_are_there_before_the_checkpoint_that_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed from the checkpoint does not write them again."""
    monkeypatch.setattr("podium.telemetry.sinks.base.WRITE_S", 1e6)
    there: list[list[int]] = []

    class Watched(PPOTrainer):
        def remember(self, step: int) -> Any:
            there.append([row["step"] for row in metrics_rows(self.run.directory.path)])
            return super().remember(step)

    Watched(tiny(GRPOConfig, tmp_path, save={"every": 1}), cluster="inline", show=False).fit()
    assert there[:2] == [[1], [1, 2]]


def test_a_finished_run_without_its_checkpoints_keeps_metrics_and_completions(tmp_path: Path) -> None:
    run = train(tiny(GRPOConfig, tmp_path, eval={"items": 0}, save={"every": 1}))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.suffix in (".jsonl", ".parquet")}
    again = tiny(GRPOConfig, tmp_path, run={"resume": str(run), "steps": 3}, eval={"items": 0})
    shutil.rmtree(run / "checkpoints" / "step-000002")
    with pytest.raises(ConfigError, match=r"ended after step 2, and its latest checkpoint is of step 1: .*run\.name"):
        train(again)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="ended after step 2, and no checkpoint is left"):
        train(again)
    assert {path: path.read_bytes() for path in before} == before
    (run / "summary.json").rename(run / "kept.json")
    train(again)
    assert [row["step"] for row in metrics_rows(run)] == [1, 2, 3]
    with pytest.raises(
        ConfigError, match=r"run\.steps = 2, and the latest checkpoint of .* is of step 3: raise run\.st"
    ):
        train(tiny(GRPOConfig, tmp_path, run={"resume": str(run), "steps": 2}, eval={"items": 0}))
    assert [row["step"] for row in metrics_rows(run)] == [1, 2, 3]


def test_the_model_has_the_chat_template_that_it_was_trained_with(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}0{{ message.content }}{% endfor %}1")
    data = {"chat_template": str(template), "train": str(write_copy_task(tmp_path)), "holdout": 0.2}
    run = train(tiny(GRPOConfig, tmp_path, run={"steps": 1}, data=data, eval={"items": 0}))
    tokenizer = load_tokenizer(str(run / "model"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "7="}], tokenize=False) == "07=1"


def test_a_checkpoint_comes_by_time_and_changes_no_result(tmp_path: Path) -> None:
    often = {"minutes": 1e-9, "keep": 0}
    saved = train(tiny(GRPOConfig, tmp_path, run={"name": "saved", "steps": 3}, save=often, eval={"items": 0}))
    plain = train(tiny(GRPOConfig, tmp_path, run={"name": "plain", "steps": 3}, eval={"items": 0}))
    assert losses(saved) == losses(plain)
    steps = [sorted(path.name for path in (run / "checkpoints").glob("step-*")) for run in (saved, plain)]
    assert steps == [["step-000001", "step-000002", "step-000003"], ["step-000003"]]
    assert json.loads((saved / "summary.json").read_text())["finished"]


class StoppedInItsLastStep(PPOTrainer):
    """Is asked to stop in its last step; ``breaks``: and dies behind the evaluation that follows."""

    breaks = False

    def learn(self, scored: Any) -> Any:
        if scored.step == self.config.run.steps:
            self.run.stop.request()
        return super().learn(scored)

    def save(self, step: int) -> None:
        if self.breaks and self.state.last is not None and self.state.last.step == step:
            raise KeyboardInterrupt
        super().save(step)


def test_the_checkpoint_of_a_last_step_that_was_stopped_has_its_evaluation(tmp_path: Path) -> None:
    """Without it the step was never the best one, and after a kill the resumed run had two rows of it."""
    sections: dict[str, Any] = {"eval": {"items": 4, "metric": "reward"}, "save": {"keep_best": 1}}
    config = tiny(GRPOConfig, tmp_path, run={"steps": 2}, **sections)
    run, broken = tmp_path / "runs" / "run", StoppedInItsLastStep(config, cluster="inline", show=False)
    broken.breaks = True
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    assert [row["step"] for row in metrics_rows(run, "eval")] == [0, 2]
    resumed = tiny(GRPOConfig, tmp_path, run={"steps": 2, "resume": str(run)}, **sections)
    summary = StoppedInItsLastStep(resumed, cluster="inline", show=False).fit()
    assert [row["step"] for row in metrics_rows(run, "eval")] == [0, 2]
    state = TrainerState.read(run / "checkpoints" / "step-000002")
    assert state.last is not None
    assert state.last.step == 2
    assert summary.best_checkpoint == str(run / "checkpoints" / "step-000002")
    assert (summary.finished, summary.prompts) == (True, {"trained": 8})
    longer = tiny(GRPOConfig, tmp_path, run={"steps": 3, "resume": str(run)}, **sections)
    StoppedInItsLastStep(longer, cluster="inline", show=False).fit()
    assert [row["step"] for row in metrics_rows(run, "eval")] == [0, 2, 3]


def test_an_evaluation_that_a_stop_left_out_is_made_up_for_by_the_resumed_run(tmp_path: Path) -> None:
    """Its figure may be the best one, and end the run."""

    def run(folder: Path, **options: Any) -> GRPOConfig:
        sections: dict[str, Any] = {"eval": {"every": 2, "items": 4}, "save": {"keep_best": 1, "model": False}}
        return tiny(GRPOConfig, folder, run={"steps": 5, **options}, **sections)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    expected, notes = train(run(whole)), list[str]()
    trainer = PPOTrainer(run(parts), cluster="inline", show=False)

    def see(event: Any) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            trainer.run.stop.request()
        if isinstance(event, Note):
            notes.append(event.text)

    unsubscribe = subscribe(see)
    try:
        assert not trainer.fit().finished
    finally:
        unsubscribe()
    assert "step 2: the evaluation that is due is left to the run that resumes from here" in notes
    stopped = parts / "runs" / "run"
    assert [row["step"] for row in metrics_rows(stopped, "eval")] == [0]
    train(run(parts, resume=str(stopped)))
    measured = [[{**row, "time": 0} for row in metrics_rows(path, "eval")] for path in (stopped, expected)]
    assert measured[0] == measured[1]
    assert losses(stopped) == losses(expected)
    latest = [path / "checkpoints" / "latest" / "trainer.json" for path in (stopped, expected)]
    states = [json.loads(path.read_text()) for path in latest]
    assert states[0]["best"] == states[1]["best"]
    assert states[0]["waited"] == states[1]["waited"]


@pytest.mark.everyday("0-4-rows1")
@pytest.mark.parametrize(
    ("every", "steps", "rows"),
    [
        (3, 4, [0, 2, 3, 4]),
        (0, 4, [0, 2, 4]),
        pytest.param(2, 4, [0, 2, 4], marks=pytest.mark.exhaustive),
        pytest.param(3, 2, [0, 2], marks=pytest.mark.exhaustive),
    ],
)
def test_an_evaluation_that_no_checkpoint_knows_is_made_again(
    tmp_path: Path, every: int, steps: int, rows: list[int]
) -> None:
    """The run was killed between the evaluation and its checkpoint, and resumes with another ``eval.every``. The row
    stayed, and the step was never the best one."""

    class KilledAtItsCheckpoint(PPOTrainer):
        def save(self, step: int) -> None:
            raise KeyboardInterrupt

    def run(steps: int, every: int, **options: Any) -> GRPOConfig:
        sections: dict[str, Any] = {"eval": {"every": every, "items": 4}, "save": {"every": 2, "model": False}}
        return tiny(GRPOConfig, tmp_path, run={"steps": steps, **options}, **sections)

    trainer = PPOTrainer(run(4, 0), cluster="inline", show=False)

    def stop_after_two(event: Any) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            trainer.run.stop.request()

    unsubscribe = subscribe(stop_after_two)
    try:
        assert not trainer.fit().finished
    finally:
        unsubscribe()
    path = tmp_path / "runs" / "run"
    with pytest.raises(KeyboardInterrupt):
        KilledAtItsCheckpoint(run(4, 2, resume=str(path)), cluster="inline", show=False).fit()
    assert [row["step"] for row in metrics_rows(path, "eval")] == [0, 2]
    train(run(steps, every, resume=str(path)))
    assert [row["step"] for row in metrics_rows(path, "eval")] == rows
    last = TrainerState.read(path / "checkpoints" / "step-000002").last
    assert last is not None
    assert last.step == 2


def test_a_resume_is_compared_with_what_its_checkpoint_was_trained_by(tmp_path: Path) -> None:
    """Not with a resume in between that wrote none. One that is refused leaves all metrics as they are."""

    def run(steps: int, **sections: Any) -> GRPOConfig:
        return tiny(
            GRPOConfig, tmp_path, **{"run": {"steps": steps}, "save": {"every": 2}, "eval": {"items": 0}, **sections}
        )

    class Fails(Policy):
        @endpoint(dispatch=shard(args=("batch",)), collect=first())
        def update(self, batch: Batch) -> dict[str, float]:
            if self.engine.step_count >= 3:
                raise RuntimeError("no more")
            return super().update(batch)

    def resume(**sections: Any) -> list[str]:
        notes: list[str] = []
        unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
        try:
            train(run(4, **{**sections, "run": {"resume": str(folder), "steps": 4}}), workers={"policy": Fails})
        except EndpointError as error:
            assert "no more" in str(error)  # the notes of a run that fails are read too
        finally:
            unsubscribe()
        return [note.partition(": ")[2] for note in notes if note.startswith("settings that differ")]

    folder = tmp_path / "runs" / "run"
    with pytest.raises(EndpointError, match="no more"):
        train(run(4), workers={"policy": Fails})
    rows = (folder / "metrics.jsonl").read_text()
    assert [row["step"] for row in metrics_rows(folder)] == [1, 2, 3]
    with pytest.raises(PodiumError):
        resume(reward={"name": f"{folder}/none.py:score"})
    with pytest.raises(PodiumError):
        resume(model={"config": {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 2}})
    assert (folder / "metrics.jsonl").read_text() == rows
    changed = {"optim": {"lr": 0.5}}
    assert resume(**changed) == resume(**changed) == ["optim.lr = 0.5 (was 0.01)"]
    assert [row["step"] for row in metrics_rows(folder)] == [1, 2, 3]
