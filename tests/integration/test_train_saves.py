"""Checkpoints are written beside the steps that follow, hold the state of their own step, and fail without harm."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from podium.errors import CheckpointError
from podium.models import model_files
from podium.runs.ledger import read_ledger
from podium.runtime import Cluster, endpoint, nothing
from podium.telemetry import CheckpointSaved, Event, Note, Recovered, StageFinished, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.workers import Policy
from tests.integration.training import losses, tiny

STEPS = 4


class Gated(Policy):
    """It begins to write its second checkpoint once there is a file ``open`` beside the run."""

    @endpoint(concurrent=True)
    def write_state(self, path: str) -> dict[str, Any]:
        beside = Path(path).parents[4]
        if "step-000002" in path and not (beside / "open").exists():
            (beside / "writing").touch()
            until = time.monotonic() + 60
            while not (beside / "open").exists() and time.monotonic() < until:
                time.sleep(0.01)
        return super().write_state(path)


def config(folder: Path, **sections: Any) -> GRPOConfig:
    sections["run"] = {"steps": STEPS, **sections.get("run", {})}
    return tiny(GRPOConfig, folder, eval={"items": 0}, **{"save": {"every": 1, "keep": 0, "model": False}, **sections})


@pytest.fixture(scope="module")
def cluster(preloaded: Cluster) -> Cluster:
    return preloaded


def fit(cluster: Cluster, asked: GRPOConfig, see: Callable[[PPOTrainer, Event], None], policy: Any = Gated) -> None:
    """Train; ``see`` gets the trainer and each event, in the thread that emits it."""
    trainer = PPOTrainer(asked, cluster=cluster, workers={"policy": policy}, show=False)
    unsubscribe = subscribe(lambda event: see(trainer, event))
    try:
        trainer.fit()
    finally:
        unsubscribe()


def names(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    PPOTrainer(config(folder), cluster="inline", show=False).fit()
    return losses(folder / "runs" / "run")


def test_steps_go_on_while_a_checkpoint_of_their_past_is_written(
    cluster: Cluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    run, order = tmp_path / "runs" / "run", list[str]()

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            order.append(f"saved {event.step}")
        if isinstance(event, StepFinished):
            order.append(f"step {event.step}")
            if event.step == 3:
                (tmp_path / "open").touch()

    fit(cluster, config(tmp_path, save={"every": 2, "keep": 0, "model": False}), see)
    assert [one for one in order if one[:4] == "step"] == [f"step {step}" for step in range(1, STEPS + 1)]
    assert [one for one in order if one[:4] == "save"] == ["saved 2", "saved 4"]
    assert order.index("saved 2") > order.index("step 3")
    assert losses(run) == undisturbed

    shutil.rmtree(run / "checkpoints" / "step-000004")  # so that the run is resumed from the state of step 2
    (run / "summary.json").unlink()
    fit(cluster, config(tmp_path, run={"resume": str(run)}), lambda trainer, event: None)
    assert losses(run) == undisturbed
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 4 * STEPS}


def test_a_policy_that_dies_while_it_writes_leaves_the_checkpoint_before(
    cluster: Cluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    run, said, there = tmp_path / "runs" / "run", list[str](), list[str]()

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, Recovered | Note):
            said.append(event.text)
        if isinstance(event, StepFinished) and event.step == 3 and not (tmp_path / "open").exists():
            while not (tmp_path / "writing").exists():
                time.sleep(0.01)
            there.extend(names(run))
            os.kill(trainer.run.roles.policy.group.pids[0], signal.SIGKILL)
            (tmp_path / "open").touch()  # for the policy of the restart

    fit(cluster, config(tmp_path), see)
    assert there == [".step-000002.tmp", "latest", "step-000001"]
    (recovered, resumed) = [text for text in said if text.startswith(("lost", "resuming"))]
    assert "signal SIGKILL" in recovered
    assert resumed.startswith("resuming after step 1 ")
    assert losses(run) == undisturbed
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 4 * STEPS}
    assert names(run) == ["latest", *(f"step-{step:06d}" for step in range(1, STEPS + 1))]


def test_a_policy_that_dies_while_it_copies_leaves_no_file_in_the_end(
    cluster: Cluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    class Dies(Policy):
        @endpoint(collect=nothing())
        def copy_state(self, within: str | None = None) -> None:
            def die(model: Any, state: Any, folder: str, *_: Any) -> None:
                written = Path(folder, "written")
                written.touch()
                (tmp_path / "written").write_text(str(written))
                os.kill(os.getpid(), signal.SIGKILL)

            if not (tmp_path / "written").exists():
                model_files.save_pretrained = die
            super().copy_state(within)

    run = tmp_path / "runs" / "run"
    (tmp_path / "open").touch()
    fit(cluster, config(tmp_path), lambda trainer, event: None, Dies)
    written = Path((tmp_path / "written").read_text())
    assert written.parent.parent.samefile(run / "checkpoints")
    assert not written.parent.exists()
    assert losses(run) == undisturbed
    assert names(run) == ["latest", *(f"step-{step:06d}" for step in range(1, STEPS + 1))]


def test_a_full_disk_ends_the_run_and_the_resumed_one_has_lost_nothing(
    cluster: Cluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    """The kernel refuses what the second of two ranks writes beyond a kilobyte."""
    run = tmp_path / "runs" / "run"
    (tmp_path / "open").touch()

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            resource.prlimit(trainer.run.roles.policy.group.pids[1], resource.RLIMIT_FSIZE, (1000, 1000))

    ranks: dict[str, Any] = {"placement": {"ranks": 2}, "parallel": {"strategy": "fsdp2"}}
    with pytest.raises(CheckpointError) as caught:
        fit(cluster, config(tmp_path, **ranks), see)
    assert str(caught.value) == (
        f"the checkpoint of step 2 is not written: cannot write {run.absolute()}/checkpoints/.step-000002.tmp/policy: "
        "File too large; raise the limit on the size of files (ulimit -f). "
        f"{run}/checkpoints/step-000001 is complete: resume with --resume {run}"
    )
    assert names(run) == ["latest", "step-000001"]
    assert (run / "checkpoints" / "latest").readlink() == Path("step-000001")
    fit(cluster, config(tmp_path, run={"resume": str(run)}, **ranks), lambda trainer, event: None)
    assert losses(run) == pytest.approx(undisturbed, abs=1e-5)
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 4 * STEPS}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "there"), r"there: No space left on device.*; make room"),
        (OSError(errno.ENOSPC, "No space left on device"), r"\S+/checkpoints: No space left on device; make room on"),
        (Exception("No space left on device (os error 28)"), r"\S+/checkpoints: No space left on device; make room on"),
        (RuntimeError("never mind"), r"RuntimeError: never mind\. "),
    ],
)
def test_a_state_that_cannot_be_copied_ends_the_run_with_the_reason(
    tmp_path: Path, error: Exception, said: str
) -> None:
    class Fails(Policy):
        @endpoint(collect=nothing())
        def copy_state(self, within: str | None = None) -> None:
            raise error

    trainer = PPOTrainer(config(tmp_path), cluster="inline", workers={"policy": Fails}, show=False)
    with pytest.raises(CheckpointError, match=rf"the checkpoint of step 1 is not written: {said}"):
        trainer.fit()


@pytest.mark.everyday("signal")
@pytest.mark.parametrize("end", ("signal", "error"))
def test_a_run_that_ends_early_waits_for_the_checkpoint_that_is_being_written(
    cluster: Cluster, tmp_path: Path, end: str
) -> None:
    class Slow(Policy):
        @endpoint(concurrent=True)
        def write_state(self, path: str) -> dict[str, Any]:
            time.sleep(1.0)
            return super().write_state(path)

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 2 and end == "signal":
            os.kill(os.getpid(), signal.SIGINT)
        if isinstance(event, StageFinished) and (event.name, event.step) == ("generate", 3):
            trainer.learn = fail  # type: ignore[method-assign]

    def fail(rollout: Any) -> Any:
        raise RuntimeError("no more")

    asked = config(tmp_path, save={"every": 2, "model": False})
    with nullcontext() if end == "signal" else pytest.raises(RuntimeError, match="no more"):
        fit(cluster, asked, see, Slow)
    run = tmp_path / "runs" / "run"
    assert names(run) == ["latest", "step-000002"]
    assert json.loads((run / "checkpoints" / "latest" / "trainer.json").read_text())["step"] == 2


def test_a_run_that_was_killed_behind_its_last_save_ends_with_its_link_and_few_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    PPOTrainer(config(tmp_path, run={"steps": 2}), cluster="inline", show=False).fit()
    (run / "checkpoints" / "latest").unlink()
    (run / "summary.json").unlink()
    resumed = config(tmp_path, run={"steps": 2, "resume": str(run)}, save={"every": 1, "keep": 1, "model": False})
    PPOTrainer(resumed, cluster="inline", show=False).fit()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-000002"]
    assert (run / "checkpoints" / "latest").readlink() == Path("step-000002")
