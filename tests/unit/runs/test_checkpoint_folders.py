"""A checkpoint is complete or not there, at whatever moment its writer is killed."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from podium.errors import CheckpointError
from podium.models.manifest import file_sums, write_manifest
from podium.runs.checkpoint_folders import Checkpoints, TrainerState
from podium.runs.evaluation import Evaluation
from podium.runs.run_files import RunFiles
from podium.runtime import endpoint
from podium.telemetry import CheckpointSaved, Event, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.checkpointing import load_checkpoint
from podium.workers import Policy
from tests.integration.training import tiny
from tests.warm_python import run_python


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(RunFiles(tmp_path / "run", "checkpoints"))


def save(checkpoints: Checkpoints, step: int, keep: int = 0, text: str = "weights") -> Path:
    with checkpoints.writing(step, keep=keep) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(text)
    return checkpoints.folder / f"step-{step:06d}"


def test_a_checkpoint_is_complete_before_latest_moves(checkpoints: Checkpoints) -> None:
    events: list[Event] = []
    leave = subscribe(events.append)
    try:
        first = save(checkpoints, 10)
        with checkpoints.writing(20) as folder:
            (folder / "weights.bin").write_text("half")
            assert checkpoints.latest() == first
    finally:
        leave()
    assert (checkpoints.folder / "latest" / "weights.bin").read_text() == "half"
    assert [one.name for one in checkpoints.all()] == ["step-000010", "step-000020"]
    assert events == [CheckpointSaved(10, str(first)), CheckpointSaved(20, str(checkpoints.folder / "step-000020"))]


def test_the_best_are_kept_beside_the_newest(checkpoints: Checkpoints) -> None:
    for step, value in ((1, 3.0), (2, 5.0), (3, 5.0), (4, None), (5, 1.0)):
        with checkpoints.writing(step, keep=1, keep_best=1) as folder:
            last = Evaluation(step=step if value else 3, items=9, figures={"reward_mean": value or 9.0})
            state = TrainerState(step=step, last=last, metric="reward_mean" if step > 1 else "")
            (folder / "trainer.json").write_text(json.dumps(asdict(state)))
    assert [path.name for path in checkpoints.all()] == ["step-000003", "step-000005"]
    assert checkpoints.best() == checkpoints.folder / "step-000003"


def test_the_best_by_a_loss_is_the_lowest(checkpoints: Checkpoints) -> None:
    for step, loss in ((1, 3.0), (2, 0.5), (3, math.nan), (4, 0.7)):
        with checkpoints.writing(step) as folder:
            last = Evaluation(step=step, items=9, figures={"loss": loss})
            (folder / "trainer.json").write_text(json.dumps(asdict(TrainerState(step=step, last=last, metric="loss"))))
    assert [path.name for path in checkpoints.ranked()] == [f"step-00000{step}" for step in (2, 4, 1, 3)]


def test_a_checkpoint_that_cannot_be_read_is_named_where_the_best_is_chosen(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """The best of the others was exported without a word."""
    for step, loss in ((1, 3.0), (2, 0.5)):
        with checkpoints.writing(step) as folder:
            last = Evaluation(step=step, items=9, figures={"loss": loss})
            (folder / "trainer.json").write_text(json.dumps(asdict(TrainerState(step=step, last=last, metric="loss"))))
    assert checkpoints.best() == checkpoints.folder / "step-000002"
    assert not caplog.messages
    (checkpoints.folder / "step-000002/trainer.json").write_text("{")
    assert checkpoints.best() == checkpoints.folder / "step-000001"
    (message,) = caplog.messages
    assert message.startswith(f"{checkpoints.folder}/step-000002 counts for no choice of the best checkpoint: ")


def test_figures_of_another_evaluation_set_are_not_compared(checkpoints: Checkpoints) -> None:
    """The best checkpoint of an easy set stayed the best of a run that was resumed with a hard one."""
    for step, name, value in ((1, "easy", 0.9), (2, "hard", 0.3), (3, "hard", 0.2)):
        with checkpoints.writing(step, keep=1, keep_best=1) as folder:
            last = Evaluation(step=step, items=9, figures={"accuracy": value}, set_name=name)
            state = TrainerState(step=step, last=last, metric="accuracy")
            (folder / "trainer.json").write_text(json.dumps(asdict(state)))
    assert [path.name for path in checkpoints.all()] == ["step-000002", "step-000003"]
    assert checkpoints.best() == checkpoints.folder / "step-000002"


def test_a_checkpoint_that_fails_leaves_nothing(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10)
    with pytest.raises(KeyboardInterrupt), checkpoints.writing(20) as folder:
        (folder / "weights.bin").write_text("half")
        raise KeyboardInterrupt
    assert sorted(entry.name for entry in checkpoints.folder.iterdir()) == ["latest", "step-000010"]


def test_an_empty_checkpoint_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match="nothing was written"), checkpoints.writing(10):
        pass
    assert checkpoints.latest() is None


def test_only_the_newest_are_kept(checkpoints: Checkpoints) -> None:
    for step in (10, 20, 30, 1_000_000):
        save(checkpoints, step, keep=2)
    assert [one.name for one in checkpoints.all()] == ["step-000030", "step-1000000"]


def test_a_checkpoint_of_the_same_step_is_replaced(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, text="old")
    final = save(checkpoints, 10, text="new")
    assert (final / "model" / "weights.bin").read_text() == "new"
    assert sorted(entry.name for entry in checkpoints.folder.iterdir()) == ["latest", "step-000010"]


def test_a_folder_in_place_of_latest_is_replaced(checkpoints: Checkpoints) -> None:
    """As in a run that was copied by ``cp -rL``, or through a store that knows no links."""
    first = save(checkpoints, 5)
    (checkpoints.folder / "latest").unlink()
    shutil.copytree(first, checkpoints.folder / "latest")
    assert checkpoints.latest() == first
    assert save(checkpoints, 10) == checkpoints.latest()
    assert (checkpoints.folder / "latest").is_symlink()


def test_latest_survives_its_deletion(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    first = save(checkpoints, 10)
    second = save(checkpoints, 20)
    (second / "model" / "weights.bin").unlink()
    (second / "model").rmdir()
    second.rmdir()
    again = Checkpoints(checkpoints.files)
    assert "which is gone" not in caplog.text, "it is said where the checkpoint is read"
    assert again.latest() == first
    assert "which is gone" in caplog.text


def test_what_a_kill_left_out_behind_the_rename_is_made_up_for(checkpoints: Checkpoints) -> None:
    """Nothing else does it for a run that has no further step to train and save."""
    first, second = save(checkpoints, 10), save(checkpoints, 20)
    (checkpoints.folder / "latest").unlink()
    again = Checkpoints(checkpoints.files)
    assert (again.folder / "latest").readlink() == Path(second.name)
    again.prune(keep=1, keep_best=0)
    assert again.all() == [second]
    assert not first.exists()


def test_the_latest_checkpoint_is_kept_though_it_is_not_the_newest(checkpoints: Checkpoints) -> None:
    first, second = save(checkpoints, 10), save(checkpoints, 20)
    checkpoints.files.link(first.name, "latest")  # the link of the second one was still to move
    again = Checkpoints(checkpoints.files)
    again.prune(keep=1, keep_best=0)
    assert again.latest() == first
    assert again.all() == [first, second]


KILLED_IN = {
    # The call inside _commit at which the process is killed, and the text that must be there afterwards.
    "first file's fsync": ("os.fsync", 1, "old"),
    "first rename": ("os.replace", 1, "old"),
    "second rename": ("os.replace", 2, "old"),
    "symlink": ("os.symlink", 1, "new"),
    "replacing latest": ("os.replace", 3, "new"),
    "last fsync": ("os.fsync", 5, "new"),
}


KILLED = """
import os, signal, sys
from pathlib import Path
from podium.runs.checkpoint_folders import Checkpoints
from podium.runs.run_files import RunFiles

