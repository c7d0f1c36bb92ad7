from __future__ import annotations

import pickle
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium.algorithms import AlgorithmConfig, loss_weights
from podium.data import Batch, Jagged
from podium.errors import CheckpointError, ConfigError, DataError, PodiumError
from podium.models import ModelConfig
from podium.models.manifest import file_sums, write_manifest
from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams
from podium.training import OptimConfig, ParallelConfig
from podium.training.config import EndingOptim
from podium.workers import Critic, Generator, Policy, Reference
from tests.unit.workers.tiny import ADAPTED, TINY, oracle_logprobs, recorded

OPTIM = OptimConfig(lr=3e-3)
PROMPTS = Batch(
    {
        "prompt_tokens": Jagged.from_rows([torch.tensor([5, 14, 6, 15]), torch.tensor([9, 15])]),
        "seed": torch.arange(6).view(2, 3),
        "group": torch.tensor([7, 4]),
    }
)
SAMPLING = SamplingParams(max_new_tokens=12, n=3, temperature=0.7, stop_token_ids=(2,))


def values_of(batch: Batch, name: str) -> torch.Tensor:
    return batch.jagged(name).values


def colocated(worker: Any, **others: Any) -> Any:
    worker.ctx = replace(worker.ctx, colocated=MappingProxyType(others))
    return worker


def test_logprobs_are_those_of_the_model_at_the_batchs_temperature() -> None:
    policy, batch = Policy(TINY), recorded(temperature=0.7)
    assert "entropy" not in policy.logprobs(batch)
    out = policy.logprobs(batch, entropy=True)
    alone = torch.cat([oracle_logprobs(policy.model, row, 0.7) for row in batch.jagged("tokens").unbind()])
    assert torch.allclose(values_of(out, "old_logprobs"), alone * values_of(batch, "loss_mask"), atol=1e-5)
    entropy = values_of(out, "entropy")[values_of(batch, "loss_mask")]
    assert bool((entropy > 0).all())
    assert float(entropy.max()) <= float(torch.tensor(16.0).log()) + 1e-5


