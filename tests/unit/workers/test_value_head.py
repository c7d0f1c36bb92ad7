"""A critic that is a value head on the policy's model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from podium.algorithms import AlgorithmConfig, check_functions
from podium.data import Batch
from podium.errors import CheckpointError, ConfigError
from podium.models import ModelConfig
from podium.models.value_head import find_value_head, is_of_value_head
from podium.models.whole_weights import full_weights
from podium.trainer import GRPOConfig, PPOConfig, build_config
from podium.training import OptimConfig, ParallelConfig
from podium.workers import Policy
from podium.workers.policy import HEAD_ALONE
from podium_dryrun.memory import describe_memory
from podium_dryrun.plan import describe_plan
from tests.unit.workers.tiny import ADAPTED, TINY, recorded

OPTIM = OptimConfig(lr=3e-3, weight_decay=0.1, grad_clip=0.5)
CAPS = {"final_logit_softcapping": 0.5, "attn_logit_softcapping": None}
CAPPED = replace(TINY, config={**TINY.config, "model_type": "gemma2", **CAPS})


def judged(trunk: str = "shared", coef: float = 0.5, **others: Any) -> AlgorithmConfig:
    return AlgorithmConfig(advantage="gae", options={"critic_trunk": trunk, "value_coef": coef}, **others)


def make(
    model: ModelConfig = TINY, algorithm: AlgorithmConfig | None = None, parallel: ParallelConfig | None = None
) -> Policy:
    return Policy(model, OPTIM, parallel, algorithm or judged(), value_lr=0.05)


def parameters_of(policy: Policy, *, head: bool) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad and is_of_value_head(name) == head
    }


def states_of(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy._state().items() if name.startswith("optimizer")}


def oracle_values(policy: Policy, batch: Batch) -> Tensor:
    """The head over the hidden states of plain passes of whole rows, before each token with loss."""
    head, columns = find_value_head(policy.model), list[Tensor]()
    assert head is not None
    for row, mask in zip(batch.jagged("tokens").unbind(), batch.jagged("loss_mask").unbind(), strict=True):
        with torch.no_grad():
            hidden = policy.model(row[None], output_hidden_states=True).hidden_states[-1][0, :-1]
            columns.append(torch.cat([torch.zeros(1), head(hidden)[:, 0]]) * mask)
    return torch.cat(columns)


@pytest.mark.parametrize("model", [TINY, ADAPTED, CAPPED], ids=["whole", "adapters", "capped"])
def test_values_are_those_of_the_head_over_the_policys_hidden_states(model: ModelConfig) -> None:
    policy, batch = make(model), recorded()
    assert not policy.values(batch).jagged("values").values.any(), "they start at zero"
    policy.update(batch)
    values = policy.values(batch).jagged("values").values
    torch.testing.assert_close(values, oracle_values(policy, batch), atol=1e-5, rtol=1e-5)
    reasons = ["length", "stop"] * 4
    bootstrap = policy.values(batch.with_columns(finish_reason=reasons)).dense("bootstrap")
    assert bootstrap[::2].abs().min() > 0
    assert not bootstrap[1::2].any()


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["shared", "detached"])
@pytest.mark.parametrize("coef", [0.5, 0.0])
def test_the_gradient_is_that_of_the_sum_of_both_losses(kind: str, coef: float) -> None:
    """In float64, by autograd through plain passes of whole rows."""
    policy, batch = make(algorithm=judged(kind, coef, value_clip=None)), recorded()
    policy.update(batch)
    exact = make(algorithm=judged(kind, coef)).model.double()
    exact.load_state_dict({name: value.double() for name, value in policy.model.state_dict().items()})
    metrics = policy.accumulate(batch)
    ours = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    rows = {name: batch.jagged(name).unbind() for name in batch}
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    for number, row in enumerate(rows["tokens"]):
        mask = rows["loss_mask"][number][1:].bool()
        column = {name: rows[name][number][1:][mask].double() for name in rows}
        output = exact(row[None], output_hidden_states=True)
        logprobs = output.logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0][mask]
        ratio, advantage = (logprobs - column["old_logprobs"]).exp(), column["advantages"]
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        hidden = output.hidden_states[-1][0, :-1][mask]
        head = find_value_head(exact)
        assert head is not None
        errors = head(hidden if kind == "shared" else hidden.detach())[:, 0] - column["returns"]
        sums[0] = sums[0] - (column["loss_weights"] * clipped).sum()
        sums[1] = sums[1] + (column["loss_weights"] * errors.square() / 2).sum()
    (sums[0] + coef * sums[1]).backward()
    assert metrics["loss"] == pytest.approx(float(sums[0].detach()), rel=1e-5)
    assert metrics["value/loss"] == pytest.approx(float(sums[1].detach()), rel=1e-5)
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours[name].double(), parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-sum-constant"])
def test_micro_batches_and_packed_rows_change_nothing(aggregation: Any) -> None:
    algorithm = judged(aggregation=aggregation, kl_in="loss", kl_coef=0.1, entropy_coef=0.01)
    batch = recorded(None).drop("loss_weights").with_meta(max_new_tokens=20)
    batch = batch.with_columns({"group": torch.arange(len(batch)) // 4})

    def train(parallel: ParallelConfig) -> list[dict[str, float]]:
        policy = make(algorithm=algorithm, parallel=parallel)
        return [policy.update(batch.merge(policy.values(batch), keep="other")) for _ in range(3)]

    whole = train(ParallelConfig(micro_batch_tokens=1000, batching="padded"))
    for budget, batching in ((36, "padded"), (1000, "packed"), (36, "auto")):
        other = train(ParallelConfig(micro_batch_tokens=budget, batching=batching))  # pyright: ignore[reportArgumentType] - of a literal
        assert other == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in whole]


@pytest.mark.parametrize("model", [TINY, ADAPTED, replace(TINY, dtype="bfloat16")], ids=["whole", "adapters", "bf16"])
def test_a_step_of_the_head_alone_leaves_all_else_as_it_is(model: ModelConfig) -> None:
    policy, batch = make(model), recorded()
    assert policy.update(batch)["value/learning_rate"] == 0.05, "as in steps of the head alone"
    body, head, states = parameters_of(policy, head=False), parameters_of(policy, head=True), states_of(policy)
    row = policy.update(batch.with_meta(**{HEAD_ALONE: True}))
    assert "loss" not in row
    assert row["value/learning_rate"] == 0.05
    assert row["value/grad_norm"] > 0
    assert all(torch.equal(body[name], value) for name, value in parameters_of(policy, head=False).items())
    assert not any(torch.equal(head[name], value) for name, value in parameters_of(policy, head=True).items())
    for name, value in states_of(policy).items():
        assert torch.equal(states[name], value) != is_of_value_head(name), name
    policy.update(batch)
    assert not all(torch.equal(body[name], value) for name, value in parameters_of(policy, head=False).items())


def test_the_head_learns_where_no_advantage_teaches() -> None:
    """Such a minibatch makes no pass without a value head."""
    policy, batch = make(), recorded()
    zero = batch.jagged("advantages")
    batch = batch.with_columns({"advantages": zero.like(torch.zeros_like(zero.values))})
    rows = [policy.update(batch) for _ in range(20)]
    assert rows[-1]["value/loss"] < 0.9 * rows[0]["value/loss"]


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapters"])
def test_checkpoints_hold_the_head_beside_the_model_and_continue_bit_by_bit(tmp_path: Path, adapted: bool) -> None:
    Policy(TINY).save_pretrained(str(tmp_path / "start"))
    model = ModelConfig(path=str(tmp_path / "start"), lora=ADAPTED.lora if adapted else None)
    policy, batch = make(model), recorded()
    policy.update(batch)
    policy.save(str(tmp_path / "step"))
    again = make(model)
    again.load(str(tmp_path / "step"))
    for number in range(2):
        other = recorded(seed=number + 1)
        assert policy.update(other) == again.update(other)
    for head in (True, False):
        after = parameters_of(again, head=head)
        assert all(torch.equal(after[name], value) for name, value in parameters_of(policy, head=head).items())
    names = {name for file in (tmp_path / "step").glob("*.safetensors") for name in load_file(file)}
    assert names, "of a model that others load"
    assert not any(map(is_of_value_head, names))
    assert not any(is_of_value_head(name) for name, _ in full_weights(policy.model))
    assert not any(is_of_value_head(info.name) for info in policy.weight_manifest().weights)
    with pytest.raises(CheckpointError, match=r"of another model: it lacks \[\] and has .*podium_value_head"):
        Policy(model, OPTIM).load(str(tmp_path / "step"))


def test_what_cannot_be_combined_is_refused_by_key_and_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"value_coef = 0.5 with critic_trunk = 'separate'.*set critic_trunk to shared"
    ):
        check_functions(AlgorithmConfig(advantage="gae", options={"value_coef": 0.5}))
    with pytest.raises(ConfigError, match=r"unknown key algorithm.options.critic_trunk"):
        check_functions(AlgorithmConfig(options={"critic_trunk": "shared"}))
    with pytest.raises(
        ConfigError, match=r"critic.path = 'other' with .*critic_trunk = 'shared'.*leave critic.path out"
    ):
        build_config(PPOConfig, settings(critic={"path": "other"}))
    pools = {"all": {"roles": ["policy", "reference", "estimator", "generator", "critic"]}}
    with pytest.raises(ConfigError, match=r"placement.pools.all.roles has critic"):
        build_config(PPOConfig, settings(placement={"pools": pools}))
    with pytest.raises(ConfigError, match=r"this policy has no value head: set algorithm.options.critic_trunk"):
        Policy(TINY, OPTIM).values(recorded())


def settings(trunk: str = "shared", **sections: Any) -> dict[str, Any]:
    model = {"config": dict(TINY.config), "tokenizer": TINY.tokenizer}
    algorithm = {"options": {"critic_trunk": trunk}}
    return {"model": model, "data": {"train": "rows.jsonl"}, "algorithm": algorithm, **sections}


def test_a_dry_run_counts_one_model(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+", "answer": "2"}\n')
    data = {"train": str(rows)}
    apart, together = (build_config(PPOConfig, settings(trunk, data=data)) for trunk in ("separate", "shared"))
    assert "critic" in apart.roles
    assert "critic" not in together.roles
    assert "critic with optimizer" in describe_memory(apart, "inline")
    assert "critic" not in describe_memory(together, "inline")
    assert "a value head on the policy's model, no model of its own" in describe_plan(together, "inline")
    assert "value head" not in describe_plan(apart, "inline")
    assert not build_config(GRPOConfig, settings() | {"algorithm": {}}).has_critic