def write(folder, function, count):
    checkpoints = Checkpoints(RunFiles(folder, "checkpoints"))
    name = function.removeprefix("os.")
    real, calls = getattr(os, name), []
    def deadly(*args, **more):
        calls.append(args)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    with checkpoints.writing(10) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text("new")
        setattr(os, name, deadly)

for folder, function, count in eval(sys.argv[1]):
    if not (child := os.fork()):
        write(folder, function, count)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, function
"""
"""Each writer is a fork of one process, which has imported what takes long."""


def test_killed_while_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    written = {moment: Checkpoints(RunFiles(tmp_path / moment, "checkpoints")) for moment in KILLED_IN}
    for checkpoints in written.values():
        save(checkpoints, 5, text="older")
        save(checkpoints, 10, text="old")
    work = [(str(written[moment].folder.parent), *KILLED_IN[moment][:2]) for moment in KILLED_IN]
    done = run_python("-c", KILLED, repr(work))
    assert done.returncode == 0, done.stderr
    for moment, (_, _, expected) in KILLED_IN.items():
        again = Checkpoints(RunFiles(tmp_path / moment, "checkpoints"))
        latest = again.latest()
        assert latest is not None, moment
        assert latest.name == "step-000010", moment
        assert (latest / "model" / "weights.bin").read_text() == expected, moment
        assert {entry.name for entry in again.folder.iterdir()} == {"latest", "step-000005", "step-000010"}, moment


@pytest.mark.parametrize("text", ["{", '{"step": 1}', '{"stepp": 1, "first": null, "last": null}', '{"step": -5}'])
def test_a_state_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer.json").write_text(text)
    write_manifest(tmp_path, [file_sums([tmp_path / "trainer.json"])])
    with pytest.raises(CheckpointError, match=r"is not the state of a training run: \S+trainer\.json: "):
        load_checkpoint(tmp_path, None)  # pyright: ignore[reportArgumentType] - fails before it is used


def test_a_state_that_is_damaged_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trainer.json"
    file.write_text('{"step": 12}')
    write_manifest(tmp_path, [file_sums([file])])
    file.write_text('{"step": 13}')
    with pytest.raises(CheckpointError, match=r"trainer\.json is damaged.* resume from another checkpoint"):
        load_checkpoint(tmp_path, None)  # pyright: ignore[reportArgumentType] - fails before it is used


class Elsewhere(Policy):
    """Writes as a worker on another machine does, whose disk is not the controller's."""

    @endpoint(concurrent=True)
    def write_state(self, path: str) -> dict[str, Any]:
        return super().write_state(path.replace("checkpoints", "elsewhere"))


