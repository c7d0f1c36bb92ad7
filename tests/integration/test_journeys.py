"""Two people from their first command to their last: what they read on the way, and what the files hold.

One brings a run of verl: a shell script, a reward, an estimator, a worker and a tool. The other one brings a published
model of 135 million parameters, which `make real` converts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.test_serve_cli import Serving
from tests.integration.training import MODEL as TINY, metrics_rows
from tests.warm_python import WarmPopen, run_python

ROOT = Path(__file__).parents[2]
REAL = ROOT / ".cache" / "real" / "model"
LONG_S = 3600  # of a command, on a busy machine

GENERATE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (cls.from_pretrained("exported") for cls in (AutoModelForCausalLM, AutoTokenizer))
question = [{"role": "user", "content": "What is 3 + 4?"}]
ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**ids, max_new_tokens=14, do_sample=False)[0, ids["input_ids"].shape[1]:]
print("SAID", tokenizer.decode(out, skip_special_tokens=True).strip())
"""

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(4 * LONG_S)]


def podium(folder: Path, *words: str | Path, status: int = 0) -> str:
    """What a command prints on both streams. It is run in ``folder`` and has to end with this status."""
    done = run_python("-m", "podium", *words, cwd=folder, timeout=LONG_S)
    text = done.stdout + done.stderr
    assert done.returncode == status, text
    assert "Traceback" not in text
    return text


