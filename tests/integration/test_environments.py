"""Training in an environment: sessions of several turns, agents of a user's own, and what goes wrong in them."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from podium import Cluster
from podium.cli import main
from podium.config import config_to_dict
from podium.data import Batch, fields
from podium.errors import ConfigError, PodiumError
from podium.rollout.engines import Engine
from podium.runs.ledger import read_ledger
from podium.runtime import endpoint, first, only
from podium.telemetry import Note, metrics, subscribe
from podium.trainer import GRPOConfig, InferenceConfig, PPOConfig, PPOTrainer, build_config
from podium.workers import Estimator, Generator, Policy
from podium_agents.environments import runner
from podium_dryrun import describe_data
from podium_inference import evaluate_model
from podium_view.run import Run
from tests.integration import worlds
from tests.integration.training import MODEL, losses, metrics_rows, tiny, train

WORLDS = Path(worlds.__file__)
TEMPLATE = (
    "{#- podium: tools are left out -#}{{ tools | length if tools }}{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def config_of(world: str, folder: Path, cls: type[Any] = GRPOConfig, **sections: Any) -> Any:
    """A run of two steps in a world of ``worlds.py``."""
    folder.mkdir(exist_ok=True)
    (folder / "chat.jinja").write_text(TEMPLATE)
    options = sections.pop("options", {})
    data = {"chat_template": str(folder / "chat.jinja"), **sections.pop("data", {})}
    return tiny(cls, folder, environment={"name": f"{WORLDS}:{world}", "options": options}, data=data, **sections)


def sessions_config(folder: Path, **sections: Any) -> Any:
    """Sessions of two turns, each of which has a reward of its own: the finished run that tests share."""
    return config_of(
        "twice", folder, **{"algorithm": {"advantage": "grpo_turns"}, "reward": {"name": "exact"}, **sections}
    )


SHORT = 20


class ShortGenerator(Generator):
    """A generator whose engine has room for less than the model, which has 32 positions."""

    def _ready_engine(self) -> Engine:
        engine = super()._ready_engine()
        engine.positions = SHORT
        return engine


@contextmanager
def told() -> Iterator[list[str]]:
    """What notes say in the block."""
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        yield notes
    finally:
        unsubscribe()


@pytest.mark.parametrize("world", ["twice", "Guess"])
def test_a_session_of_several_turns_is_a_row_and_its_turns_are_rewarded(
    world: str, finished_sessions: Path, tmp_path: Path
) -> None:
    if world == "twice":
        run = finished_sessions / "runs" / "run"
        check_no_remarks((run / "logs" / "controller.log").read_text())
    else:
        run = train(config_of(world, tmp_path, algorithm={"advantage": "grpo_turns"}))
    for row in metrics_rows(run):
        assert row[metrics.SESSIONS_TRAINED] == row[metrics.SESSIONS_ROWS] == 16
        assert row[metrics.SESSIONS_FAILED] == row[metrics.SESSIONS_SPLITS] == 0
        assert row[metrics.SESSIONS_UNRECOGNIZED] == 0
        assert row[metrics.MISMATCH_MAX] < 1e-5  # what was recorded is what the policy would have drawn
        assert row[metrics.SESSIONS_TURNS] == pytest.approx(2 if world == "twice" else 3, abs=0.5)
        assert row[metrics.REWARD_MEAN] > 0
        if world == "twice":
            assert row[metrics.REWARD_MEAN] == pytest.approx(row["reward_parts/digits"])
    table = pq.read_table(run / "completions" / "step-000002.parquet").to_pydict()
    assert table["conversation"][0].startswith(table["prompt"][0])
    assert len(table["conversation"][0]) > len(table["prompt"][0]) + len(table["completion"][0])
    assert max(len({*row}) for row in table["token_advantages"]) > 1  # turns of one row have advantages of their own
    _turns_are_the_row(table)
    assert table["session"] == [*range(16)]
    for rewards, reward in zip(table["turn_rewards"], table["reward"], strict=True):
        assert sum(rewards) == pytest.approx(reward)


def check_no_remarks(text: str) -> None:
    """Check that of no setting it was said that it is not used."""
    assert "scored nothing" not in text and "has no use" not in text


_SPECIAL = re.compile("<(pad|bos|eos|unk)>")


def _turns_are_the_row(table: dict[str, list[Any]]) -> None:
    """What was read and said in turns is what the row holds, and each sampled token has its turn and its characters."""
    for row in range(len(table["tokens"])):
        said = "".join(table["turn_said"][row])
        assert sum(table["turn_tokens"][row]) == len(table["tokens"][row]) == len(table["token_chars"][row])
        assert sum(table["token_chars"][row]) == len(said)
        assert len(table["turn_read"][row]) > 1
        whole = itertools.chain(*zip(table["turn_read"][row], table["turn_said"][row], strict=True))
        assert _SPECIAL.sub("", "".join(whole)) == _SPECIAL.sub("", table["conversation"][row])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [pytest.param("colocated", marks=pytest.mark.exhaustive), "split"])
def test_backends_and_layouts_train_on_the_same_sessions(
    layout: str, finished_sessions: Path, tmp_path: Path, preloaded: Cluster
) -> None:
    """In the trainer's process, in worker processes, and with the generator in a process of its own, over HTTP."""
    run = train(sessions_config(tmp_path, placement={"layout": layout}), preloaded)
    assert losses(run) == losses(finished_sessions / "runs" / "run")


