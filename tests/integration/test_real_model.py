"""A published model of 135 million parameters: its vocabulary, its chat template, and all that is done with a model.

`make real` fetches and converts it. Without it these tests are skipped, and counted.
"""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.cli import main
from podium.data import Batch, Jagged
from podium.devices import has_bfloat16_unit
from podium.models import LoraConfig, ModelConfig
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.rollout.tasks.encode import encode_pairs, encode_prompts, end_of_turn
from podium.rollout.tasks.forms import Example
from podium.runtime import Cluster
from podium.telemetry import StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer, SFTConfig, SFTTrainer, build_config
from podium.training import OptimConfig, ParallelConfig
from podium.workers import Generator, Policy, StreamedSync
from podium_testing.engines import compute_trained_logprobs
from tests.integration.test_serve_cli import serving
from tests.integration.test_serve_lm_eval import check_scores, needs_lm_eval
from tests.integration.test_workers_ranks import started
from tests.integration.training import losses, metrics_rows, slots, timeless
from tests.unit.workers.tiny import recorded
from tests.warm_python import run_python

C = TypeVar("C")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "real"
MODEL = ROOT / ".cache" / "real" / "model"

here = pytest.mark.skipif(not MODEL.exists(), reason="the model is not here: python examples/real/convert.py")

TURNS = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And naïve 東京 🙂?"},
    {"role": "assistant", "content": "  It ends\nhere: 12."},
]


def test_the_reward_and_the_script_of_the_example() -> None:
    score = runpy.run_path(str(EXAMPLE / "reward.py"))["score"]
    row = {"answer": "7 + 5 = 12"}
    replies = (
        "7 + 5 = 12",
        " 7 + 5 = 12.\n",
        "7 + 5 = 12\n\nThis is",
        "7 + 5 = 120",
        "7 + 5 = 13",
        "12",
        "",
        "It is 7 + 5 = 12",
    )
    assert [score(reply, row) for reply in replies] == [1, 1, 0.5, 0, 0, 0, 0, 0]
    assert len((EXAMPLE / "convert.py").read_text().splitlines()) <= 60


class Answers:
    """A client whose answers are known: a call of a tool, and then the tool's result."""

    def __init__(self, *arguments: dict[str, int]) -> None:
        self.arguments = [*arguments]
        self.conversations = list[list[dict[str, Any]]]()

    async def chat(self, messages: list[dict[str, Any]], **_: Any) -> SimpleNamespace:
        self.conversations.append(messages)
        text, calls = str(messages[-1]["content"]), []
        if self.arguments:
            function = {"name": "multiply", "arguments": json.dumps(self.arguments.pop())}
            text, calls = "", [{"id": "1", "type": "function", "function": function}]
        message = {"role": "assistant", "content": text, "tool_calls": calls}
        return SimpleNamespace(text=text, tool_calls=calls, messages=[*messages, message])


def test_the_tool_of_the_example_earns_the_reward() -> None:
    play = runpy.run_path(str(EXAMPLE / "tool.py"))["play"]
    task = {"prompt": [{"role": "user", "content": "What is 14 * 13?"}], "answer": "182"}
    right, wrong, single = Answers({"a": 14, "b": 13}), Answers({"a": 14, "b": 14}), Answers()
    assert [asyncio.run(play(task, client)) for client in (right, wrong, single)] == [1.0, 0.0, 0.0]
    assert right.conversations[1][-1]["content"] == "182"


def test_each_worse_answer_of_the_example_is_worth_less() -> None:
    score = runpy.run_path(str(EXAMPLE / "reward.py"))["score"]
    pairs = runpy.run_path(str(EXAMPLE / "rows.py"))["pairs"]()
    assert {score(row["chosen"], row) for row in pairs} == {1.0}
    assert {score(row["rejected"], row) for row in pairs} == {0.0, 0.5}


@here
def test_turns_and_prompts_are_the_templates_own_text() -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(MODEL), DataConfig(train="rows")
    talk = Example(prompt=TURNS[:1], answer=None, row={}, turns=TURNS[1:], whole=True)
    ((tokens, learned),) = encode_pairs([talk], tokenizer, config)
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(TURNS, tokenize=False).rstrip("\n")
    spans = list[list[int]]()
    for token, is_learned, before in zip(tokens, learned, [False, *learned], strict=False):
        if is_learned:
            spans = spans if before else [*spans, []]
            spans[-1].append(token)
    assert [tokenizer.decode(span) for span in spans] == ["5<|im_end|>", "  It ends\nhere: 12.<|im_end|>"]
    prompts = encode_prompts([Example(prompt=TURNS[:3], answer="", row={})], tokenizer, config)
    asked = tokenizer.apply_chat_template(TURNS[:3], add_generation_prompt=True, return_dict=False)
    assert prompts.token_ids[0] == asked
    assert end_of_turn(tokenizer, config) == tokenizer.convert_tokens_to_ids("<|im_end|>")


