"""What these recipes share: a small model, a tokenizer with the words of tool calls, and the command line.

python examples/agents/calculator.py             train with tools (one to three minutes on one core)
python examples/agents/calculator.py --single    the same model, which answers at once
python examples/agents/calculator.py --schedule asynchronous      several steps are sampled at the same time
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import podium
from podium.models import ModelConfig, char_tokenizer
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.trainer import (
    PRELOAD,
    EvalConfig,
    ExampleBatch,
    GRPOConfig,
    PlacementConfig,
    PPOTrainer,
    PromptBatch,
    RunConfig,
    SFTConfig,
    SFTTrainer,
    Summary,
)
from podium.training import OptimConfig

END_OF_CALL = '"}}</tool_call>'

TEMPLATE = """\
{#- podium: tools are left out -#}{#- The warm-up shows how they are used. -#}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<eos>
{%- elif message.role == 'tool' -%}
[{{ message.content }}]
{%- else -%}
{{ message.content }}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Choice:
    """What the command line chooses: a seed, whether single answers train, and when steps are sampled."""

    seed: int
    single: bool
    schedule: str


def start_of_call(name: str, argument: str) -> str:
    """What stands before the argument in a call of a tool that has one. It is one token of our tokenizers."""
    return f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": "'


def write_tokenizer(folder: Path, alphabet: str, words: Sequence[str] = ()) -> Path:
    """Write a tokenizer of one token a character, and one for each of ``words``, with our chat template."""
    tokenizer = char_tokenizer(alphabet, chat_template=TEMPLATE)
    tokenizer.add_tokens([*words])
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows of data as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def called(name: str, **arguments: str) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": function}]}


def shape(hidden: int = 64, layers: int = 2, length: int = 128) -> dict[str, Any]:
    """The shape of a small Qwen3; vocabulary and special tokens come from the tokenizer."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": length,
        "tie_word_embeddings": True,
    }


def warm_up(
    cluster: podium.Cluster,
    out: Path,
    model: ModelConfig,
    data: str,
    *,
    seed: int,
    steps: int = 400,
    stop_at: float,
) -> ModelConfig:
    """Show the model some conversations, until it draws the last answer of about ``stop_at`` of others."""
    config = SFTConfig(
        run=RunConfig(dir=str(out), name="warmup", seed=seed, steps=steps),
        model=model,
        data=DataConfig(train=data, holdout=0.2),
        sampling=SamplingParams(max_new_tokens=8),
        optim=OptimConfig(lr=1e-3, warmup_steps=10),
        batch=ExampleBatch(examples=64),
        placement=PlacementConfig(cpus=1),
        # It draws as GRPO will.
        eval=EvalConfig(items=100, every=5, at_start=False, metric="accuracy", stop_at=stop_at, temperature=1.0),
    )
    warm = SFTTrainer(config, cluster=cluster, report=False).fit()
    if not warm.finished:  # Ctrl-C
        raise SystemExit("stopped during the warm-up")
    return ModelConfig(path=str(warm.model_path))


def reinforce(
    cluster: podium.Cluster,
    out: Path,
    model: ModelConfig,
    data: DataConfig,
    environment: EnvironmentConfig,
    *,
    choice: Choice,
    steps: int,
    max_new_tokens: int,
    prompts: int = 32,
    lr: float = 1e-3,
    **sections: Any,
) -> Summary:
    """Train by GRPO in an environment, or where it has no name by single answers."""
    config = GRPOConfig(
        run=RunConfig(dir=str(out), name="grpo", seed=choice.seed, steps=steps, schedule=choice.schedule),
        model=model,
        data=data,
        environment=environment,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, n=8),
        optim=OptimConfig(lr=lr),
        batch=PromptBatch(prompts=prompts),
        placement=PlacementConfig(cpus=1) if choice.schedule == "sync" else PlacementConfig(layout="split"),
        eval=EvalConfig(items=200, every=10, temperature=1.0),
        **sections,
    )
    return PPOTrainer(config, cluster=cluster).fit()


def main(train: Callable[[podium.Cluster, Path, Choice], Summary], doc: str | None) -> None:
    """The command line of a recipe. ``train`` gets a cluster, a directory, and what the command line chooses."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--single", action="store_true", help="train the same model by single answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", default="sync", help="sync (default), one_step_off or asynchronous")
    parser.add_argument("--backend", default="local", help="local (default), inline, ray or ray://HOST:PORT")
    parser.add_argument("--out", type=Path, help="a new directory for the run; default: runs/agent-TIME")
    arguments = parser.parse_args()
    out: Path = arguments.out or Path("runs") / f"agent-{time.strftime('%Y-%m-%d-%H%M%S')}"
    hints = {"log_dir": out / "logs", "preload": PRELOAD}  # for backends that have these options
    with podium.connect(arguments.backend, hints=hints) as cluster:
        train(cluster, out, Choice(arguments.seed, arguments.single, arguments.schedule))
    shutil.copy(out / "grpo" / "summary.json", out / "summary.json")