def test_a_checkpoint_on_a_disk_that_is_not_shared_is_no_checkpoint(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0})
    expected = r"step 1 is not written: \S+ lacks config\.json, .*, written on another machine.* set run\.dir to one"
    with pytest.raises(CheckpointError, match=expected):
        PPOTrainer(config, cluster="inline", workers={"policy": Elsewhere}, show=False).fit()
    assert not list((tmp_path / "runs" / "run" / "checkpoints").glob("step-*"))


def test_what_a_rank_writes_after_another_one_has_failed_is_removed_with_the_workers(tmp_path: Path) -> None:
    class Late(Policy):
        @endpoint(concurrent=True)
        def write_state(self, path: str) -> dict[str, Any]:
            raise CheckpointError("no room")

        def close(self) -> None:
            half = tmp_path / "runs" / "run" / "checkpoints" / ".step-000001.tmp" / "policy"
            half.mkdir(parents=True)
            (half / "shard-00001.safetensors").write_text("late")

    config = tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0})
    with pytest.raises(
        CheckpointError, match=r"the checkpoint of step 1 is not written: no room\. \S+ has no checkpoint"
    ):
        PPOTrainer(config, cluster="inline", workers={"policy": Late}, show=False).fit()
    assert not list((tmp_path / "runs" / "run" / "checkpoints").iterdir())


def test_the_best_evaluation_is_remembered_and_how_many_followed_it(tmp_path: Path) -> None:
    state = TrainerState(metric="reward_mean")
    for step, score in enumerate((3.0, 5.0, 5.0, 4.0)):
        state = state.after(Evaluation.of(step, 2, {"reward_mean": [score, score]}), state.judge)
    assert (state.first and state.first.step, state.last and state.last.step) == (0, 3)
    assert (state.best and state.best.step, state.waited) == (1, 2)
    (tmp_path / "trainer.json").write_text(json.dumps(asdict(state)))
    assert TrainerState.read(tmp_path) == state
    assert state.last is not None
    assert state.last.scores == {"reward_mean": [4.0, 4.0]}


SCORED = asdict(Evaluation.of(0, 3, {"loss": [1.0, 2.0, 6.0], "accuracy": [1.0, 0.0, None]}, weights=[1.0, 2.0, 1.0]))


@pytest.mark.parametrize("name", ["first", "last", "best"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"items": 4}, "weights has 3 numbers for 4 items"),
        ({"items": 4, "weights": []}, "scores.loss has 3 scores for 4 items"),
        ({"scores": {**SCORED["scores"], "loss": [1.0, None, 6.0]}}, "figures.loss = 2.75, and the mean .* is 3.5"),
        ({"figures": {**SCORED["figures"], "accuracy": 0.5}}, "figures.accuracy = 0.5, and the mean"),
        ({"figures": {"loss": 2.75}}, "accuracy is in only one of figures and scores"),
        ({"scores": {"loss": [1.0, 2.0, 6.0]}}, "accuracy is in only one of figures and scores"),
    ],
)
def test_figures_that_are_not_of_their_scores_are_refused(
    tmp_path: Path, name: str, change: dict[str, Any], expected: str
) -> None:
    file, state = tmp_path / "trainer.json", asdict(TrainerState())
    for evaluation in (SCORED, {**SCORED, "scores": {}, "weights": []}):
        file.write_text(json.dumps(state | {name: evaluation}))
        assert TrainerState.read(tmp_path).step == 0
    file.write_text(json.dumps(state | {name: {**SCORED, **change}}))
    with pytest.raises(CheckpointError, match=rf"trainer\.json: {name} = .*{expected}.*put the run's own file back"):
        TrainerState.read(tmp_path)


