"""A process that ends while the end of another one is mended is one more loss: nothing is lost, nothing hangs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bench.chaos.books import check_ledger
from bench.chaos.pairs import SecondFault
from podium.data import Batch
from podium.errors import LostTooOften
from podium.runs.ledger import read_ledger
from podium.runtime import Cluster, endpoint, nothing
from podium.telemetry import (
    CheckpointSaved,
    Event,
    Note,
    Recovered,
    StepFinished,
    WorkerLost,
    WorkerStarted,
    subscribe,
)
from podium.trainer import GRPOConfig, PPOConfig, PPOTrainer
from podium.workers import Generator, Policy
from tests.integration.test_environments import WORLDS, config_of
from tests.integration.training import losses, tiny

SECTIONS: dict[str, Any] = {"eval": {"items": 0}, "save": {"every": 1, "model": False}}
STEPS = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = tiny(GRPOConfig, folder, run={"steps": STEPS}, placement={"layout": "split"}, **SECTIONS)
    PPOTrainer(config, cluster="inline", show=False).fit()
    return losses(folder / "runs" / "run")


class Disturbed:
    """A run of which ``first`` is killed after its second step, and one more process at an event after that."""

    def __init__(self, config: Any, cluster: Cluster, **options: Any) -> None:
        self.trainer = PPOTrainer(config, cluster=cluster, show=False, **options)
        self.cluster, self.run = cluster, Path(config.run.dir) / config.run.name
        self.said: list[str] = []
        self.started: dict[str, int] = {}

    def find(self, role: str) -> int:
        """The process that holds a role, the newest one of its name."""
        if role == "fork_server":
            return self.cluster._backend._server.process.pid  # type: ignore[attr-defined]  # of the backend local
        if role == "dispatcher":
            return self.trainer.run.grader._processes._launched.process.pid  # type: ignore[union-attr]
        return next(pid for roles, pid in reversed([*self.started.items()]) if role in roles)

    def fit(self, first: str = "", second: SecondFault | None = None) -> None:
        struck: list[int] = []

        def see(event: Event) -> None:
            if isinstance(event, WorkerStarted):
                self.started.pop(event.role, None)
                self.started[event.role] = event.pid
            if isinstance(event, Note):
                self.said.append(event.text)
            if first and not struck and isinstance(event, StepFinished) and event.step == 2:
                struck.append(self.find(first))
                os.kill(struck[0], signal.SIGKILL)
            elif struck and second is not None:
                second(event)

        unsubscribe = subscribe(see)
        try:
            self.trainer.fit()
        finally:
            unsubscribe()
        assert second is None or second.struck, f"no event of its kind came: {self.said}"

    def counts(self) -> dict[str, int]:
        return read_ledger(self.run / "ledger.jsonl").counts()


PAIRS = [  # the first victim, the event and the role that it is about, and the second victim
    ("policy", "lost", "policy", "fork_server"),
    ("policy", "loading", "", "fork_server"),
    ("policy", "started", "policy", "policy"),
    ("policy", "started", "generator", "generator"),
    ("policy", "started", "generator", "policy"),
    ("policy", "started", "generator", "fork_server"),
    ("policy", "restored", "", "policy"),
    ("policy", "restored", "", "generator"),
    ("policy", "recovered", "", "policy"),
    ("policy", "lost", "policy", "generator"),
    ("policy", "lost", "policy", "dispatcher"),
    ("policy", "restored", "", "dispatcher"),
    ("generator", "started", "generator", "generator"),
    ("generator", "started", "generator", "policy"),
    ("generator", "lost", "generator", "policy"),
    ("generator", "lost", "generator", "fork_server"),
    ("generator", "recovered", "", "generator"),
    ("fork_server", "started", "policy", "fork_server"),
]
EVERYDAY = {PAIRS[0], PAIRS[13]}  # a worker and the process that starts workers; workers of two roles


@pytest.mark.everyday("generator-started-generator-policy-sync")
@pytest.mark.parametrize("schedule", ["sync", pytest.param("asynchronous", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("first", "event", "role", "victim"),
    [pytest.param(*pair, marks=() if pair in EVERYDAY else pytest.mark.exhaustive) for pair in PAIRS],
)
def test_a_loss_while_a_loss_is_mended_is_one_more_loss(
    first: str, event: str, role: str, victim: str, schedule: str,
    preloaded: Cluster, tmp_path: Path, undisturbed: list[float],
) -> None:  # fmt: skip
    steps = STEPS if schedule == "sync" else 4 * STEPS  # all of fewer may be drawn before the first loss is seen
    run = {"steps": steps, "schedule": schedule}
    disturbed = Disturbed(tiny(GRPOConfig, tmp_path, run=run, placement={"layout": "split"}, **SECTIONS), preloaded)
    disturbed.fit(first, SecondFault(event, role, lambda: disturbed.find(victim)))
    staleness = 0 if schedule == "sync" else disturbed.trainer.config.run.max_staleness
    assert check_ledger(disturbed.run / "ledger.jsonl", prompts=4 * steps, staleness=staleness) == []
    if schedule == "sync":
        assert losses(disturbed.run) == pytest.approx(undisturbed, abs=1e-6)
    assert any("loss 1 of at most 3" in text for text in disturbed.said), disturbed.said


class FatalLoad(Policy):
    """It ends as it loads a checkpoint, ``TIMES`` times in all."""

    def __init__(self, *given: Any, folder: Path, times: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self.folder, self.times = folder, times

    @endpoint(collect=nothing())
    def load(self, path: str) -> None:
        if len([*self.folder.glob("loaded-*")]) < self.times:
            (self.folder / f"loaded-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().load(path)


def fatal_load(config: GRPOConfig, folder: Path, times: int) -> Any:
    own = {"model": config.model, "optim": config.ending_optim, "parallel": config.parallel}
    return FatalLoad.bind(**own, algorithm=config.resolved_algorithm, folder=folder, times=times)


@pytest.mark.exhaustive
def test_a_policy_that_ends_as_it_loads_the_checkpoint_is_mended_up_to_the_limit(
    preloaded: Cluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    for times in (2, 9):
        folder = tmp_path / str(times)
        folder.mkdir()
        config = tiny(GRPOConfig, folder, run={"steps": STEPS}, placement={"layout": "split"}, **SECTIONS)
        disturbed = Disturbed(config, preloaded, workers={"policy": fatal_load(config, folder, times)})
        if times == 2:
            disturbed.fit("policy")
            assert losses(disturbed.run) == pytest.approx(undisturbed, abs=1e-6)
            assert disturbed.counts() == {"trained": 4 * STEPS}
        else:
            with pytest.raises(LostTooOften, match=r"lost workers 4 times within an hour") as caught:
                disturbed.fit("policy")
            assert str(caught.value).count("s ago: rank 0 of") == 4


def test_a_policy_that_ends_before_the_first_step_is_mended(
    preloaded: Cluster, tmp_path: Path, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": STEPS}, placement={"layout": "split"}, **SECTIONS)
    disturbed = Disturbed(config, preloaded)
    resume, struck = disturbed.trainer.resume, list[int]()

    def strike_and_resume() -> int:
        if not struck:
            struck.append(disturbed.find("policy"))
            os.kill(struck[0], signal.SIGKILL)
        return resume()

    monkeypatch.setattr(disturbed.trainer, "resume", strike_and_resume)
    disturbed.fit()
    assert any("loss 1 of at most 3" in text for text in disturbed.said), disturbed.said
    assert losses(disturbed.run) == pytest.approx(undisturbed, abs=1e-6)


Moment = tuple[Callable[[Event], bool], tuple[str, ...]]


def after(step: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, StepFinished) and event.step == step


def saved(step: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, CheckpointSaved) and event.step == step


def begins(role: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, WorkerStarted) and role in event.role


def is_lost(event: Event) -> bool:
    return isinstance(event, WorkerLost)


def has_recovered(event: Event) -> bool:
    return isinstance(event, Recovered)


MOMENTS: dict[str, tuple[Moment, ...]] = {
    "generator and dispatcher": ((after(2), ("generator", "dispatcher")),),
    "policy, generator and dispatcher": ((after(2), ("policy", "generator", "dispatcher")),),
    "all and the fork server": ((after(1), ("generator", "fork_server", "policy")),),
    "after the last step": ((after(STEPS), ("policy", "generator")),),
    "after the last checkpoint": ((saved(STEPS), ("policy",)),),
    "three starts": ((saved(1), ("policy",)), (begins("policy"), ("policy",)), (begins("policy"), ("policy",))),
    "three recoveries": ((after(1), ("policy",)), (has_recovered, ("generator",)), (has_recovered, ("policy",))),
    "the fork server twice": (
        (after(1), ("policy",)),
        (is_lost, ("fork_server",)),
        (begins("generator"), ("generator", "fork_server")),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["sync", "asynchronous"])
@pytest.mark.parametrize("name", MOMENTS)
def test_several_losses_in_one_moment_and_chains_of_three_lose_nothing(
    name: str, schedule: str, preloaded: Cluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    run = {"steps": STEPS, "schedule": schedule}
    disturbed = Disturbed(tiny(GRPOConfig, tmp_path, run=run, placement={"layout": "split"}, **SECTIONS), preloaded)
    moments = [*MOMENTS[name]]

    def strike(event: Event) -> None:
        if moments and moments[0][0](event):
            for role in moments.pop(0)[1]:
                with suppress(ProcessLookupError):  # the fork server's end is that of its workers
                    os.kill(disturbed.find(role), signal.SIGKILL)

    begun: list[Callable[[], None]] = []
    fit = disturbed.trainer.fit

    def strike_and_fit() -> Any:
        begun.append(subscribe(strike))  # behind Disturbed's own, which knows the processes by then
        return fit()

    disturbed.trainer.fit = strike_and_fit  # type: ignore[method-assign]  # of this trainer alone
    try:
        disturbed.fit()
    finally:
        begun[0]()
    assert not moments, f"not all moments came: {disturbed.said}"
    staleness = 0 if schedule == "sync" else disturbed.trainer.config.run.max_staleness
    assert check_ledger(disturbed.run / "ledger.jsonl", prompts=4 * STEPS, staleness=staleness) == []
    if schedule == "sync":
        assert losses(disturbed.run) == pytest.approx(undisturbed, abs=1e-6)


@pytest.mark.exhaustive
def test_a_resumed_run_whose_policy_ends_as_it_loads_is_mended(
    preloaded: Cluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    first = tiny(GRPOConfig, tmp_path, run={"steps": 2}, placement={"layout": "split"}, **SECTIONS)
    PPOTrainer(first, cluster=preloaded, show=False).fit()
    run = {"steps": STEPS, "resume": str(tmp_path / "runs" / "run")}
    config = tiny(GRPOConfig, tmp_path, run=run, placement={"layout": "split"}, **SECTIONS)
    disturbed = Disturbed(config, preloaded, workers={"policy": fatal_load(config, tmp_path, 2)})
    disturbed.fit()
    assert len([*tmp_path.glob("loaded-*")]) == 2
    assert losses(disturbed.run) == pytest.approx(undisturbed, abs=1e-6)
    assert disturbed.counts() == {"trained": 4 * STEPS}


class FatalSync(Generator):
    """It ends as it gets weights of version 2 or later, and once more as its replacement gets them."""

    def __init__(self, *given: Any, folder: Path, **named: Any) -> None:
        super().__init__(*given, **named)
        self.folder = folder

    @endpoint(concurrent=True)
    def receive_weights(self, version: int, index: int, tensors: Any, sums: Any = None) -> list[str]:
        if version >= 2 and len([*self.folder.glob("got-*")]) < 2:
            (self.folder / f"got-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().receive_weights(version, index, tensors, sums)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", [pytest.param("sync", marks=pytest.mark.exhaustive), "asynchronous"])
def test_a_generator_that_ends_twice_as_it_gets_its_weights_is_mended(
    preloaded: Cluster, tmp_path: Path, schedule: str
) -> None:
    run = {"steps": 8, "schedule": schedule}  # the last steps need a generator again
    config = tiny(GRPOConfig, tmp_path, run=run, placement={"layout": "split"}, **SECTIONS)
    fatal = FatalSync.bind(config.model, config.engine, folder=tmp_path)
    disturbed = Disturbed(config, preloaded, workers={"generator": fatal})
    disturbed.fit()
    assert disturbed.counts() == {"trained": 32}
    assert any("loss 2 of at most 3" in text for text in disturbed.said), disturbed.said


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["critic", "reference"])
def test_a_critic_and_a_reference_that_end_as_they_start_again_are_mended(
    preloaded: Cluster, tmp_path: Path, victim: str
) -> None:
    pools = {"first": ["policy", "estimator"], "critic": ["critic"], "reference": ["reference"], "last": ["generator"]}
    placement = {"pools": {name: {"roles": roles, "ranks": 1} for name, roles in pools.items()}}
    config = tiny(
        PPOConfig, tmp_path, run={"steps": STEPS}, placement=placement,
        algorithm={"kl_in": "loss", "kl_estimator": "k2", "kl_coef": 0.1},
        **SECTIONS,
    )  # fmt: skip
    disturbed = Disturbed(config, preloaded)
    disturbed.fit(victim, SecondFault("started", victim, lambda: disturbed.find(victim)))
    assert disturbed.counts() == {"trained": 4 * STEPS}


@pytest.mark.parametrize(
    ("first", "event", "role", "victim"),
    [
        ("rollout", "lost", "rollout", "generator"),
        pytest.param("rollout", "started", "rollout", "rollout", marks=pytest.mark.exhaustive),
        pytest.param("policy", "started", "rollout", "rollout", marks=pytest.mark.exhaustive),
        pytest.param("generator", "recovered", "", "rollout", marks=pytest.mark.exhaustive),
        pytest.param("generator", "started", "generator", "rollout", marks=pytest.mark.exhaustive),
        pytest.param("generator", "started", "generator", "generator", marks=pytest.mark.exhaustive),
    ],
)
def test_losses_in_pairs_lose_no_session(
    first: str, event: str, role: str, victim: str, preloaded: Cluster, tmp_path: Path
) -> None:
    config = config_of("twice", tmp_path, placement={"layout": "split"}, run={"steps": STEPS}, **SECTIONS)
    disturbed = Disturbed(config, preloaded)
    disturbed.fit(first, SecondFault(event, role, lambda: disturbed.find(victim)))
    assert disturbed.counts() == {"trained": 4 * STEPS}


class FatalServe(Generator):
    """Its replacement ends as it begins to answer sessions."""

    def __init__(self, *given: Any, folder: Path, **named: Any) -> None:
        super().__init__(*given, **named)
        self.folder = folder

    @endpoint(concurrent=True)
    def positions(self) -> int | None:
        (self.folder / f"serves-{os.getpid()}").touch()
        if len([*self.folder.glob("serves-*")]) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().positions()


@pytest.mark.exhaustive
def test_a_generator_that_ends_as_it_begins_to_answer_sessions_is_mended(preloaded: Cluster, tmp_path: Path) -> None:
    config = config_of("twice", tmp_path, placement={"layout": "split"}, run={"steps": STEPS}, **SECTIONS)
    fatal = FatalServe.bind(config.model, config.engine, folder=tmp_path)
    disturbed = Disturbed(config, preloaded, workers={"generator": fatal})
    disturbed.fit("generator")
    assert disturbed.counts() == {"trained": 4 * STEPS}
    assert len([*tmp_path.glob("serves-*")]) == 3


def test_a_lost_dispatcher_of_grades_is_mended(preloaded: Cluster, tmp_path: Path) -> None:
    run, once = {"steps": STEPS}, tmp_path / "once"

    def reward(completion: str, answer: str) -> float:
        try:
            once.rmdir()
        except OSError:
            return float(completion == answer)
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
        return 0.0

    disturbed = Disturbed(
        tiny(GRPOConfig, tmp_path, run=run, placement={"layout": "split"}, **SECTIONS), preloaded, reward=reward
    )
    once.mkdir()
    disturbed.fit()
    assert disturbed.counts() == {"trained": 4 * STEPS}
    assert any("the process that grades with the reward" in text for text in disturbed.said), disturbed.said


POISON = "7"  # begins the prompts that end the process which plays them


FATAL = f"{WORLDS}:fatal"


def write_prompts(config: Any) -> None:
    """Have the data of a run be two prompts that end the process which plays them, among harmless ones."""
    prompts = [f"{POISON}0=", f"{POISON}1=", *(f"{n}{n}=" for n in range(7))]
    rows = (json.dumps({"prompt": prompt, "answer": prompt[:2]}) + "\n" for prompt in prompts)
    Path(config.data.train).write_text("".join(rows))


def check_dropped(run: Path, reason: str) -> None:
    """Check that both prompts were dropped in each pass for ``reason``, and every other one was trained once."""
    states = read_ledger(run / "ledger.jsonl")
    assert states.counts()["trained"] == 12
    assert [*states.reasons] == [reason]
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    trained = [prompt for line in lines if line.get("state") == "trained" for prompt in line["prompts"]]
    assert len(trained) == len({*trained})
    prompts = pq.read_table(run / "completions", columns=["prompt"]).to_pydict()["prompt"]
    assert not any(prompt.startswith(POISON) for prompt in prompts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["sync", pytest.param("asynchronous", marks=pytest.mark.exhaustive)])
def test_a_prompt_that_ends_the_rollout_worker_twice_is_dropped_with_a_reason(
    schedule: str, preloaded: Cluster, tmp_path: Path
) -> None:
    run = {"steps": 6, "schedule": schedule, "max_restarts": 100}
    split = {"placement": {"layout": "split"}, "batch": {"prompts": 2}}
    config = config_of("fatal", tmp_path, run=run, data={"holdout": 0}, **split, **SECTIONS)
    write_prompts(config)
    disturbed = Disturbed(config, preloaded)
    disturbed.fit()
    check_dropped(disturbed.run, "in flight in two losses of rollout")
    assert any("will not be played again" in text and "options.processes = 8" in text for text in disturbed.said)


def test_the_error_of_a_rollout_worker_that_is_lost_too_often_names_the_remedy(
    preloaded: Cluster, tmp_path: Path
) -> None:
    run = {"steps": 6, "max_restarts": 1}
    split = {"placement": {"layout": "split"}, "batch": {"prompts": 2}}
    config = config_of("fatal", tmp_path, run=run, data={"holdout": 0}, **split, **SECTIONS)
    write_prompts(config)
    with pytest.raises(LostTooOften, match=r"environment\.options\.processes = 8 each session has a process"):
        Disturbed(config, preloaded).fit()


class FatalDraw(Generator):
    """It ends when it is asked for the completions of some prompts."""

    def _build_requests(self, prompts: Batch, sampling: Any) -> Any:
        asked = super()._build_requests(prompts, sampling)
        if any(str(self._tokenizer.decode([*row])).startswith(POISON) for row in asked.prompts):
            os.kill(os.getpid(), signal.SIGKILL)
        return asked


@pytest.mark.parametrize("schedule", ["sync", "asynchronous"])
@pytest.mark.exhaustive
def test_a_prompt_that_ends_the_generator_twice_is_dropped_with_a_reason(
    schedule: str, preloaded: Cluster, tmp_path: Path
) -> None:
    run = {"steps": 6, "schedule": schedule, "max_restarts": 100}
    config = tiny(
        GRPOConfig, tmp_path, run=run, placement={"layout": "split"}, batch={"prompts": 2}, engine={"max_sequences": 4},
        data={"holdout": 0}, **SECTIONS,
    )  # fmt: skip
    write_prompts(config)
    disturbed = Disturbed(config, preloaded, workers={"generator": FatalDraw.bind(config.model, config.engine)})
    disturbed.fit()
    check_dropped(disturbed.run, "in flight in two losses of generator")
