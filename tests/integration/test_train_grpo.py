"""GRPO from prompts to a checkpoint that transformers loads; and what ends or changes a run."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.algorithms import TokenLoss
from podium.data import Batch
from podium.errors import ConfigError, DataError, EndpointError, RewardError, WorkerStartError
from podium.runtime import concat, endpoint, first, only, shard
from podium.telemetry import Note, StepFinished, metrics, subscribe
from podium.trainer import GRPOConfig, PPOConfig, PPOTrainer
from podium.trainer.step_watch import StepWatch
from podium.workers import Estimator, Policy
from tests.integration.finished_runs import copy_folder, grpo_config, write_base
from tests.integration.rewards import longer_is_better, unlucky
from tests.integration.training import MODEL, losses, metrics_rows, tiny, train

LISTED = {  # the metrics of a step that every run reports
    *(metrics.REWARD_MEAN, metrics.REWARD_STD, metrics.FLAT_GROUPS, metrics.ENTROPY),
    *(metrics.CLIP_FRACTION, metrics.GRAD_NORM, metrics.RATIO_MEAN, metrics.RATIO_MAX, metrics.TRUNCATED),
    *(metrics.LENGTH_MEAN, metrics.LENGTH_MAX, metrics.MISMATCH_MEAN, metrics.MISMATCH_MAX, metrics.LOSS),
    *(metrics.STEP_S, metrics.TOKENS_PER_S, "tokens_per_s/generate", "tokens_per_s/update", metrics.TOKENS),
}

PADDED = {"config": {**MODEL["config"], "vocab_size": 150}}  # for the 16 tokens of the tokenizer


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "temperature": 0.8}], ids=["plain", "top-p"])
def test_ids_that_stand_for_no_text_are_never_drawn(tmp_path: Path, sampling: dict[str, float]) -> None:
    kl = {"kl_in": "loss", "kl_coef": 0.1, "minibatches": 2}
    run = train(tiny(GRPOConfig, tmp_path, model=PADDED, algorithm=kl, sampling=sampling))
    table = pq.read_table(run / "completions").to_pydict()
    assert max(token for row in table["tokens"] for token in row) < 16
    rows = metrics_rows(run)
    assert all(row[metrics.MISMATCH_MAX] < 1e-5 for row in rows)
    assert rows[0][metrics.KL] < 0.1  # the reference counts the same ids; over all it would be 2 nats away


@pytest.mark.parametrize("minibatches", [1, 2])
def test_completions_that_were_cut_off_are_left_out(tmp_path: Path, minibatches: int) -> None:
    algorithm = {"cut_off": "leave_out", "minibatches": minibatches, "advantage": "gae"}
    run = train(tiny(GRPOConfig, tmp_path, algorithm=algorithm, sampling={"max_new_tokens": 8, "n": 4}))
    rows = metrics_rows(run)
    assert [row[metrics.LEFT_OUT] for row in rows] == [row[metrics.TRUNCATED] for row in rows]
    assert all(0 < row[metrics.LEFT_OUT] < 1 and row[metrics.GRAD_NORM] > 0 for row in rows)
    table = pq.read_table(run / "completions").to_pydict()
    assert not any("policy/kl_coef" in row for row in rows), "there is no reference"
    assert {"length", "stop"} == {*table["finish_reason"]}
    for reason, apart in zip(table["finish_reason"], table["token_mismatch"], strict=True):
        assert all(math.isnan(value) == (minibatches == 1 and reason == "length") for value in apart)


def test_steps_whose_completions_are_all_left_out_are_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    watch = StepWatch(tiny(GRPOConfig, tmp_path))
    try:
        for step in range(1, 6):
            watch.check_signal({metrics.LEFT_OUT: 1.0, metrics.TRUNCATED: 1.0, metrics.REWARD_STD: 0.5}, step)
    finally:
        unsubscribe()
    (note,) = notes
    assert "all completions were left out (algorithm.cut_off); 100.0% of the completions were cut off" in note


def test_a_tokenizer_that_is_larger_than_the_model_is_refused_at_the_start(tmp_path: Path) -> None:
    smaller = {"config": {**MODEL["config"], "vocab_size": 12}}
    with pytest.raises(ConfigError, match=r"tokens? of the tokenizer, such as '8' \(12\), (is|are) beyond the model's"):
        train(tiny(GRPOConfig, tmp_path, model=smaller))


SPLIT = [{"layout": "split"}, {"layout": "split", "delta_sync": True}]


def test_a_run_leaves_metrics_completions_a_model_and_a_summary(finished_grpo: Path) -> None:
    run = finished_grpo / "runs" / "run"
    rows = metrics_rows(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0].keys() >= LISTED
    assert rows[0][metrics.MISMATCH_MAX] < 1e-5  # engine and training forward pass agree in float32
    assert [row["step"] for row in metrics_rows(run, "eval")] == [0, 2, 3]
    table = pq.read_table(run / "completions" / "step-000002.parquet").to_pydict()
    assert len(table["completion"]) == 16
    assert set(table["version"]) == {1}  # sampled by the weights of the step before
    assert table["expected"][0] == table["prompt"][0].removesuffix("=")
    assert table["group"] == [group for group in range(4) for _ in range(4)]
    sums = [sum(table["advantage"][4 * group : 4 * group + 4]) for group in range(4)]
    assert sums == pytest.approx([0, 0, 0, 0], abs=1e-4)
    apart = [abs(value) for row in table["token_mismatch"] for value in row]  # one update a step, which finds it
    assert sum(apart) / len(apart) == pytest.approx(rows[1][metrics.MISMATCH_MEAN], rel=0.01, abs=5e-6)
    assert {value for row in table["token_versions"] for value in row} == {1}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["items"] == 4
    assert summary["finished"] is True
    assert {"torch", "transformers", "podium"} <= summary["versions"].keys()
    assert {"generate", "update", "step"} <= summary["tokens_per_s"].keys()
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    ids = AutoTokenizer.from_pretrained(run / "model")("12=", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, 3, model.config.vocab_size)
    assert (run / "trace.json").stat().st_size > 100
    assert (run / "curve.png").exists()


def test_a_resumed_run_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    """Twenty prompts a step of some fifty: the checkpoint lies within an epoch, and the third step begins the next."""
    whole = train(tiny(GRPOConfig, tmp_path, run={"name": "whole", "steps": 4}, batch={"prompts": 20}))
    train(tiny(GRPOConfig, tmp_path, run={"name": "parts", "steps": 2}, batch={"prompts": 20}))
    parts = tmp_path / "runs" / "parts"
    config = tiny(GRPOConfig, tmp_path, run={"name": "parts", "steps": 4, "resume": str(parts)}, batch={"prompts": 20})
    train(config)
    assert losses(parts) == losses(whole)
    states = [AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in (whole, parts)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_resumed_at_the_boundary_of_an_epoch_still_trains(tmp_path: Path) -> None:
    rows = 16
    data = {"train_items": rows}
    run = train(tiny(GRPOConfig, tmp_path, run={"steps": 2}, batch={"prompts": rows // 2}, data=data))
    again = {"steps": 3, "resume": "auto"}
    train(tiny(GRPOConfig, tmp_path, run=again, batch={"prompts": rows // 2}, data=data))
    assert [row["step"] for row in metrics_rows(run)] == [1, 2, 3]
    assert len(pq.read_table(run / "completions" / "step-000003.parquet")) == 4 * rows // 2


def test_the_first_interrupt_finishes_the_step_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(event: object) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    config = tiny(GRPOConfig, tmp_path, run={"steps": 50})
    unsubscribe = subscribe(interrupt)
    try:
        summary = PPOTrainer(config, cluster="inline").fit()
    finally:
        unsubscribe()
    run = tmp_path / "runs" / "run"
    assert summary.steps <= 3
    rows = [line.split()[:1] for line in capsys.readouterr().out.splitlines()]
    assert ["before"] in rows
    assert ["after"] not in rows  # the only evaluation was that of before the first step
    assert summary.finished is False
    assert not (run / "model").exists()
    saved = json.loads((run / "checkpoints" / "latest" / "trainer.json").read_text())
    assert saved["step"] == summary.steps
    assert signal.getsignal(signal.SIGINT) == before


def test_a_reward_that_raises_ends_the_run_with_the_completions_on_disk(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no such luck"):
        train(tiny(GRPOConfig, tmp_path, eval={"items": 0}), reward=unlucky)
    table = pq.read_table(tmp_path / "runs" / "run" / "completions" / "step-000001.parquet").to_pydict()
    assert len(table["completion"]) == 16
    assert all(math.isnan(reward) for reward in table["reward"])


def check_adapters(folder: Path, run: Path) -> None:
    """Check a run whose base model is in ``folder``."""
    rows = metrics_rows(run)
    assert rows[0][metrics.KL] == pytest.approx(0, abs=1e-6)  # adapters begin as nothing
    assert rows[-1][metrics.KL] > 0
    assert max(row[metrics.MISMATCH_MAX] for row in rows) < 1e-5  # the generator has the adapted weights of each step
    old, new = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder / "base", run / "model"))
    assert old.keys() == new.keys()
    assert not torch.equal(*(state["model.layers.0.self_attn.q_proj.weight"] for state in (old, new)))


def test_adapters_are_trained_and_merged_into_what_generates_and_what_is_saved(finished_lora: Path) -> None:
    check_adapters(finished_lora, finished_lora / "runs" / "run")


@pytest.mark.parametrize("placement", SPLIT, ids=str)
def test_adapters_are_merged_into_what_a_split_generator_draws_with(tmp_path: Path, placement: dict[str, Any]) -> None:
    model = write_base(tmp_path / "base")
    sections: dict[str, Any] = {"placement": placement, "algorithm": {"kl_in": "loss", "kl_coef": 0.01}}
    config = tiny(GRPOConfig, tmp_path, model=model, run={"steps": 3}, eval={"items": 0}, **sections)
    check_adapters(tmp_path, train(config, reward=longer_is_better))


@pytest.mark.parametrize("sampling", [{"top_p": 0.8}, {"top_k": 3, "temperature": 0.7}])
def test_filtered_sampling_trains_over_the_recorded_sets(tmp_path: Path, sampling: dict[str, float]) -> None:
    run = train(tiny(GRPOConfig, tmp_path, sampling=sampling, run={"steps": 3}), reward=longer_is_better)
    assert max(row[metrics.MISMATCH_MAX] for row in metrics_rows(run)) < 1e-5


class Counting(Policy):
    """A policy that reports one metric more."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first())
    def update(self, batch: Batch) -> dict[str, float]:
        return {**super().update(batch), "policy/rows": float(len(batch))}