def test_sft_lowers_the_loss_and_knows_no_advantages() -> None:
    policy = Policy(TINY, OPTIM, algorithm=AlgorithmConfig(loss="cross_entropy"))
    batch = recorded().select("tokens", "loss_mask", "loss_weights")
    losses = [policy.update(batch)["loss"] for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2


def test_a_policy_update_reports_the_whole_minibatch() -> None:
    policy = Policy(TINY, OPTIM, algorithm=AlgorithmConfig(kl_in="loss", kl_coef=0.1))
    batch = recorded()
    batch = batch.merge(policy.logprobs(batch, entropy=True), keep="other")
    metrics = policy.update(batch)
    mask = values_of(batch, "loss_mask")
    old, rollout = values_of(batch, "old_logprobs")[mask], values_of(batch, "rollout_logprobs")[mask]
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/mean"] == pytest.approx(float((old - rollout).abs().mean()), rel=1e-4)
    assert metrics["mismatch/max"] == pytest.approx(float((old - rollout).abs().max()), rel=1e-4)
    assert metrics["policy/entropy"] == pytest.approx(float(values_of(batch, "entropy")[mask].mean()), rel=1e-4)
    assert metrics["policy/learning_rate"] == OPTIM.lr
    assert metrics["policy/grad_norm"] > 0
    assert metrics["policy/skipped_steps"] == 0.0
    again = policy.update(batch)
    assert again["policy/ratio_max"] > 1.0
    assert again["policy/approx_kl"] > 0


def test_without_old_logprobs_the_first_step_is_that_of_the_unchanged_policy() -> None:
    batch = recorded()
    one, other = Policy(TINY, OPTIM), Policy(TINY, OPTIM)
    first = one.update(batch.merge(one.logprobs(batch), keep="other"))
    second = other.update(batch.drop("old_logprobs"))
    assert second["loss"] == pytest.approx(first["loss"], abs=1e-6)
    assert second["policy/grad_norm"] == pytest.approx(first["policy/grad_norm"], rel=1e-5)


def test_weights_are_made_when_the_batch_has_none() -> None:
    batch, algorithm = recorded(), AlgorithmConfig(aggregation="token-mean")
    given = Policy(TINY, OPTIM, algorithm=algorithm).update(batch)
    made = Policy(TINY, OPTIM, algorithm=algorithm).update(batch.drop("loss_weights"))
    assert made["loss"] == pytest.approx(given["loss"], abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean", "sequence-sum-constant"])
def test_weights_made_here_are_those_of_the_algorithm(mode: Any) -> None:
    batch = recorded(max_new_tokens=7.0).drop("loss_weights")
    got = Policy(TINY, algorithm=AlgorithmConfig(aggregation=mode)).weighted(batch).jagged("loss_weights")
    expected = loss_weights(values_of(batch, "loss_mask"), batch.jagged("tokens").offsets, mode, constant=7.0)
    assert torch.allclose(got.values, expected)


def test_accumulate_and_step_are_an_update() -> None:
    whole, apart, batch = Policy(TINY, OPTIM), Policy(TINY, OPTIM), recorded()
    for _ in range(3):
        assert {**apart.accumulate(batch), **apart.step()} == whole.update(batch)
    for mine, theirs in zip(apart.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_may_follow_two_losses_and_has_settings_of_its_own() -> None:
    """Reinforcement, and a tenth of the cross-entropy of examples: the gradient is the sum of both."""
    batch, examples, imitation = recorded(), recorded(), AlgorithmConfig(loss="cross_entropy")
    policy = Policy(TINY, OPTIM)
    first = policy.accumulate(batch)
    second = policy.accumulate(examples.select("tokens", "loss_mask", "loss_weights"), imitation, weight=0.1)
    apart = [Policy(TINY, OPTIM), Policy(TINY, OPTIM, algorithm=imitation)]
    assert first["loss"] == apart[0].accumulate(batch)["loss"]
    assert second["loss"] == pytest.approx(0.1 * apart[1].accumulate(examples)["loss"], rel=1e-6)
    expected = [flat_gradient(worker) for worker in apart]
    metrics = policy.step(learning_rate=0.0, grad_clip=0.0)
    assert metrics["policy/learning_rate"] == 0.0
    assert torch.allclose(flat_gradient(policy), expected[0] + 0.1 * expected[1], atol=1e-6)


def flat_gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([part.flatten() for part in policy.engine.parallel.gradients()])


def test_gradients_that_wait_are_not_lost_in_a_checkpoint(tmp_path: Path) -> None:
    policy = Policy(TINY, OPTIM)
    with pytest.raises(PodiumError, match="no gradient waits"):
        policy.step()
    policy.accumulate(recorded())
    with pytest.raises(CheckpointError, match="gradients of 1 minibatch wait for an optimizer step"):
        policy.save(str(tmp_path / "checkpoint"))
    policy.step()
    policy.save(str(tmp_path / "checkpoint"))


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataError, match="'advantages'"):
        Policy(TINY, OPTIM).update(recorded().drop("advantages"))


def test_an_entropy_bonus_raises_the_entropy() -> None:
    batch = recorded().with_columns(advantages=recorded().jagged("advantages").like(torch.zeros(101)))
    policy = Policy(TINY, OptimConfig(lr=1e-2), algorithm=AlgorithmConfig(entropy_coef=1.0))
    entropies = [policy.update(batch.drop("old_logprobs", "rollout_logprobs"))["policy/entropy"] for _ in range(6)]
    assert entropies[-1] > entropies[0] + 0.02


def test_the_critic_starts_at_zero_and_learns_the_returns() -> None:
    critic, batch = Critic(TINY, OptimConfig(lr=1e-2)), recorded()
    values = critic.values(batch)
    assert not values_of(values, "values").any()
    first = critic.update(batch.merge(values, keep="other"))
    returns = values_of(batch, "returns")[values_of(batch, "loss_mask")]
    assert first["value/loss"] == pytest.approx(float(returns.square().mean()) / 2, rel=1e-4)
    assert first["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    last = first
    for _ in range(30):
        batch = batch.merge(critic.values(batch), keep="other")
        last = critic.update(batch)
    assert last["value/explained_variance"] > 0.2
    assert last["value/loss"] < first["value/loss"]


def test_the_critic_values_the_state_after_the_last_token_of_a_row_that_was_cut_off() -> None:
    critic, batch = Critic(TINY, OptimConfig(lr=1e-2)), recorded()
    critic.update(batch)  # so that values are not 0
    reasons = ["length" if row % 3 == 0 else "stop" for row in range(len(batch))]
    found, plain = critic.values(batch.with_columns(finish_reason=reasons)), critic.values(batch)
    assert "bootstrap" not in plain
    assert torch.allclose(values_of(found, "values"), values_of(plain, "values"), atol=1e-6)
    for row, reason, bootstrap in zip(batch.jagged("tokens").unbind(), reasons, found.dense("bootstrap"), strict=True):
        with torch.no_grad():
            after_last = critic.model(row[None]).logits[0, -1, 0]
        assert abs(after_last) > 1e-3
        assert bootstrap == pytest.approx(float(after_last) if reason == "length" else 0.0, abs=1e-5)


GEMMA2 = {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0}
SCALED = [GEMMA2, {"model_type": "cohere", "logit_scale": 0.1}, {"model_type": "granite", "logits_scaling": 9.0}]


@pytest.mark.parametrize("fields", SCALED, ids=lambda fields: fields["model_type"])
def test_a_value_passes_no_cap_or_scale_of_the_models_logits(fields: dict[str, Any]) -> None:
    shape = {name: value for name, value in TINY.config.items() if name != "head_dim"}
    critic, batch = Critic(replace(TINY, config={**shape, **fields}), OptimConfig(lr=0.1, grad_clip=0.0)), recorded()
    head: Any = critic.model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    torch.nn.init.constant_(head.bias, 5.0)
    mask = values_of(batch, "loss_mask")
    values = values_of(critic.values(batch), "values")
    assert torch.equal(values[mask], torch.full((int(mask.sum()),), 5.0))
    batch = batch.with_columns(values=batch.jagged("values").like(values))
    error = 5.0 - values_of(batch, "returns")[mask]
    metrics = critic.update(batch)
    assert metrics["value/loss"] == pytest.approx(float(error.square().mean()) / 2, rel=1e-4)
    assert head.bias.item() == pytest.approx(5.0 - 0.1, rel=1e-4)


def test_the_reference_stays_and_shares_an_adapted_policys_weights() -> None:
    batch = recorded()
    own = values_of(Reference(TINY).logprobs(batch), "ref_logprobs")
    policy = Policy(ADAPTED, OptimConfig(lr=1e-2))
    reference = colocated(Reference.__new__(Reference), policy=policy)
    reference.__init__(ADAPTED)
    for _ in range(2):
        policy.update(batch)
        assert torch.allclose(values_of(reference.logprobs(batch), "ref_logprobs"), own, atol=1e-5)
    assert not torch.allclose(values_of(policy.logprobs(batch), "old_logprobs"), own, atol=1e-3)
    assert reference.engine is policy.engine


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, top_p=0.8, top_k=6)], ids=["all", "top-p"])
@pytest.mark.parametrize("model", [TINY, ADAPTED], ids=["plain", "lora"])
def test_a_colocated_generator_samples_from_the_policy_as_it_is_now(
    model: ModelConfig, sampling: SamplingParams
) -> None:
    policy = Policy(model, OptimConfig(lr=1e-2))
    generator = colocated(Generator(model), policy=policy)
    for version in range(3):
        generator.refresh(version)
        out = generator.generate(PROMPTS, sampling)
        trained = values_of(policy.logprobs(out), "old_logprobs")
        assert torch.allclose(values_of(out, "rollout_logprobs"), trained, atol=1e-5)
        mask = values_of(out, "loss_mask")
        assert values_of(out, "versions")[mask].unique().tolist() == [version]
        policy.update(out.with_columns(advantages=out.jagged("tokens").like(torch.randn(len(mask)) * mask)))