def test_a_state_from_before_there_was_a_metric_is_refused_in_words(tmp_path: Path) -> None:
    evaluation = {"step": 0, "correct": 3, "items": 9, "reward_mean": 0.3, "samples": []}
    state = {"step": 4, "first": evaluation, "last": evaluation, "best": evaluation, "waited": 1}
    (tmp_path / "trainer.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"first\.figures is missing; .*another version of Podium .* use that"):
        TrainerState.read(tmp_path)


def test_a_run_that_is_resumed_with_another_metric_goes_on_by_that() -> None:
    state = TrainerState(metric="accuracy")
    for step, (correct, score) in enumerate(((1.0, 0.2), (0.0, 0.9))):
        scores = {"accuracy": [correct] * 2, "reward_mean": [score] * 2}
        state = state.after(Evaluation.of(step, 2, scores), state.judge)
    assert (state.best and state.best.step, state.waited) == (0, 1)
    assert state.judged_by("auto", "") == state.judged_by("accuracy", "") == state
    by_reward = state.judged_by("reward_mean", "")
    assert (by_reward.metric, by_reward.best and by_reward.best.step, by_reward.waited) == ("reward_mean", 1, 0)
    assert by_reward.first == state.first
    by_loss, of_other_set = state.judged_by("loss", ""), state.judged_by("auto", "hard")
    for other in (by_loss, of_other_set):
        assert (other.metric, other.first, other.last, other.best) == ("", None, None, None)


@pytest.mark.parametrize("set_name", ["", "hard"])
def test_a_run_with_another_metric_finds_its_best_evaluation_among_all(set_name: str) -> None:
    """It knew the first and the last one alone."""
    state, suffix = TrainerState(metric="accuracy"), f"/{set_name}" if set_name else ""
    rows: list[dict[str, Any]] = []
    for step, score in enumerate((0.2, 0.9, math.nan, 0.4)):
        scores = {"accuracy": [0.0], "reward_mean": [score]}
        state = state.after(Evaluation.of(step, 1, scores, set_name=set_name), state.judge)
        reward = None if math.isnan(score) else score
        rows.append({"step": step, f"items{suffix}": 1, f"accuracy{suffix}": 0.0, f"reward_mean{suffix}": reward})
    changed = state.judged_by("reward_mean", set_name, rows)
    assert changed.best == Evaluation(step=1, items=1, figures={"reward_mean": 0.9}, set_name=set_name)
    assert (changed.metric, changed.waited, changed.last) == ("reward_mean", 0, state.last)
    of_named_set = [{"step": 1, "items": 1, "reward_mean": 5.0, "items/hard": 1, "reward_mean/hard": 5.0}]
    best = state.judged_by("reward_mean", "", of_named_set).best
    assert (best and best.step) == (None if set_name else 3), "the figures of another set are not those of this one"


def test_a_run_that_is_judged_by_another_set_knows_what_was_measured_of_it() -> None:
    """It forgot the figures of the set that metrics.jsonl has, so that the summary had no figures of before."""
    state, rows = TrainerState(metric="accuracy"), list[dict[str, Any]]()
    for step, hard in enumerate((0.2, 0.6, 0.4)):
        state = state.after(Evaluation.of(step, 1, {"accuracy": [1.0]}, set_name="easy"), state.judge)
        row = {"kind": "eval", "step": step, "items": 1, "accuracy": 1.0, "items/easy": 1, "accuracy/easy": 1.0}
        rows.append({**row, "items/hard": 5, "accuracy/hard": hard})
    changed = state.judged_by("accuracy", "hard", rows)
    measured = [changed.first, changed.best, changed.last]
    assert [(one and one.step, one and one.figures, one and one.items) for one in measured] == [
        (step, {"accuracy": hard}, 5) for step, hard in enumerate((0.2, 0.6, 0.4))
    ]
    assert changed.metric == "accuracy"