def test_a_reward_with_parts_and_a_policy_of_ones_own(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, eval={"items": 0})
    run = train(config, reward=longer_is_better, workers={"policy": Counting})
    assert [row["policy/rows"] for row in metrics_rows(run)] == [16, 16]
    table = pq.read_table(run / "completions" / "step-000001.parquet").to_pydict()
    assert table["reward"] == table["reward_length"] == [float(len(text)) for text in table["completion"]]
    first, second = metrics_rows(run)
    assert first["reward_parts/length"] == pytest.approx(first["reward/mean"])
    assert second["progress/tokens"] == first["tokens"] + second["tokens"]
    assert second["progress/epoch"] == pytest.approx(2 * first["progress/epoch"])


def test_a_run_that_learns_nothing_says_so_and_why(tmp_path: Path) -> None:
    reward = tmp_path / "never.py"
    reward.write_text("def reward(completion, row):\n    return 0.0\n")
    config = tiny(GRPOConfig, tmp_path, reward={"name": f"{reward}:reward"}, run={"steps": 6}, eval={"items": 0})
    said: list[str] = []
    stop = subscribe(lambda event: said.append(event.text) if isinstance(event, Note) else None)
    PPOTrainer(config, cluster="inline", show=False).fit()
    stop()
    [note] = [text for text in said if "nothing is learned" in text]
    assert "for 5 steps, up to step 5, all completions of a prompt got the same reward (mean 0)" in note
    assert "cut off at sampling.max_new_tokens = 3: raise it" in note