WHERE = (("colocated", "inline"), ("split", "local"), ("colocated", "local"))


@pytest.mark.everyday("split-local")
@pytest.mark.parametrize(("layout", "backend"), WHERE)
def test_an_agent_that_knows_only_an_address_is_trained_by_the_sampling_of_the_run(
    layout: str, backend: str, tmp_path: Path, preloaded: Cluster
) -> None:
    pytest.importorskip("openai")
    config = config_of(
        "agent", tmp_path, run={"steps": 2 if layout == "colocated" else 1}, placement={"layout": layout}
    )
    with told() as notes:
        run = train(config, "inline" if backend == "inline" else preloaded)
    for row in metrics_rows(run):
        assert (row[metrics.SESSIONS_ROWS], row[metrics.SESSIONS_TURNS]) == (16, 2)
        assert row[metrics.MISMATCH_MAX] < 1e-5
        assert 0 <= row[metrics.SESSIONS_REUSED] < row[metrics.SESSIONS_READ]
        assert row[metrics.SESSIONS_EVICTED] == 0
    assert sum("its own temperature" in note for note in notes) == 1


def test_an_agent_that_asks_for_the_temperature_of_training_is_not_overruled(tmp_path: Path) -> None:
    """Also where evaluation, which draws without chance, overrules it."""
    pytest.importorskip("openai")
    with told() as notes:
        train(config_of("agent", tmp_path, options={"temperature": 1.0}, run={"steps": 1}))
    assert not [note for note in notes if "its own" in note]


def test_sessions_that_fail_end_alone_and_are_counted(tmp_path: Path) -> None:
    with told() as notes:  # of each step the three most frequent reasons
        run = train(config_of("unlucky", tmp_path, options={"time_limit_s": 5.0}, batch={"prompts": 12}))
    rows = metrics_rows(run)
    assert all(0 < row[metrics.SESSIONS_FAILED] < 1 for row in rows)
    said = "\n".join(notes)
    assert "sessions failed and are not trained" in said
    for reason in ("KeyError", "time limit", "SystemExit", "nan"):
        assert reason in said, said
    table = pq.read_table(run / "completions" / "step-000001.parquet").to_pydict()
    assert {int(answer) % 8 for answer in table["expected"]} <= {0, 6, 7}
    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    gone = [len(row["prompts"]) for row in ledger if row.get("reason") == "every session failed"]
    assert json.loads((run / "summary.json").read_text())["dropped"] == {"every session failed": sum(gone)}


def test_sessions_draw_no_id_that_stands_for_no_text(tmp_path: Path) -> None:
    padded = {"config": {**MODEL["config"], "vocab_size": 150}}  # for the 16 tokens of the tokenizer
    run = train(sessions_config(tmp_path, model=padded))
    table = pq.read_table(run / "completions").to_pydict()
    assert max(token for row in table["tokens"] for token in row) < 16
    assert all(row[metrics.MISMATCH_MAX] < 1e-5 for row in metrics_rows(run))