def begin(folder: Path, *words: str | Path, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "podium", *map(str, words)]
    pipe = subprocess.PIPE
    return WarmPopen(command, cwd=folder, env={**os.environ, **env}, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def write_sums(path: Path, most: int = 12) -> None:
    """Sums of two numbers, each as a message of a chat."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": f"{a} + {b} = {a + b}"}
        for a in range(2, most)
        for b in range(2, most)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# -- a published model -------------------------------------------------------------------------------------------------


def stop_after_step(folder: Path, run: str, step: int, *words: str) -> str:
    """Start a run, interrupt it once it has saved a step, and return what it printed."""
    child = begin(folder, *words)
    try:
        saved = folder / "runs" / run / "checkpoints" / f"step-{step:06d}"
        while not (saved.exists() or child.poll() is not None):
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        text, _ = child.communicate(timeout=LONG_S)
    finally:
        child.kill()
    assert child.returncode == 0, text
    return text


def ask(url: str, **request: Any) -> Any:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=LONG_S) as client:
        answer = client.chat.completions.create(**request)
        return list(answer) if request.get("stream") else answer


COMMON = ["--data.train", "sums.jsonl", "--data.holdout", "0.2", "--eval.items", "4", "--placement.cpus", "2"]


@pytest.mark.skipif(not REAL.exists(), reason="the model is not here: python examples/real/convert.py")
def test_a_published_model_from_fine_tuning_to_its_service(tmp_path: Path) -> None:
    """Fine-tune, look at the plan, train, stop, resume, evaluate, export, load elsewhere, serve."""
    write_sums(tmp_path / "sums.jsonl")
    fine_tune(tmp_path)
    training = look_at_plan(tmp_path)
    reward = train_in_two_parts(tmp_path, training)
    judge(tmp_path, reward)
    serve_and_ask(tmp_path, export_and_load(tmp_path, reward))


def fine_tune(folder: Path) -> None:
    tuning = ["--run.name", "sft", "--run.steps", "2", "--batch.examples", "8", "--optim.lr", "3e-5"]
    podium(folder, "train", "sft", "--model.path", str(REAL), *tuning, *COMMON)
    losses = [row["loss"] for row in metrics_rows(folder / "runs" / "sft", "eval")]
    assert len(losses) == 2 and losses[1] < losses[0], "two steps on the form of the answer lower the held-out loss"
    assert (folder / "runs" / "sft" / "model" / "model.safetensors").exists()


def look_at_plan(folder: Path) -> list[str]:
    """The words of the command that trains on, whose plan says how long it will take."""
    rules = ["--reward.name", f"{ROOT / 'examples' / 'real' / 'reward.py'}:score", "--sampling.max_new_tokens", "14"]
    rules += ["--sampling.n", "4", "--batch.prompts", "2", "--optim.lr", "1e-5", "--eval.metric", "reward"]
    training = ["train", "grpo", "--model.path", "runs/sft", "--run.name", "rl", "--run.steps", "3"]
    training += ["--save.every", "1", *rules, *COMMON]
    plan = podium(folder, *training, "--dry-run", "--measure")
    assert re.search(r"^a step +about .* to generate, .* to learn$", plan, re.MULTILINE), plan
    assert re.search(r"^the run +about .*: 3 steps, and 2 evaluation", plan, re.MULTILINE), plan
    assert not (folder / "runs" / "rl").exists(), "it leaves nothing"
    return training


def train_in_two_parts(folder: Path, training: Sequence[str]) -> float:
    """Stop the run after its first step, resume it as it says, and return its last held-out reward."""
    text = stop_after_step(folder, "rl", 1, *training)
    told = re.search(r"^stopped after step (\d+); to continue: podium (.*)$", text, re.MULTILINE)
    assert told is not None and int(told[1]) < 3, text
    text = podium(folder, *shlex.split(told[2]))
    assert f"resuming after step {told[1]}" in text
    assert [row["step"] for row in metrics_rows(folder / "runs" / "rl")] == [1, 2, 3], "no step twice, none lost"
    record = json.loads((folder / "runs" / "rl" / "summary.json").read_text())
    assert record["steps"] == 3 and record["finished"]
    return record["after"]["reward_mean"]


def judge(folder: Path, reward: float) -> None:
    text = podium(folder, "eval", "runs/rl")
    assert f"{reward:.3f}" in text and "reward" in text, (reward, text)
    text = podium(folder, "runs")
    assert re.search(r"\brl\b.*finished", text) and re.search(r"\bsft\b.*finished", text), text


def export_and_load(folder: Path, reward: float) -> str:
    """What transformers says with the exported model."""
    podium(folder, "export", "runs/rl", "--to", "exported")
    card = (folder / "exported" / "README.md").read_text()
    assert "reward.py" in card and f"{reward:.3f}" in card, card
    loaded = run_python("-c", GENERATE, cwd=folder, timeout=LONG_S)
    said = re.search(r"^SAID (.*)", loaded.stdout, re.MULTILINE)
    assert said is not None, loaded.stderr
    return said[1]


def serve_and_ask(folder: Path, said: str) -> None:
    """Serve the trained run: it says what transformers says, streams its log-probabilities, and refuses tools."""
    serving = Serving(begin(folder, "serve", "runs/rl", PODIUM_TOKEN="secret"))
    asked: Any = {"model": "rl", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0}
    try:
        answer = ask(serving.url, **asked, max_tokens=14)
        assert answer.choices[0].message.content.strip().splitlines()[0] == said.splitlines()[0]
        chunks = ask(serving.url, **asked, max_tokens=14, stream=True, logprobs=True)
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(texts) == answer.choices[0].message.content
        for chunk, text in zip(chunks, texts, strict=True):
            if text:
                assert chunk.choices[0].logprobs.content[0].token.strip() in text
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        status, body = serving.ask("/v1/chat/completions", {**asked, "tools": [tool]})
        assert (status, "the chat template does not write them" in body) == (400, True), body
        assert ask(serving.url, **asked).choices[0].finish_reason in ("stop", "length"), "without a limit, too"
    finally:
        serving.child.send_signal(signal.SIGINT)
        rest, _ = serving.child.communicate(timeout=LONG_S)
    assert serving.child.returncode == 0, rest


# -- a run of verl -----------------------------------------------------------------------------------------------------

RUN_SH = """\
set -x
prompts=4
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=$prompts \\
    data.max_prompt_length=64 data.max_response_length=6 data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=tiny actor_rollout_ref.actor.ppo_mini_batch_size=$((prompts / 2)) \\
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \\
    actor_rollout_ref.rollout.val_kwargs.n=2 \\
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=seq_reward \\
    algorithm.filter_groups.max_num_gen_batches=3 \\
    custom_reward_function.path=reward.py custom_reward_function.name=compute_score \\
    trainer.total_training_steps=2 trainer.test_freq=1 trainer.critic_warmup=0 trainer.logger=console "$@"
"""
FILES = {
    "reward.py": """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = [sign for sign in solution_str if sign.isdigit()]
    score = len(set(digits) & set(ground_truth)) / 2 + len(digits) / 20
    return {"score": score, "acc": float(solution_str == ground_truth), "pred": "".join(digits) or "[INVALID]"}
""",
    "estimator.py": """\
from podium.algorithms import AdvantageOutputs, group_statistics


def best_of_group(inputs, config):
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    return AdvantageOutputs(advantages_N=inputs.spread((rewards_B - stats.mean_G[stats.index_B]).clamp(min=0)))
""",
    "tool.py": """\
from podium_agents import converse
from reward import compute_score


def calculate(expression: str) -> str:
    \"\"\"Add.

    Args:
        expression: Two numbers with + between them.
    \"\"\"
    left, _, right = expression.partition("+")
    return str(int(left) + int(right))


async def play(task, client):
    question = task["prompt"][0]["content"]
    reply = await converse(client, task["prompt"], tools=[calculate], max_turns=2)
    client.reward(0.25 * bool(reply.text))  # as verl's tool_reward: it is trained
    hint = {"role": "user", "content": calculate(question)}
    reply = await client.chat([*reply.messages, hint])
    return compute_score("sums", reply.text, task["reward_model"]["ground_truth"])["score"]
""",
    "run.py": """\
from podium import Batch, endpoint, first, shard
from podium.trainer import GRPOConfig, PPOTrainer, load_config
from podium.workers import Policy
from reward import compute_score


class CountingPolicy(Policy):
    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        return {**super().update(batch), "mine/rows": float(len(batch))}


if __name__ == "__main__":
    config = load_config(GRPOConfig, "run.yaml", ["--run.name", "worker", "--placement.cpus", "1"])
    summary = PPOTrainer(config, cluster="local", workers={"policy": CountingPolicy}, reward=compute_score).fit()
    print("TRAINED", summary.steps)
""",
}
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_verl_project(folder: Path) -> None:
    """The files of the project, its data as verl has them, and a model with a chat template."""
    tables = pytest.importorskip("pyarrow.parquet")
    from pyarrow import Table

    from podium.models import ModelConfig, char_tokenizer, load_model

    for name, text in {**FILES, "run.sh": RUN_SH}.items():
        (folder / name).write_text(text)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 10 * a + b},
        }
        for a in range(10)
        for b in range(10)
    ]
    for name, part in (("train", rows[:80]), ("test", rows[80:88])):
        tables.write_table(Table.from_pylist(part), folder / f"{name}.parquet")
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer = char_tokenizer(alphabet, chat_template=TOOL_TEMPLATE)
    settings = {**TINY["config"], "max_position_embeddings": 1024, "vocab_size": len(tokenizer)}
    model = load_model(ModelConfig(config=settings, tokenizer=f"chars:{alphabet}"))
    model.save_pretrained(folder / "tiny")  # type: ignore[operator] - of transformers
    tokenizer.save_pretrained(folder / "tiny")


def read_completions(run: Path, folder: str = "completions") -> list[dict[str, Any]]:
    return [
        row
        for path in sorted((run / folder).glob("*.parquet"))
        for row in pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    ]


def test_a_run_of_verl_with_its_reward_estimator_worker_and_tool(tmp_path: Path) -> None:
    """Convert the script, look at the plan, train with each thing of one's own, and compare."""
    pytest.importorskip("podium_migration")
    write_verl_project(tmp_path)
    said = podium(tmp_path, "config", "--from", "verl", "run.sh", "--output", "run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    values = yaml.safe_load(text)
    assert values["batch"]["prompts"] == {"count": 4, "filter": "rewards", "refills": 2}
    assert (values["optim"]["lr"], values["optim"]["weight_decay"], values["algorithm"]["minibatches"]) == (
        1e-3,
        0.01,
        2,
    )
    assert (values["reward"]["name"], values["run"]["steps"]) == ("reward.py:compute_score", 2)
    assert values["eval"]["temperature"] == {"temperature": 0.6, "n": 2}
    assert "trainer.critic_warmup" not in text, "0 is off there, and there is none here"
    assert "podium train grpo --config run.yaml" in said + text

    plan = podium(tmp_path, "train", "grpo", "--config", "run.yaml", "--dry-run")
    assert "4 prompts x 4 completions = 16 rows" in plan
    assert "all rewards are equal" in plan and "at most 2 times" in plan
    local = ["--placement.cpus", "1", "--save.every", "1"]
    out = podium(tmp_path, "train", "grpo", "--config", "run.yaml", "--run.name", "plain", *local)
    plain = tmp_path / "runs" / "plain"
    rows = read_completions(plain)
    assert rows and {row["logged_pred"] for row in rows} - {"[INVALID]"}, "a reward's text is kept with the completion"
    assert [row["step"] for row in metrics_rows(plain)] == [1, 2]
    assert "held-out reward" in out
    held_out = read_completions(plain, "evaluations")
    assert len(held_out) == 3 * 8 * 2, "two answers to each of the eight prompts, before and after each step"

    own = ["--algorithm.advantage", "estimator.py:best_of_group", "--run.name", "estimator", *local]
    podium(tmp_path, "train", "grpo", "--config", "run.yaml", *own)
    assert (tmp_path / "runs" / "estimator" / "model" / "config.json").exists()

    done = run_python("run.py", cwd=tmp_path, timeout=LONG_S)
    assert done.returncode == 0 and "TRAINED 2" in done.stdout, done.stdout + done.stderr
    assert [row["mine/rows"] for row in metrics_rows(tmp_path / "runs" / "worker")] == [8.0, 8.0]
    refused = podium(tmp_path, "eval", "runs/worker", status=2)
    assert "__main__" in refused or "of the script" in refused, refused
    judged = podium(tmp_path, "eval", "runs/worker", "--reward.name", "reward.py:compute_score")
    assert "reward" in judged

    session = ["--environment.name", "tool.py:play", "--run.name", "tool"]
    said = podium(tmp_path, "train", "grpo", "--config", "run.yaml", *session, *local)
    assert "reward.name" in said, "that the environment scores itself is told"
    rows = read_completions(tmp_path / "runs" / "tool")
    assert rows and any("calculate" in json.dumps(row) for row in rows), "the tool's schema is in the prompt"
    listed = podium(tmp_path, "runs")
    for name in ("plain", "estimator", "worker", "tool"):
        assert re.search(rf"\b{name}\b.*finished", listed), listed