def test_a_role_that_the_run_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workers\['critic'\]: this run has no such role; its roles are policy, est"):
        train(tiny(GRPOConfig, tmp_path), workers={"critic": Policy})
    with pytest.raises(ConfigError, match=r"workers\['policy'\] is .*: expected a subclass of Worker"):
        train(tiny(GRPOConfig, tmp_path), workers={"policy": TokenLoss})


def test_several_ranks_need_a_backend_with_collectives(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"placement\.ranks = 2: inline has no collectives over several ranks"):
        train(tiny(GRPOConfig, tmp_path, placement={"ranks": 2}))


def test_what_fails_before_the_first_step_leaves_the_name_free(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of exact"):
        train(tiny(GRPOConfig, tmp_path, reward={"name": "exakt"}))
    train(tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0}))


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"data": {"prompt_column": "question"}}, DataError, "no column 'question'"),
        ({"data": {"max_prompt_tokens": 2}}, DataError, "each of the .* prompts is longer"),
        ({"sampling": {"max_new_tokens": 64}}, ConfigError, "more than the model's 32 positions"),
        ({"model": {"tokenizer": "./absent"}}, ConfigError, "this directory does not exist"),
        ({"engine": {"name": "nativ"}}, ConfigError, "did you mean native"),
        ({"algorithm": {"advantage": "absent.py:mine"}}, ConfigError, "no file"),
        ({"placement": {"ranks": 2}}, ConfigError, "use the backend local"),
        ({"reward": {"name": "broken.py:score"}}, ConfigError, r"broken\.py:1: RuntimeError: at the import"),
    ],
)
def test_a_start_that_fails_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("raise RuntimeError('at the import')\n")
    with pytest.raises(error, match=message):
        train(tiny(GRPOConfig, tmp_path, **sections))
    assert not (tmp_path / "runs").exists()