@pytest.mark.parametrize("cluster", ["inline", pytest.param("local", marks=pytest.mark.exhaustive)])
def test_an_environment_that_blocks_the_others_is_named_while_it_does(
    cluster: str, tmp_path: Path, preloaded: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It blocks them until it was named."""
    monkeypatch.setattr(runner, "_STALL_S", 0.5)  # in this process
    notes: list[str] = []

    def see(event: object) -> None:
        if isinstance(event, Note) and "has blocked all sessions" in event.text:
            notes.append(event.text)
            (tmp_path / "named").touch()

    config = config_of(
        "blocking", tmp_path, options={"until": str(tmp_path / "named")},
        run={"steps": 1}, batch={"prompts": 1}, sampling={"n": 2}, eval={"items": 0},
    )  # fmt: skip
    unsubscribe = subscribe(see)
    try:
        train(config, preloaded if cluster == "local" else cluster)
    finally:
        unsubscribe()
    (note,) = notes
    assert "in wait_for_file" in note


def test_a_step_without_a_session_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(PodiumError, match=r"^evaluation: all 4 .*hopeless.* failed: RuntimeError: the world is closed"):
        train(config_of("hopeless", tmp_path))


def test_the_name_of_a_run_that_has_computed_nothing_is_free(finished_sessions: Path, tmp_path: Path) -> None:
    with pytest.raises(PodiumError, match="the world is closed"):
        train(config_of("hopeless", tmp_path))
    run = train(config_of("twice", tmp_path))
    assert [row["step"] for row in metrics_rows(run)] == [1, 2]
    assert "hopeless" in (run / "config.1.yaml").read_text()
    assert "hopeless" not in (run / "config.yaml").read_text()
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert len(lines) == len((finished_sessions / "runs" / "run" / "ledger.jsonl").read_text().splitlines())
    with pytest.raises(ConfigError, match="finished at step"):
        train(config_of("twice", tmp_path))


@pytest.mark.parametrize("cluster", ["inline", pytest.param("local", marks=pytest.mark.exhaustive)])
def test_a_model_that_is_never_asked_ends_the_run_with_what_to_do(
    cluster: str, tmp_path: Path, preloaded: Cluster
) -> None:
    with pytest.raises(PodiumError, match=r"no session of .*:forgets' asked the model, .*client\.chat") as caught:
        train(config_of("forgets", tmp_path), preloaded if cluster == "local" else cluster)
    where = f"; {tmp_path / 'runs' / 'run' / 'logs'} has the output of sessions"
    assert str(caught.value).endswith(where if cluster == "local" else "to client.base_url")


def test_a_traceback_is_said_once_whatever_its_message(tmp_path: Path) -> None:
    with told() as notes:
        train(config_of("varied", tmp_path, run={"steps": 3}))
    said = [note for note in notes if "sessions failed and" in note or "session failed and" in note]
    assert len(said) >= 2, notes
    assert "KeyError" in said[-1]
    assert sum(note.count("Traceback (most recent call last)") for note in said) == 1, said


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        ("misnamed", "a reward for the agent 'Judge', which is not in the session"),
        ("dotted", "an agent cannot be named 'x.y'"),
        ("texts", "reward = '1.0': expected a number"),
        ("crowd", "1023 agents are the limit"),
    ],
)
def test_what_would_be_trained_wrongly_fails_by_name(world: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PodiumError, match=reason):
        train(config_of(world, tmp_path))


def test_a_call_that_is_answered_after_its_session_is_not_trained(tmp_path: Path) -> None:
    rows = metrics_rows(train(config_of("leaves_a_call", tmp_path)))
    assert [(row[metrics.SESSIONS_ROWS], row[metrics.SESSIONS_TURNS]) for row in rows] == [(16, 1), (16, 1)]


@pytest.mark.everyday("colocated-inline")
@pytest.mark.parametrize(("layout", "backend"), WHERE)
def test_a_plain_function_may_talk_from_an_event_loop_of_its_own(
    layout: str, backend: str, tmp_path: Path, preloaded: Cluster
) -> None:
    config = config_of("in_a_thread", tmp_path, placement={"layout": layout})
    rows = metrics_rows(train(config, "inline" if backend == "inline" else preloaded))
    assert [(row[metrics.SESSIONS_ROWS], row[metrics.SESSIONS_FAILED]) for row in rows] == [(16, 0), (16, 0)]


def test_the_reward_scores_what_the_environment_does_not(tmp_path: Path) -> None:
    with told() as notes:
        run = train(config_of("graded_by_reward", tmp_path, reward={"name": "fraction"}))
    check_no_remarks("\n".join(notes))
    table = pq.read_table(run / "completions" / "step-000001.parquet").to_pydict()
    for text, answer, score in zip(table["completion"], table["expected"], table["reward"], strict=True):
        assert score == pytest.approx(worlds_fraction(text, answer))
    assert table["reward_digits"] == pytest.approx([worlds.digits(text) for text in table["completion"]])


def worlds_fraction(text: str, answer: str) -> float:
    from podium.rewards.text import fraction

    return float(fraction(text, {"answer": answer}))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose sessions end when the context is full."""
    with told() as notes:
        run = train(config_of("endless", tmp_path_factory.mktemp("endless"), reward={"name": "exact"}))
    check_no_remarks("\n".join(notes))
    return run


def test_a_full_context_ends_a_session_which_is_trained(endless: Path) -> None:
    assert [row[metrics.SESSIONS_FULL] for row in metrics_rows(endless)] == [1.0, 1.0]
    assert [row[metrics.SESSIONS_FAILED] for row in metrics_rows(endless)] == [0.0, 0.0]


@pytest.mark.everyday("colocated-inline")
@pytest.mark.parametrize(("layout", "backend"), WHERE)
def test_the_context_of_an_engine_may_be_shorter_than_the_models(
    layout: str, backend: str, endless: Path, tmp_path: Path, preloaded: Cluster
) -> None:
    config = config_of("endless", tmp_path, placement={"layout": layout})
    cluster = "inline" if backend == "inline" else preloaded
    short = train(config, cluster, workers={"generator": ShortGenerator})
    for row, longer in zip(metrics_rows(short), metrics_rows(endless), strict=True):
        assert (row[metrics.SESSIONS_FULL], row[metrics.SESSIONS_FAILED]) == (1.0, 0.0)
        assert 1 < row[metrics.SESSIONS_TURNS] < 0.75 * longer[metrics.SESSIONS_TURNS]


def test_a_full_context_leaves_the_rewards_of_turns_and_is_never_correct(tmp_path: Path) -> None:
    run = train(config_of("endless", tmp_path, options={"earns": 1.0}, reward={"correct_at": 1.0}))
    for row in metrics_rows(run):
        assert row[metrics.SESSIONS_TURNS] >= 3
        assert row[metrics.REWARD_MEAN] == pytest.approx(row[metrics.SESSIONS_TURNS])
        assert row[metrics.ACCURACY] == 0.0
    assert {row["accuracy"] for row in metrics_rows(run, "eval")} == {0.0}
    evaluation = {"items": 4, "metric": "accuracy", "at_start": False}  # no score says whether a session is correct
    judged = train(config_of("endless", tmp_path / "judged", options={"earns": 1.0}, eval=evaluation))
    assert [row[metrics.ACCURACY] for row in metrics_rows(judged)] == [0.0, 0.0]
    assert [row["accuracy"] for row in metrics_rows(judged, "eval")] == [0.0]


def test_no_agent_takes_the_place_of_one_that_the_reward_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in accuracies nor in lengths, and a session counts once."""

    def score(completion: str, row: dict[str, Any]) -> float | None:
        return None if int(row["answer"]) % 2 else 0.0

    run = train(config_of("helped", tmp_path, run={"steps": 1}, reward={"correct_at": 1.0}), reward=score)
    (row,) = metrics_rows(run)
    assert row[metrics.ABSTAINED] > 0 and row[metrics.ACCURACY] == 0.0
    for evaluated in metrics_rows(run, "eval"):
        assert (evaluated["accuracy"], evaluated["reward_mean"], evaluated["cut_off"]) == (0.0, 0.0, 1.0)
        assert evaluated["completion_tokens"] == 3.0
    capsys.readouterr()
    assert main(["changes", str(run), "--show", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("  0.0%  (0 of ") == 2 and "reported" not in out and "the reward left them out" in out
    rows = Run(run, "").answer("evaluation/0/1")["rows"]
    assert {entry["correct"] for entry in rows} == {0.0, None} and {entry["n"] for entry in rows} == {1}


def test_a_reward_of_sessions_gets_the_text_that_ended_the_last_answer(tmp_path: Path) -> None:
    """And the tokens of this answer alone."""

    def score(completion: str, completion_ids: list[int], stop_text: str) -> dict[str, Any]:
        return {"score": float(len(completion)), "end": stop_text or "none", "size": str(len(completion_ids))}

    sampling = {"max_new_tokens": 8, "stop_token_ids": ["7", "33"]}
    run = train(config_of("unscored", tmp_path, run={"steps": 1}, sampling=sampling), reward=score)
    ends = set[str]()
    for file in [*run.glob("completions/*.parquet"), *run.glob("evaluations/*.parquet")]:
        table = pq.read_table(file).to_pydict()
        names = ("completion", "stop_text", "tokens", "logged_end", "logged_size", "finish_reason")
        for text, stop, tokens, end, size, reason in zip(*(table[name] for name in names), strict=True):
            assert end == (stop or "none") and (reason == "stop" or not stop)
            assert len(text) <= int(size) < len(tokens), "the first answer has tokens, too"
            ends.add(stop)
    assert ends >= {"", "7"}


def test_a_session_is_cut_off_if_the_last_answer_of_its_agent_is(tmp_path: Path) -> None:
    """That answer is in the first of two rows, and ends by a text. What is said elsewhere is mostly cut off."""
    run = train(config_of("aside", tmp_path, run={"steps": 1}))
    (row,) = metrics_rows(run)
    assert (row[metrics.SESSIONS_TRAINED], row[metrics.SESSIONS_ROWS]) == (32, 48)
    table = pq.read_table(run / "completions" / "step-000001.parquet").to_pydict()
    ends = [*zip(table["agent"], table["finish_reason"], strict=True)]
    assert {end for agent, end in ends if not agent} == {"stop"}
    assert row[metrics.TRUNCATED] == ends.count(("other", "length")) / 32 > 0.25
    assert [row["cut_off"] for row in metrics_rows(run, "eval")] == [0.0, 0.0]


def test_agents_of_one_session_have_rewards_and_groups_of_their_own(tmp_path: Path) -> None:
    """And a session counts once, by the verdict on its client."""
    run = train(config_of("debate", tmp_path, reward={"correct_at": 0.3}))
    assert [row[metrics.SESSIONS_TRAINED] for row in metrics_rows(run)] == [32, 32]
    table = pq.read_table(run / "completions" / "step-000001.parquet").to_pydict()
    for group in range(4):
        own = [a for a, g in zip(table["advantage"], table["group"], strict=True) if g == group]
        assert sum(own[0::2]) == pytest.approx(0, abs=0.02)
        assert sum(own[1::2]) == pytest.approx(0, abs=0.02)
    row = metrics_rows(run)[0]
    rows = [*zip(table["agent"], table["correct"], table["reward"], strict=True)]
    own = [correct for agent, correct, _ in rows if not agent]
    judged = [reward for agent, _, reward in rows if agent == "judge"]
    assert len(own) == len(judged) == 16
    assert row[metrics.ACCURACY] == pytest.approx(sum(own) / 16)
    assert row[metrics.ACCURACY] != pytest.approx(sum(correct for _, correct, _ in rows) / 32)
    assert row["agent_reward/judge"] == pytest.approx(sum(judged) / 16)


class Weighing(Policy):
    """A policy that checks how much each row counts: a trajectory once, by however many rows."""

    def weighted(self, batch: Batch) -> Batch:
        found = super().weighted(batch)
        own, whole = batch.jagged(fields.LOSS_MASK).lengths, batch.dense(fields.TRAJECTORY_TOKENS)
        sampled = torch.stack([row.sum() for row in batch.jagged(fields.LOSS_MASK).unbind()])
        assert bool((sampled < whole).all()) and bool((own > sampled).all())  # each row is a part of its trajectory
        share = sampled / whole
        weights = torch.stack([row.sum() for row in found.jagged(fields.LOSS_WEIGHTS).unbind()])
        torch.testing.assert_close(weights, (share / share.sum()).float())
        return found


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_trajectory_of_two_rows_counts_once_and_in_the_order_of_time(advantage: str, tmp_path: Path) -> None:
    algorithm = {"advantage": advantage, "aggregation": "sequence-mean", "minibatches": 2}
    cls = PPOConfig if advantage == "gae" else GRPOConfig
    run = train(config_of("interleaved", tmp_path, cls, algorithm=algorithm), workers={"policy": Weighing})
    for row in metrics_rows(run):
        assert row[metrics.SESSIONS_ROWS] == 2 * row[metrics.SESSIONS_TRAINED]
        assert row[metrics.SESSIONS_TURNS] == 3
        table = pq.read_table(run / "completions" / f"step-{row['step']:06d}.parquet").to_pydict()
        sampled = sum(map(len, table["tokens"]))  # their speed is that of the tokens that sessions sampled
        assert row["tokens_per_s/rollout"] * row["time/rollout"] == pytest.approx(sampled)
    assert json.loads((run / "summary.json").read_text())["tokens_per_s"]["rollout"] > 0
    table = pq.read_table(run / "completions" / "step-000001.parquet").to_pydict()
    assert [len(turns) for turns in table["turn_said"]] == [2, 1] * (len(table["turn_said"]) // 2)


class Ended(Estimator):
    """An estimator that sees no value after a session."""

    @endpoint(dispatch=only(0), collect=first(), returns="ref")
    def advantages(self, batch: Batch, kl_coef: float = 0.0) -> Batch:
        assert {*batch.python(fields.FINISH_REASON)} == {"length"}
        assert fields.VALUES in batch and fields.BOOTSTRAP not in batch
        return super().advantages(batch, kl_coef)


def test_a_critic_expects_nothing_after_a_session(tmp_path: Path) -> None:
    """A policy would learn to have its last answers cut off, if what the critic expects then were its reward."""
    train(config_of("endless", tmp_path, PPOConfig), workers={"estimator": Ended})


def test_an_environment_may_have_the_tasks_and_a_critic_may_look_at_turns(tmp_path: Path) -> None:
    config = config_of("Guess", tmp_path, PPOConfig, data={"train": ""}, algorithm={"advantage": "gae_turns"})
    rows = metrics_rows(train(config))
    assert [row[metrics.SESSIONS_ROWS] for row in rows] == [4, 4]
    assert all(metrics.EXPLAINED_VARIANCE in row for row in rows)


def test_a_tool_that_is_never_called_changes_nothing(tmp_path: Path) -> None:
    run = train(config_of("tools", tmp_path, run={"steps": 1}))
    (row,) = metrics_rows(run)
    assert (row[metrics.SESSIONS_TOOL_CALLS], row[metrics.SESSIONS_TURNS]) == (0, 1)


@pytest.mark.parametrize("schedule", [pytest.param("one_step_off", marks=pytest.mark.exhaustive), "asynchronous"])
def test_schedules_that_run_ahead_live_sessions_too(schedule: str, tmp_path: Path, preloaded: Cluster) -> None:
    config = config_of("twice", tmp_path, run={"steps": 3, "schedule": schedule}, placement={"layout": "split"})
    rows = metrics_rows(train(config, preloaded))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row[metrics.SESSIONS_ROWS] == 16 for row in rows)


def test_a_run_goes_on_in_its_environment(tmp_path: Path) -> None:
    whole = losses(train(config_of("twice", tmp_path / "whole", run={"steps": 3})))
    config = config_of("twice", tmp_path / "parts", run={"steps": 2}, save={"every": 1})
    run = train(config)
    values = config_to_dict(config)
    values["run"] |= {"steps": 3, "resume": str(run)}
    train(build_config(GRPOConfig, values))
    assert losses(run) == pytest.approx(whole)


@pytest.mark.parametrize("world", ["twice", "Guess"])
def test_a_dry_run_shows_the_tasks(world: str, tmp_path: Path) -> None:
    own = {"train": "", "eval": ""} if world == "Guess" else {}
    said = describe_data(PPOTrainer(config_of(world, tmp_path, data=own), cluster="inline").read_data)
    assert re.search(r"training     \d+ tasks\nepochs       2 steps x 4 tasks = 8 of .*\nheld-out     4 tasks\n", said)
    assert (
        "number 0     the task, from which the environment makes what the model reads:\n             {'prompt'" in said
    )


def test_a_model_without_a_chat_template_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"conversations need a chat template.*set data\.chat_template"):
        PPOTrainer(config_of("twice", tmp_path, data={"chat_template": "none"}), cluster="inline").read_data()


def test_an_outage_in_an_evaluation_costs_its_score_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = {"after": 4 + 16, "marks": str(tmp_path / "marks")}  # the first evaluation, and the sessions of a step
    evaluation = {"items": 4, "every": 1}
    sections = {"run": {"steps": 1}, "reward": {"failure_score": -0.5}, "eval": evaluation}
    with told() as notes:
        run = train(config_of("outage", tmp_path, options=marks, **sections))
    rows = metrics_rows(run, "eval")
    assert [(row["accuracy"], row["reward_mean"]) for row in rows] == [(1.0, 1.0), (0.0, -0.5)]
    assert any("the simulator is down" in note and "count as not correct" in note for note in notes)
    marks = {"after": 4 + 16 + 4 + 16, "marks": str(tmp_path / "late")}  # all but the third evaluation
    run = train(config_of("outage", tmp_path / "late_run", options=marks, run={"steps": 2}, eval=evaluation))
    assert [row["accuracy"] for row in metrics_rows(run, "eval")] == [1.0, 1.0, 0.0]
    capsys.readouterr()
    assert main(["changes", str(run), "--show", "0"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "left out  step 2  (evaluated, without completions: all sessions failed, or the file is gone)"
    assert said[2].startswith("after     100.0%  (4 of 4)") and said[2].endswith("step-000001.parquet")
    marks["after"] = 0
    with pytest.raises(PodiumError, match=r"all 4 sessions of .* failed: .*the simulator is down"):
        train(config_of("outage", tmp_path / "first", options=marks, run={"steps": 1}, eval=evaluation))


def test_evaluations_are_compared_task_by_task_where_sessions_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = {"fails": 4 + 16 + 1, "marks": str(tmp_path / "marks")}  # the first session of the second evaluation
    evaluation = {"items": 4, "every": 1}
    run = train(config_of("patchy", tmp_path, options=marks, run={"steps": 1}, eval=evaluation))
    rows = metrics_rows(run, "eval")
    assert [(row["accuracy"], row["reward_mean"]) for row in rows] == [(0.0, 0.0), (0.75, 0.75)]
    before, after = (pq.read_table(path).to_pydict() for path in sorted((run / "evaluations").iterdir()))
    assert (before["group"], after["group"]) == ([0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3])
    capsys.readouterr()
    assert main(["changes", str(run), "--show", "0"]) == 0
    words = [
        re.sub(r"  (/.*|\((only one|by the run)\b.*)", "", line).split()
        for line in capsys.readouterr().out.splitlines()
    ]
    assert words == [
        ["before", "0.0%", "(0", "of", "3)"],
        ["after", "100.0%", "(3", "of", "3)"],
        ["reported", "0.0%", "to", "75.0%"],
        ["broke", "0"],
        ["mended", "3"],
        ["left", "out", "1"],
    ]


def test_a_model_is_evaluated_in_the_environment(tmp_path: Path) -> None:
    import podium

    run = train(config_of("Guess", tmp_path))
    values = {
        "model": {"path": str(run / "model")},
        "environment": {"name": f"{WORLDS}:Guess"},
        "data": {"chat_template": str(tmp_path / "chat.jinja")},
        "sampling": {"max_new_tokens": 3},
        "eval": {"items": 6},
        "run": {"dir": str(tmp_path)},
    }
    with podium.connect("inline") as cluster:
        found = evaluate_model(build_config(InferenceConfig, values), cluster)
    assert found[""].items == 6


def test_settings_without_a_use_in_sessions_are_said_once(tmp_path: Path) -> None:
    data = {"max_prompt_tokens": 7, "overlong": "cut"}
    with told() as notes:
        train(config_of("twice", tmp_path, data=data, reward={"name": "fraction"}))
    said = [note for note in notes if "max_prompt_tokens" in note or "overlong" in note or "fraction" in note]
    assert len(said) == 3, notes
    assert "reward.name = 'fraction' has scored nothing yet: each of the first" in said[-1]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nothing", {}, "has no 'nothing'"),
        ("Guess", {"turn": 2}, r"options do not fit.*turn.*its options are turns"),
        ("twice", {"at_ones": 2}, r"options do not fit.*at_ones.*takes none"),
        (
            "twice",
            {"time_limit": 2},
            r"'time_limit';.* also takes time_limit_s, at_once, .*; did you mean time_limit_s",
        ),
        ("Guess", {"turn": 2}, r"its options are turns, and .*; did you mean turns\?$"),
        ("twice", {"time_limit_s": -1}, r"time_limit_s"),
        ("WORLDS", {}, "has no 'WORLDS'"),
        ("Step", {}, "no environment"),
        (
            "unknown_names",
            {},
            r"a plain function that runs a session must name its first parameters task and client; yours",
        ),
        ("alone", {}, r"a session is play\(task, client, \*\*options\); yours takes \(task: 'Task'\) -> 'float'$"),
    ],
)
def test_a_wrong_environment_is_refused_before_a_worker_starts(
    name: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        PPOTrainer(config_of(name, tmp_path, options=options), cluster="inline", show=False).fit()


@pytest.mark.everyday("qwen3", "gpt_oss")
@pytest.mark.parametrize(
    "family",
    ("qwen2_5", "qwen3", "llama3", "gemma", "mistral", "gpt_oss"),
)
def test_the_policy_would_have_drawn_what_was_recorded_under_the_template_of(family: str, tmp_path: Path) -> None:
    from tests.unit.rollout.test_templates import FAMILIES, tokenizer_of

    tokenizer_of(next(one for one in FAMILIES if one.name == family)).save_pretrained(tmp_path / "tokenizer")
    model = {
        "config": {**MODEL["config"], "max_position_embeddings": 256},
        "tokenizer": str(tmp_path / "tokenizer"),
    }
    config = tiny(
        GRPOConfig,
        tmp_path,
        model=model,
        environment={"name": f"{WORLDS}:twice"},
        run={"steps": 1},
        sampling={"max_new_tokens": 12},
        eval={"items": 0},
    )
    (row,) = metrics_rows(train(config))
    assert (row[metrics.SESSIONS_TRAINED], row[metrics.SESSIONS_TURNS]) == (16, 2)
    assert row[metrics.MISMATCH_MAX] < 1e-5


def count_finished(completion: str, answer: str, trainer_state: Any) -> float:
    """A reward that is the number of finished steps which it is told."""
    return float(trainer_state.global_step)


@pytest.mark.parametrize("world", ["", "graded_by_reward"])
def test_a_reward_is_told_the_finished_steps_in_evaluations_too(tmp_path: Path, world: str) -> None:
    """In evaluations of sessions it was told one less, which was -1 before the first step."""
    sections: dict[str, Any] = {"reward": {"name": f"{__name__}:count_finished", "processes": 1}}
    sections["eval"] = {"items": 2, "every": 1}
    run = train(config_of(world, tmp_path, **sections) if world else tiny(GRPOConfig, tmp_path, **sections))
    assert [row["reward_mean"] for row in metrics_rows(run, "eval")] == [0.0, 1.0, 2.0]
    assert [row[metrics.REWARD_MEAN] for row in metrics_rows(run)] == [0.0, 1.0]


class Struck(PPOTrainer):
    """One of ``victims`` is killed while sessions ask its generators, once in each step."""

    struck = 0

    def victims(self) -> list[int]:
        return [pid for handle in self.run.roles.generators for pid in handle.group.pids]

    def collect_sessions(self, sessions: Any, prompts: Any, step: int) -> Any:
        pids = self.victims()

        def strike() -> None:
            time.sleep(0.1)
            os.kill(pids[step % len(pids)], signal.SIGKILL)

        if step > self.struck:
            self.struck = step
            threading.Thread(target=strike).start()
        return super().collect_sessions(sessions, prompts, step)


def test_a_lost_generator_loses_no_session(tmp_path: Path, preloaded: Cluster) -> None:
    placement = {"layout": "split", "generator_ranks": 2}
    config = config_of("patient", tmp_path, placement=placement, run={"steps": 2, "max_restarts": 8})
    with told() as notes:
        Struck(config, cluster=preloaded, show=False).fit()
    rows = metrics_rows(tmp_path / "runs" / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert sum("generator" in note for note in notes) >= 2, notes
    for row in rows:
        assert row[metrics.SESSIONS_TRAINED] == row[metrics.SESSIONS_ROWS] == 16 * (1 - row[metrics.SESSIONS_FAILED])
        assert row[metrics.MISMATCH_MAX] < 1e-5  # ids and log-probabilities are those of one policy
    assert read_ledger(tmp_path / "runs" / "run" / "ledger.jsonl").counts() == {"trained": 8}


class Orphaned(Struck):
    """Its rollout worker is killed while it lives sessions."""

    def victims(self) -> list[int]:
        assert self.run.roles.rollout is not None
        return list(self.run.roles.rollout.group.pids)


def test_sessions_of_a_lost_rollout_worker_are_lived_again(tmp_path: Path, preloaded: Cluster) -> None:
    def config(name: str) -> GRPOConfig:
        run = {"steps": 2, "max_restarts": 8}
        return config_of("patient", tmp_path / name, placement={"layout": "split"}, run=run, eval={"items": 0})

    with told() as notes:
        Orphaned(config("disturbed"), cluster=preloaded, show=False).fit()
    train(config("undisturbed"))
    runs = [tmp_path / name / "runs" / "run" for name in ("disturbed", "undisturbed")]
    assert sum("SIGKILL" in note for note in notes) == 2, notes
    trained = [pq.read_table(run / "completions", columns=["prompt", "tokens", "reward"]).to_pylist() for run in runs]
    assert trained[0] == trained[1]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), abs=1e-5)
    assert [read_ledger(run / "ledger.jsonl").counts() for run in runs] == [{"trained": 8}] * 2