def test_generated_rows_hold_prompt_and_completion_and_their_group() -> None:
    out = Generator(TINY).generate(PROMPTS, SAMPLING)
    assert len(out) == 6
    assert out.dense("group").tolist() == [7, 7, 7, 4, 4, 4]
    assert out.meta["temperature"] == 0.7
    heads = PROMPTS.jagged("prompt_tokens").unbind()
    for row, (ids, mask) in enumerate(
        zip(out.jagged("tokens").unbind(), out.jagged("loss_mask").unbind(), strict=True)
    ):
        head = heads[row // 3]
        assert torch.equal(ids[: len(head)], head)
        assert mask.tolist() == [False] * len(head) + [True] * (len(ids) - len(head))
        assert out.python("finish_reason")[row] == ("stop" if int(ids[-1]) == 2 else "length")
    assert len(Generator(TINY).generate(PROMPTS.slice(0, 0), SAMPLING)) == 0


def test_what_a_generator_cannot_do_is_named() -> None:
    policy, generator = Policy(TINY), Generator(TINY)
    with pytest.raises(ConfigError, match=r"colocated policy.*StreamedSync"):
        generator.refresh(5)
    with pytest.raises(ConfigError, match="refresh"):
        colocated(Generator(TINY), policy=policy).prepare_weight_sync(policy.weight_manifest().weights, 2**20)
    with pytest.raises(DataError, match="seed"):
        generator.generate(PROMPTS, replace(SAMPLING, n=2))


LEAVING = {
    "token-mean": {},
    "sequence-mean": {"aggregation": "sequence-mean", "kl_in": "loss", "kl_coef": 0.1, "entropy_coef": 0.01},
    "constant": {"aggregation": "sequence-sum-constant"},
    "minibatch": {"loss": "clip_cov", "options": {"cov_share": 0.2, "cov_low": -1e9, "cov_high": 1e9}},
}


@pytest.mark.each_value
@pytest.mark.parametrize("algorithm", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("kind", [Policy, Critic])
def test_rows_that_are_left_out_have_no_part_in_loss_gradient_or_normalization(
    kind: type[Policy | Critic], algorithm: dict[str, Any]
) -> None:
    batch = recorded(max_new_tokens=7.0).drop("loss_weights")
    left_out = torch.tensor([True, False, False, False, True, False, True, False])
    kept = batch.take((~left_out).nonzero()[:, 0].tolist())
    config = AlgorithmConfig(**algorithm)
    with_them = kind(TINY, OPTIM, algorithm=config).update(batch.with_columns({"left_out": left_out}))
    without, every = (kind(TINY, OPTIM, algorithm=config).update(rows) for rows in (kept, batch))
    assert with_them == pytest.approx(without, rel=1e-5, abs=1e-6)
    assert with_them["value/grad_norm" if kind is Critic else "policy/grad_norm"] != pytest.approx(
        every["value/grad_norm" if kind is Critic else "policy/grad_norm"], rel=0.01
    )


def test_a_step_whose_rows_are_all_left_out_has_no_gradient_and_no_logprobs() -> None:
    policy, batch = Policy(TINY, OPTIM), recorded().drop("loss_weights").drop("old_logprobs")
    row = policy.update(batch.with_columns({"left_out": torch.ones(8, dtype=torch.bool)}))
    assert (row["loss"], row["policy/grad_norm"], row["policy/skipped_steps"]) == (0.0, 0.0, 0.0)
    found = values_of(policy.update_logprobs(batch.select("loss_mask")), "old_logprobs")
    assert torch.equal(found.isnan(), values_of(batch, "loss_mask"))


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}], ids=str)
@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_ids_that_stand_for_no_text_are_neither_drawn_nor_counted(engine: str, sampling: dict[str, Any]) -> None:
    padded = replace(TINY, config={**TINY.config, "vocab_size": 150}, seed=4)  # for the 16 tokens of the tokenizer
    policy = Policy(padded, OPTIM)
    generator = colocated(Generator(padded, EngineConfig(name=engine)), policy=policy)
    params = replace(SAMPLING, **{"temperature": 1.5, **sampling})
    batch = generator.generate(PROMPTS, params)
    assert int(values_of(batch, "tokens").max()) < 16
    mask = values_of(batch, "loss_mask")
    scores = policy.logprobs(batch, entropy=True)
    rollout = values_of(batch, "rollout_logprobs")
    assert torch.allclose(values_of(scores, "old_logprobs")[mask], rollout[mask], atol=1e-5)
    assert float(values_of(scores, "entropy").max()) <= float(torch.tensor(16.0).log()) + 1e-5
    ones = batch.jagged("tokens").like(mask.float())
    row = policy.update(batch.with_columns({"advantages": ones}))
    assert row["mismatch/max"] < 1e-5
    free = Policy(padded).logprobs(Batch({n: batch[n] for n in ("tokens", "loss_mask")}, {"temperature": 1.5}))
    assert bool((values_of(free, "old_logprobs")[mask] < rollout[mask]).all())  # examples count all of the model's rows