def test_a_start_that_fails_in_a_worker_leaves_what_the_worker_said(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, model={"seed": 1})
    with pytest.raises(WorkerStartError, match="no such policy"):
        PPOTrainer(config, cluster="local", workers={"policy": Unwilling}, show=False, report=False).fit()
    assert "I cannot" in "".join(path.read_text() for path in (tmp_path / "runs/run/logs").glob("policy*.log"))
    train(tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0}))


class Unwilling(Policy):
    """A policy that cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        sys.stdout.write("I cannot\n")
        sys.stdout.flush()
        raise LookupError("no such policy")


def test_a_run_is_not_overwritten(finished_grpo: Path, tmp_path: Path) -> None:
    folder = copy_folder(finished_grpo, tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"holds a run \(finished at step \d+\): resume it"):
        train(grpo_config(folder))


@pytest.mark.parametrize("placement", SPLIT, ids=str)
def test_split_sends_each_version_to_the_generator(
    finished_grpo: Path, tmp_path: Path, placement: dict[str, Any]
) -> None:
    run = train(grpo_config(tmp_path, placement=placement))
    versions = [set(pq.read_table(file)["version"].to_pylist()) for file in sorted((run / "completions").iterdir())]
    assert versions == [{0}, {1}, {2}]
    assert losses(run) == losses(finished_grpo / "runs" / "run")


def test_a_table_of_pools_changes_no_result(tmp_path: Path) -> None:
    """Each role alone, the generator with the reference, and all together but the critic."""
    sections: dict[str, Any] = {
        "batch": {"prompts": 8},
        "critic": {"lr": 1e-2},
        "eval": {"items": 0},
        "run": {"steps": 3},
    }
    plain = train(tiny(PPOConfig, tmp_path, **sections))
    tables = {
        "alone": [["policy"], ["reference"], ["critic"], ["estimator"], ["generator"]],
        "pairs": [["generator", "reference"], ["critic", "estimator"], ["policy"]],
        "critic": [["policy", "reference", "generator"], ["critic"]],
    }
    for name, table in tables.items():
        pools = {f"pool{number}": {"roles": roles} for number, roles in enumerate(table)}
        run = train(
            tiny(PPOConfig, tmp_path, **{**sections, "run": {"name": name, "steps": 3}, "placement": {"pools": pools}})
        )
        assert losses(run) == losses(plain)
        assert [row[metrics.VALUE_LOSS] for row in metrics_rows(run)] == [
            row[metrics.VALUE_LOSS] for row in metrics_rows(plain)
        ]


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_ppo_with_a_critic_and_a_reference(tmp_path: Path, kl_in: str) -> None:
    algorithm = {"kl_in": kl_in, "kl_coef": 0.1, "kl_estimator": "k3", "epochs": 2, "minibatches": 2}
    run = train(
        tiny(
            PPOConfig,
            tmp_path,
            run={"steps": 3},
            batch={"prompts": 8},
            algorithm=algorithm,
            critic={"lr": 1e-2},
        ),
        reward=longer_is_better,
    )
    rows = metrics_rows(run)
    listed = LISTED - {metrics.FLAT_GROUPS}  # a group of one completion says nothing
    assert {metrics.VALUE_LOSS, metrics.EXPLAINED_VARIANCE, metrics.KL, *listed} <= rows[0].keys()
    assert rows[-1][metrics.KL] > 0  # the policy has left the reference
    assert rows[0][metrics.RATIO_MAX] > 1.0  # several updates on one batch: the ratio moves
    assert rows[0][metrics.MISMATCH_MAX] < 1e-5
    assert (run / "checkpoints" / "latest" / "critic").is_dir()


class Seen(Estimator):
    """An estimator that checks what it is given."""

    @endpoint(dispatch=only(0), collect=first(), returns="ref")
    def advantages(self, batch: Batch, kl_coef: float = 0.0) -> Batch:
        bootstrap_B, values = batch.dense("bootstrap"), batch.jagged("values")
        cut_B = torch.tensor([reason == "length" for reason in batch.python("finish_reason")])
        assert bool((bootstrap_B[~cut_B] == 0).all())
        found = super().advantages(batch, kl_coef)
        if values.values.any():  # from the second step on
            assert bool((bootstrap_B[cut_B] != 0).all()) and bool(cut_B.any())
            # With lambda = 0, the target of a last token is the reward and the value after it.
            ends = values.offsets[1:] - 1
            targets = found.jagged("returns").values[ends] - batch.dense("rewards")
            torch.testing.assert_close(targets, bootstrap_B)
        return found


def test_completions_that_were_cut_off_are_bootstrapped(tmp_path: Path) -> None:
    algorithm = {"lam": 0.0, "kl_in": "none", "kl_coef": 0.0}
    config = tiny(PPOConfig, tmp_path, run={"steps": 3}, batch={"prompts": 8}, algorithm=algorithm, eval={"items": 0})
    train(config, reward=longer_is_better, workers={"estimator": Seen})


class Failing(Policy):
    @endpoint(dispatch=shard(args=("batch",)), collect=concat())
    def logprobs(self, batch: Batch, entropy: bool = False, squares: bool = False) -> Batch:
        raise ValueError("out of luck")


def test_a_worker_that_raises_ends_the_run_and_the_cluster_stays_usable(tmp_path: Path) -> None:
    import podium

    config = tiny(GRPOConfig, tmp_path, algorithm={"epochs": 2}, eval={"items": 0})
    with podium.connect("inline") as cluster:
        with pytest.raises(EndpointError, match="out of luck"):
            PPOTrainer(config, cluster=cluster, workers={"policy": Failing}, show=False).fit()
        again = tiny(GRPOConfig, tmp_path, run={"name": "again", "steps": 1}, eval={"items": 0})
        assert PPOTrainer(again, cluster=cluster, show=False).fit().steps == 1