def write_prompts(*questions: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    talks = [[{"role": "user", "content": question}] for question in questions]
    return [tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) for talk in talks]


QUESTIONS = ("What is the capital of France?", "What is 3 + 4?", "Name a color.", "Write a line about the sea.")


@here
def test_engines_write_what_transformers_writes() -> None:
    """The same ids greedily, and log-probabilities as in training, also of what is improbable."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    prompts, end = write_prompts(*QUESTIONS), model.generation_config.eos_token_id
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0, stop_token_ids=(end,))
    drawn = SamplingParams(max_new_tokens=16, temperature=0.9, stop_token_ids=(end,))
    theirs = list[list[int]]()
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :]
        theirs.append(ids.tolist())
    for name in ("native", "transformers"):
        engine = make_engine(EngineConfig(name=name), model)
        assert [one.token_ids.tolist() for one in engine.generate(prompts, greedy, range(4))] == theirs, name
        for prompt, completion in zip(prompts, engine.generate(prompts, drawn, range(4)), strict=True):
            expected = compute_trained_logprobs(model, prompt, completion, 0.9)
            torch.testing.assert_close(completion.logprobs, expected, atol=1e-5, rtol=1e-5)


def configure(cls: type[C], folder: Path, **sections: Any) -> C:
    """Two steps of four short completions, or of four examples."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {n} + 3?"}], "answer": f"{n} + 3 = {n + 3}"}
        for n in range(24)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "name": "run", "steps": 2},
        "model": {"path": str(MODEL)},
        "data": {"train": str(folder / "sums.jsonl"), "holdout": 0.2},
        "reward": {"name": "tests.integration.rewards:longer_is_better", "processes": 1},
        "sampling": {"max_new_tokens": 6},
        "eval": {"items": 2},
        "save": {"keep": 1},
        "placement": {"cpus": 1},
        "batch": {"examples": 4} if cls is SFTConfig else {"prompts": 2},
    }
    if cls is GRPOConfig:
        values["sampling"]["n"] = 2
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return build_config(cls, values)


def compute_logprobs(model: Any) -> Tensor:
    """The log-probabilities of all tokens at the ends of two prompts."""
    with torch.no_grad():
        rows = [model.eval()(torch.tensor([prompt])).logits[0, -4:] for prompt in write_prompts(*QUESTIONS[:2])]
        return torch.cat(rows).log_softmax(-1)


def train_and_look(config: GRPOConfig | SFTConfig) -> tuple[Path, Tensor]:
    """Train, and return the run with the policy's log-probabilities after its last step."""
    cls: Any = SFTTrainer if isinstance(config, SFTConfig) else PPOTrainer
    trainer = cls(config, cluster="inline", show=False)
    seen = list[Tensor]()

    def look(event: object) -> None:
        if isinstance(event, StepFinished) and event.step == config.run.steps:
            seen.extend(trainer.run.roles.policy.group.run(lambda worker: compute_logprobs(worker.model)))

    unsubscribe = subscribe(look)
    try:
        trainer.fit()
    finally:
        unsubscribe()
    return Path(config.run.dir) / config.run.name, seen[0]


@here
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("recipe", "lora"), [("grpo", False), ("grpo", True), ("sft", False), ("sft", True)])
def test_a_run_resumes_bit_by_bit_and_its_model_is_that_of_transformers_and_peft(
    tmp_path: Path, recipe: str, lora: bool
) -> None:
    cls = SFTConfig if recipe == "sft" else GRPOConfig
    sections = {"model": {"lora": {"rank": 4}}, "optim": {"lr": 1e-4}} if lora else {"optim": {"lr": 1e-5}}
    run, logprobs = train_and_look(configure(cls, tmp_path, **sections))
    assert main(["export", str(run), "--to", str(tmp_path / "exported")]) == 0
    whole = timeless(run)
    if recipe == "grpo":
        assert all(row["mismatch/mean"] < 1e-5 for row in metrics_rows(run))
    else:
        assert losses(run)[-1] < losses(run)[0]
    if lora:
        plain = AutoModelForCausalLM.from_pretrained(MODEL)
        before = compute_logprobs(plain)
        exported: Any = PeftModel.from_pretrained(plain, str(tmp_path / "exported"))
    else:
        before = compute_logprobs(AutoModelForCausalLM.from_pretrained(MODEL))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    torch.testing.assert_close(compute_logprobs(exported), logprobs, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logprobs, before, atol=1e-3)
    for steps, resume in ((1, ""), (2, str(tmp_path / "runs" / "parts"))):
        parts = {"steps": steps, "name": "parts", "resume": resume}
        path, again = train_and_look(configure(cls, tmp_path, run=parts, **sections))
    assert timeless(path) == whole
    assert torch.equal(again, logprobs)