def test_a_model_without_a_tokenizer_draws_all_of_its_ids(tmp_path: Path) -> None:
    Policy(TINY).save_pretrained(str(tmp_path))
    for file in tmp_path.glob("*tokenizer*"):
        file.unlink()
    batch = Generator(ModelConfig(path=str(tmp_path))).generate(PROMPTS, SAMPLING)
    assert "text_ids" not in batch.meta


def test_a_loss_by_its_name_alone_trains_with_the_settings_of_its_paper() -> None:
    batch = recorded().drop("loss_weights")
    explicit = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence-mean"}
    alone, written, former = (
        Policy(TINY, OPTIM, algorithm=AlgorithmConfig(loss="gspo", **settings)).update(batch)
        for settings in ({}, explicit, {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"})
    )
    assert alone == written
    assert alone["loss"] != pytest.approx(former["loss"], rel=0.01)
    assert alone["policy/clip_fraction"] > former["policy/clip_fraction"]


@pytest.mark.parametrize(
    ("shape", "unused"),
    [
        ({}, True),
        ({"attention_dropout": 0.1}, False),
        ({"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1}, False),
        (
            {
                **{"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1},
                **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            },
            True,
        ),
    ],
)
def test_a_note_tells_of_a_dropout_that_the_model_has_no_rates_for(shape: dict[str, Any], unused: bool) -> None:
    plain = replace(ADAPTED if not shape else TINY, config=shape if "model_type" in shape else {**TINY.config, **shape})
    assert "model.dropout" not in Policy(plain, OPTIM).note()
    note = Policy(replace(plain, dropout=True), OPTIM).note()
    assert note.startswith("model.dropout = true has no effect") is unused


def test_a_note_tells_of_the_micro_batches_that_an_accelerator_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("podium.training.micro_batch_size", "podium.workers.learner"):
        monkeypatch.setattr(f"{module}.total_memory_bytes", lambda _: 2**34)
    told = "parallel.micro_batch_tokens = 16384 for the Qwen3ForCausalLM, by the memory of its device"
    assert Policy(TINY, OPTIM).note() == told
    assert Policy(TINY, OPTIM, ParallelConfig(micro_batch_tokens=512)).note() == ""
    assert Policy(TINY).note() == ""


def test_a_reference_of_another_model_has_its_own_weights() -> None:
    reference = colocated(Reference.__new__(Reference), policy=Policy(ADAPTED))
    reference.__init__(replace(TINY, seed=8))
    batch = recorded()
    own = values_of(Policy(replace(TINY, seed=8)).logprobs(batch), "old_logprobs")
    assert torch.equal(values_of(reference.logprobs(batch), "ref_logprobs"), own)


@pytest.mark.parametrize("kind", [Policy, Critic])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path, kind: type[Policy | Critic]) -> None:
    optim = EndingOptim(lr=3e-3, lr_schedule="cosine", warmup_steps=2, total_steps=10)
    whole, batch = kind(TINY, optim), recorded()
    for _ in range(3):
        whole.update(batch)
    whole.save(str(tmp_path / "at3"))
    random = torch.get_rng_state()
    expected = [whole.update(batch) for _ in range(3)]
    torch.manual_seed(123)
    resumed = kind(replace(TINY, seed=77), optim)
    resumed.load(str(tmp_path / "at3"))
    assert torch.equal(torch.get_rng_state(), random)
    assert [resumed.update(batch) for _ in range(3)] == expected


def make_ending(updates: int, critic_warmup: int = 0, warmup_steps: int = 0, trunk: str = "separate") -> Policy:
    """The policy of a run of 10 steps."""
    late = critic_warmup if trunk == "separate" else 0
    first = (critic_warmup - late) * updates
    optim = EndingOptim(
        lr=1.0,
        lr_schedule="linear",
        total_steps=(10 - late) * updates,
        first_step=first,
        warmup_steps=warmup_steps,
    )
    options = {"critic_warmup": critic_warmup, "critic_trunk": trunk}
    return Policy(TINY, optim, algorithm=AlgorithmConfig(advantage="gae", minibatches=updates, options=options))


def read_rates(policy: Policy, count: int = 2) -> list[float]:
    engine = policy.engine
    assert engine.optim is not None
    return [engine.optim.learning_rate(engine.step_count + index, engine.schedule_shift) for index in range(count)]


@pytest.mark.everyday("before1-4-after1-expected1", "before5-4-after5-expected5", "before8-0-after8-expected8")
@pytest.mark.parametrize(
    ("before", "made", "after", "expected"),
    [  # after 4 of 10 steps, by updates a step, steps without one, and steps of the warm-up
        ((4, 0, 0), 16, (1, 0, 0), [0.6, 0.5]),
        ((1, 0, 0), 4, (4, 0, 0), [0.6, 0.575]),
        ((2, 0, 0), 6, (2, 0, 0), [0.7, 0.65]),  # max_kl has left out two optimizer steps
        ((4, 0, 0), 12, (1, 0, 0), [0.7, 0.6]),  # and here four
        ((4, 0, 6), 16, (1, 0, 6), [1.0, 1.0]),  # a warm-up that is over is not made again
        ((1, 0, 0), 4, (4, 0, 8), [5 / 8, 6 / 8]),  # and one that is not goes on
        ((4, 2, 0), 8, (1, 2, 0), [0.75, 0.625]),
        ((1, 2, 0), 2, (1, 3, 0), [6 / 7, 5 / 7]),
        ((2, 5, 0), 0, (1, 5, 0), [1.0, 0.8]),  # the policy has not begun
        ((2, 2, 0, "shared"), 8, (1, 2, 0, "shared"), [0.75, 0.625]),
    ],
)
def test_a_schedule_goes_on_at_its_step_with_another_number_of_updates(
    tmp_path: Path, before: tuple[Any, ...], made: int, after: tuple[Any, ...], expected: list[float]
) -> None:
    policy = make_ending(*before)
    policy.engine.step_count = made
    policy.save(str(tmp_path / "first"))
    resumed = make_ending(*after)
    resumed.load(str(tmp_path / "first"))
    assert read_rates(resumed) == pytest.approx(expected)
    assert resumed.engine.step_count == made
    resumed.engine.step_count += 1
    resumed.save(str(tmp_path / "second"))
    again = make_ending(*after)
    again.load(str(tmp_path / "second"))
    assert read_rates(again, 1) == pytest.approx(expected[1:])


class Former(Policy):
    """Its checkpoints hold the base of adapters too, as they once did."""

    def _state(self, *, whole: bool = False) -> dict[str, torch.Tensor]:
        return super()._state(whole=True)


def test_a_checkpoint_of_adapters_holds_a_checksum_of_their_base(tmp_path: Path) -> None:
    policy, batch = Policy(ADAPTED, OPTIM), recorded()
    policy.update(batch)
    policy.save(str(tmp_path / "policy"))
    names = {name for file in (tmp_path / "policy" / "resume").glob("*.safetensors") for name in load_file(file)}
    assert {name for name in names if "lora" not in name} == {"base", "counts", "random.0.cpu", "schedule"}
    former = Former(ADAPTED, OPTIM)
    former.update(batch)
    former.save(str(tmp_path / "former"))
    expected = policy.update(batch)
    for folder in ("policy", "former"):
        resumed = Policy(ADAPTED, OPTIM)
        resumed.load(str(tmp_path / folder))
        assert resumed.update(batch) == expected
    with pytest.raises(CheckpointError, match="adapters of another base"):
        Policy(replace(ADAPTED, seed=8), OPTIM).load(str(tmp_path / "policy"))


def test_checkpoints_that_are_missing_or_of_another_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Policy(TINY, OPTIM).load(str(tmp_path / "nowhere"))
    Policy(TINY, OPTIM).save(str(tmp_path / "policy"))
    with pytest.raises(CheckpointError, match="another model"):
        Critic(TINY, OPTIM).load(str(tmp_path / "policy"))


class Exploit:
    """A pickle of this writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def describe(folder: Path) -> None:
    """Write the manifest that fits what is there now."""
    there = [file for file in files_of(folder) if file.name != "manifest.json"]
    write_manifest(folder, [{str(file.relative_to(folder)): file_sums([file])[file.name]} for file in there])


def test_a_checkpoint_of_a_stranger_runs_no_code(tmp_path: Path) -> None:
    """Exploits stand in every file that the checkpoint has, and in the files that torch's own reader unpickles."""
    folder, mark = tmp_path / "policy", tmp_path / "code was run"
    pickle.loads(pickle.dumps(Exploit(mark)))
    assert mark.exists()  # so the exploit works
    mark.unlink()
    policy = Policy(TINY, OPTIM)
    policy.save(str(folder))
    buffer = BytesIO()
    torch.save(Exploit(mark), buffer)
    exploits = pickle.dumps(Exploit(mark)), buffer.getvalue()
    for exploit in exploits:
        for name in (".metadata", "__0_0.distcp", "pytorch_model.bin"):
            (folder / name).write_bytes(exploit)
            (folder / "resume" / name).write_bytes(exploit)
        describe(folder)
        policy.load(str(folder))
    for exploit in exploits:
        for file in files_of(folder):
            file.write_bytes(exploit)
        with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
            policy.load(str(folder))
        describe(folder)
        with pytest.raises(CheckpointError, match=f"cannot read the checkpoint {folder}"):
            policy.load(str(folder))
    assert not mark.exists()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """One of a hundred random bits is flipped at a time, in any file of the checkpoint; then files go and come."""
    folder, random = tmp_path / "policy", Random(0)
    policy = Policy(TINY, OPTIM)
    policy.update(recorded())
    policy.save(str(folder))
    files = files_of(folder)
    for _ in range(100):
        file = random.choice(files)
        content = file.read_bytes()
        place, bit = random.randrange(len(content)), 1 << random.randrange(8)
        file.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        with pytest.raises(CheckpointError, match=str(folder)):
            policy.load(str(folder))
        file.write_bytes(content)
    policy.load(str(folder))
    (folder / "more.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has \['more.safetensors'\]"):
        policy.load(str(folder))
    (folder / "more.safetensors").unlink()
    for file in files:
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name):
            policy.load(str(folder))
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match=file.name):
            policy.load(str(folder))
        file.unlink()
        file.symlink_to("/dev/zero")  # it has no end, so whoever reads it never returns
        with pytest.raises(CheckpointError, match=file.name):
            policy.load(str(folder))
        file.unlink()
        file.write_bytes(content)


def test_a_checkpoint_of_another_shape_is_one_line(tmp_path: Path) -> None:
    Policy(TINY, OPTIM).save(str(tmp_path / "policy"))
    wider = Policy(replace(TINY, config={**TINY.config, "vocab_size": 17}), OPTIM)
    with pytest.raises(CheckpointError, match=r"holds model\.\S+ as \[16, 32\], and this run as \[17, 32\]$"):
        wider.load(str(tmp_path / "policy"))


FIGURES = """
from podium.algorithms import Declaration, TokenLoss

def with_figures(figures):
    return Declaration(minibatch=figures)(lambda inputs, config: TokenLoss(-inputs.logprobs_N))

a_list = with_figures(lambda inputs, config: [1])
lists = with_figures(lambda inputs, config: {"f": [1]})
scalar = with_figures(lambda inputs, config: {"f": inputs.logprobs_N[0]})
taken = with_figures(lambda inputs, config: {"advantages": inputs.logprobs_N})
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_list", "minibatch function returned list; expected tensors by name"),
        ("lists", "returned f as list; expected one value a token"),
        ("scalar", r"returned f of shape \[\]; expected one value a token"),
        ("taken", "returned 'advantages', which is a column of the batch"),
    ],
)
def test_figures_of_a_minibatch_are_checked(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "figures.py").write_text(FIGURES)
    policy = Policy(TINY, OPTIM, algorithm=AlgorithmConfig(loss=f"{tmp_path}/figures.py:{name}"))
    with pytest.raises(DataError, match=message):
        policy.update(recorded())


def test_a_checkpoint_of_another_data_type_is_refused(tmp_path: Path) -> None:
    Policy(TINY, OPTIM).save(str(tmp_path / "policy"))
    state = Policy(TINY, OPTIM)
    state.model.to(torch.float64)
    with pytest.raises(CheckpointError, match=r"holds model\.\S+ as torch.float32, and this run as torch.float64"):
        state.load(str(tmp_path / "policy"))


def test_tensors_are_spread_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.workers.learner._FILE_BYTES", 20_000)
    policy = Policy(TINY, OPTIM)
    policy.update(recorded())
    policy.save(str(tmp_path / "policy"))
    assert len(list((tmp_path / "policy").glob("*.safetensors"))) > 3
    other = Policy(replace(TINY, seed=9), OPTIM)
    other.update(recorded())
    other.load(str(tmp_path / "policy"))
    assert other.update(recorded()) == policy.update(recorded())


def test_save_pretrained_is_a_model_to_start_from(tmp_path: Path) -> None:
    policy, batch = Policy(ADAPTED, OptimConfig(lr=1e-2)), recorded()
    policy.update(batch)
    policy.save_pretrained(str(tmp_path))
    again = Policy(ModelConfig(path=str(tmp_path)), parallel=ParallelConfig(batching="packed"))
    one, other = (values_of(p.logprobs(batch), "old_logprobs") for p in (policy, again))
    assert torch.allclose(one, other, atol=1e-5)