@here
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not has_bfloat16_unit(), reason="the processor has no unit for bfloat16 (AMX)")
def test_generation_in_bfloat16_stays_near_training_and_repeats_its_bits(tmp_path: Path) -> None:
    """docs/training.md has mean differences of log-probabilities of 0.03 to 0.07."""
    metrics = []
    for name in ("one", "two"):
        run = {"name": name, "steps": 3}
        sizes = {"batch": {"prompts": 6}, "sampling": {"n": 4, "max_new_tokens": 16}, "optim": {"lr": 1e-5}}
        config = configure(GRPOConfig, tmp_path, run=run, engine={"dtype": "bfloat16"}, **sizes)
        path, logprobs = train_and_look(config)
        metrics.append((timeless(path), logprobs))
        differences = [row["mismatch/mean"] for row in metrics_rows(path)]
        assert all(1e-5 < mean < 0.1 for mean in differences), differences
    assert metrics[0][0] == metrics[1][0]
    assert torch.equal(metrics[0][1], metrics[1][1])


@here
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_shards_over_two_ranks_train_as_one_rank_and_generators_follow(
    preloaded: Cluster, lora: LoraConfig | None
) -> None:
    config, optim = ModelConfig(path=str(MODEL), lora=lora), OptimConfig(lr=1e-4 if lora else 1e-5)
    metrics = list[list[dict[str, float]]]()
    for ranks, parallel in ((1, ParallelConfig()), (2, ParallelConfig(strategy="fsdp2"))):
        policy = Policy.bind(config, optim, parallel)
        with started(preloaded, ranks, policy=policy) as group:
            metrics.append([group.policy.update(recorded(seed=seed)) for seed in range(2)])
    for one, two in zip(*metrics, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5)


@here
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_generators_draw_from_the_policy_after_each_sync(preloaded: Cluster) -> None:
    config, sampling = ModelConfig(path=str(MODEL)), SamplingParams(max_new_tokens=12, n=2)
    prompts = Batch(
        {
            "prompt_tokens": Jagged.from_rows([torch.tensor(prompt) for prompt in write_prompts(*QUESTIONS)]),
            "seed": torch.arange(8).view(4, 2),
            "group": torch.arange(4),
        }
    )
    with slots(preloaded, 1) as mine, slots(preloaded, 1) as theirs:
        policy = preloaded.start(Policy.bind(config, OptimConfig(lr=1e-5)), mine)
        generator = preloaded.start(Generator.bind(config), theirs)
        try:
            sync = StreamedSync(policy, [generator])
            sync.init()
            for version in range(2):
                sync.sync(version)
                drawn = generator.generate(prompts, sampling).fetch()
                trained = policy.logprobs(drawn).fetch().jagged("old_logprobs").values
                torch.testing.assert_close(drawn.jagged("rollout_logprobs").values, trained, atol=1e-5, rtol=1e-5)
                policy.update(recorded(seed=version))
        finally:
            policy.group.close()
            generator.group.close()


@here
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_served_answer_is_that_of_transformers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL)
    ((prompt,), question) = write_prompts(QUESTIONS[0]), {"role": "user", "content": QUESTIONS[0]}
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, len(prompt) :]
    with serving(str(MODEL)) as served:
        for limit in ({}, {"max_tokens": 24}):  # the first is what pages for chats send
            body = {"model": "model", "messages": [question], "temperature": 0, **limit}
            status, answer = served.ask("/v1/chat/completions", body)
            assert status == 200, answer
            (choice,) = json.loads(answer)["choices"]
            assert choice["message"]["content"] == tokenizer.decode(ids, skip_special_tokens=True)
            assert choice["finish_reason"] == "stop"


@here
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@needs_lm_eval
def test_lm_eval_measures_the_served_model_as_its_own_backend_does(tmp_path: Path) -> None:
    check_scores(MODEL, tmp_path, count=12)


@here
@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("way", ["full", "lora", "dpo", "tool"])
def test_the_example_learns(tmp_path: Path, way: str, seed: int) -> None:
    """The held-out reward rises by at least 0.25, which `make real` takes up to 15 minutes for on two idle cores."""
    words = [] if way == "full" else [f"--{way}"]
    done = run_python(str(EXAMPLE / "train.py"), *words, "--seed", str(seed), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "run" / "summary.json").read_text())
    assert summary["after"]["reward_mean"] >= summary["before"]["reward_mean"] + 0.25
    assert "podium view" in done.stdout.splitlines()[-1]
