"""Directories of runs for the tests of ``podium view``, made by the writers that a real run has.

python -m tests.made_runs FOLDER [COMPLETIONS] [TOKENS]    # one to look at, with words as tokens
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from podium.data import Batch, Jagged, fields
from podium.models import char_tokenizer
from podium.rewards import Grade
from podium.rollout.tasks import Example
from podium.runs.run_files import RunFiles
from podium.telemetry import (
    CallFinished,
    EvalFinished,
    Event,
    PhaseStarted,
    StageFinished,
    Stalled,
    StepFinished,
    WorkerLost,
    WorkerStarted,
)
from podium.telemetry.sinks import JsonlSink, TraceSink
from podium.trainer.completion_files import write_completions
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt
from podium.trainer.token_texts import TokenTexts

MS = 1_000_000
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
HOSTILE = "<script>document.title='hacked'</script></script><img src=x onerror=alert(1)>\x1b[2J\u202e\x07 é"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,500 tokens, trained on this project's documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<end>"], show_progress=False, initial_alphabet=ALPHABET
    )
    tokenizer.train_from_iterator(_documentation(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def _documentation() -> list[str]:
    docs = Path(__file__).parents[1] / "docs"
    return [page.read_text() for page in sorted(docs.glob("*.md"))]


def write_run(
    folder: Path,
    *,
    steps: int = 3,
    prompts: int = 2,
    n: int = 2,
    tokens: int = 8,
    text: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    sessions: bool = False,
    trouble: bool = False,
    finished: bool = True,
) -> Path:
    """Write a run of ``steps`` steps with ``prompts * n`` completions each, and return its directory.

    Args:
        text: What every completion says; None for passages of this project's documentation.
        sessions: Whether rows have two turns, of an agent called "critic". The middle third of a row is read.
        trouble: Whether a worker is lost, a call fails, a metric is NaN and prompts are dropped.
    """
    (folder / "completions").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "config.yaml").write_text(
        json.dumps(
            {"run": {"steps": steps, "schedule": "sync"}, "model": {"path": "tiny"}, "data": {"train": "copy.jsonl"}}
        )
    )
    tokenizer = tokenizer or char_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789=+<>/é")
    texts, chance = TokenTexts(tokenizer), random.Random(seed)
    passages = (
        [text] if text is not None else [p for page in _documentation() for p in page.split("\n\n") if len(p) > 80]
    )
    for step in range(1, steps + 1):
        scored, learned = _scored(step, prompts, n, tokens, passages, tokenizer, chance, steps)
        scored = _in_sessions(scored) if sessions else scored
        write_completions(RunFiles(folder, "completions"), scored, learned, texts)
    _write_events(folder, steps, chance, trouble)
    if trouble:
        _write_trouble(folder)
    if finished:
        (folder / "summary.json").write_text(json.dumps({"finished": True, "steps": steps}))
    return folder


def _scored(
    step: int,
    prompts: int,
    n: int,
    tokens: int,
    passages: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    chance: random.Random,
    steps: int,
) -> tuple[ScoredBatch, Batch]:
    rows: list[list[int]] = []
    for _ in range(prompts * n):
        ids = list(tokenizer.encode(chance.choice(passages), add_special_tokens=False))
        while len(ids) < tokens:
            ids += tokenizer.encode(chance.choice(passages), add_special_tokens=False)
        rows.append(ids[: chance.randint(max(1, tokens // 2), tokens)])
    prompt_ids = tokenizer.encode("a", add_special_tokens=False)
    whole = Jagged.from_rows([torch.tensor([*prompt_ids, *row]) for row in rows])
    generator = torch.Generator().manual_seed(step)
    noise_N = torch.rand(len(whole.values), generator=generator)
    firsts = whole.offsets[:-1]
    mask_N = torch.ones(len(whole.values), dtype=torch.bool)
    mask_N[firsts] = False
    rewards = [float(chance.random() < 0.2 + 0.6 * step / steps) for _ in rows]
    grades = [Grade(reward, {"form": 0.5 * reward}, correct=reward > 0.5) for reward in rewards]
    means = [sum(rewards[i - i % n : i - i % n + n]) / n for i in range(len(rows))]
    advantage_N = torch.repeat_interleave(torch.tensor(rewards) - torch.tensor(means), whole.lengths)
    advantage_N = (advantage_N + 0.2 * (torch.rand(len(mask_N), generator=generator) - 0.5)) * mask_N
    old_N = -3 * torch.rand(len(mask_N), generator=generator) * mask_N
    batch = Batch(
        {
            fields.TOKENS: whole,
            fields.LOSS_MASK: whole.like(mask_N),
            fields.VERSIONS: whole.like((step - 1 - (noise_N > 0.7).long()).clamp(min=0)),
            fields.ROLLOUT_LOGPROBS: whole.like(old_N + 0.02 * (noise_N - 0.5) * mask_N),
            fields.KEPT_SIZES: whole.like((1 + 40 * noise_N**4).long() * mask_N),
            fields.GROUP: torch.arange(len(rows)) // n,
            fields.REWARDS: torch.tensor(rewards),
            fields.FINISH_REASON: ["length" if chance.random() < 0.2 else "stop" for _ in rows],
        }
    )
    examples = [
        Prompt(
            torch.tensor(prompt_ids),
            Example(f"Explain, in step {step}, question {place}.", str(place), {}),
            lambda ids, step=step, place=place: f"Explain, in step {step}, question {place}.",
        )
        for place in range(prompts)
    ]
    scored = ScoredBatch(
        step=step, steps_before=step - 1, batch=batch, prompts=examples, tokenizer=tokenizer, grades=grades
    )
    return scored, Batch({fields.ADVANTAGES: whole.like(advantage_N), fields.OLD_LOGPROBS: whole.like(old_N)})


def _in_sessions(scored: ScoredBatch) -> ScoredBatch:
    """The same rows as conversations of two turns, the first of which has the reward 0.5."""
    tokens, turns, rewards = scored.batch.jagged(fields.TOKENS), [], []
    for length in tokens.lengths.tolist():
        third = (length - 1) // 3
        turns += [-1, *[0] * third, *[-1] * third, *[1] * (length - 1 - 2 * third)]
        rewards += [0.5 if place == third else 0.0 for place in range(length)]
    columns: dict[str, Any] = {
        fields.TURN: tokens.like(torch.tensor(turns)),
        fields.LOSS_MASK: tokens.like(torch.tensor(turns) >= 0),
        fields.TOKEN_REWARDS: tokens.like(torch.tensor(rewards)),
        fields.SESSION: torch.arange(len(tokens.lengths)),
        fields.AGENT: ["critic"] * len(tokens.lengths),
    }
    return dataclasses.replace(scored, batch=scored.batch.with_columns(columns))


def _write_events(folder: Path, steps: int, chance: random.Random, trouble: bool) -> None:
    """metrics.jsonl and trace.json of steps in which a generator and a policy of two ranks take turns."""
    now, call = 1_000_000 * MS, 0
    rows, trace = JsonlSink(folder / "metrics.jsonl"), TraceSink(folder / "trace.json")

    def tell(event: Event) -> None:
        trace.emitted_ns = now  # the run's own clock, so that a test need not take the time that a run takes
        rows.emitted_ns = time.monotonic_ns()
        for sink in (rows, trace):
            sink.handle(event)

    tell(PhaseStarted("grpo", steps))
    for role in ("policy", "generator"):
        for rank in range(2):
            tell(WorkerStarted(role, rank, "localhost", 4000 + rank))
    tell(EvalFinished(0, 100, {"accuracy": 0.1, "reward_mean": 0.1}))
    for step in range(1, steps + 1):
        begun = now
        for role, method, half, length in (
            ("generator", "generate", "collect", 200),
            ("policy", "update", "learn", 300),
        ):
            start, call = now, call + 1
            ends = [start + (length + chance.randint(0, 40)) * MS for _ in range(2)]
            for rank in range(2):
                ok = not (trouble and step == 2 and role == "policy" and rank == 1)
                tell(
                    CallFinished(role, method, rank, "localhost", call, start, start + (1 + rank) * MS, ends[rank], ok)
                )
            now = max(ends) + 2 * MS
            tell(StageFinished(method, step, start, now, half))
        reward = 0.2 + 0.6 * step / steps + 0.1 * chance.random()
        entropy = math.nan if trouble and step == 2 else 1.5 - step / steps + 0.1 * chance.random()
        found = {"reward/mean": reward, "policy/entropy": entropy, "loss": 0.1 * chance.random(), "tokens": 1000.0}
        tell(StepFinished(step, found | {"policy/kl_coef": 0.0, "time/step": (now - begun) / 1e9}))
        if trouble and step == 2:
            tell(WorkerLost("policy", 1, "localhost", "signal SIGKILL"))
            tell(Stalled("policy", "update", (1,), 60.0))
    tell(EvalFinished(steps, 100, {"accuracy": 0.8, "reward_mean": 0.8}))
    rows.finish()
    trace.finish()


def write_evaluations(folder: Path, answers: dict[int, Sequence[str | None]], name: str = "") -> None:
    """Write the evaluations of a set: by step the answer to each question, whose number is the right one."""
    place = folder / "evaluations" / (f"set={name}" if name else "")
    place.mkdir(parents=True, exist_ok=True)
    for step, completions in answers.items():
        rows = [(number, text) for number, text in enumerate(completions) if text is not None]
        columns = {
            "group": [number for number, _ in rows],
            "prompt": [f"{HOSTILE} Question {number}" for number, _ in rows],
            "completion": [text for _, text in rows],
            "expected": [str(number) for number, _ in rows],
            "correct": [text == str(number) for number, text in rows],
            "reward": [float(text == str(number)) for number, text in rows],
            "tokens": [[number] for number, _ in rows],
        }
        pq.write_table(pa.table(columns), place / f"step-{step:06d}.parquet")


def _write_trouble(folder: Path) -> None:
    ledger: list[dict[str, Any]] = [
        {"first": 0},
        {"state": "taken", "step": 2, "prompts": [0, 1]},
        {"state": "dropped", "step": 2, "prompts": [0, 1], "reason": "the run was stopped"},
    ]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    (folder / "logs" / "policy-1.log").write_text(
        "2026-11-23 07:34:34,983 INFO podium: it begins\n2026-11-23 07:34:35,983 WARNING podium: it is \x1b[31mred\n"
        'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g()\nValueError: no <b>number</b>\n'
    )


def make_run(
    path: Path, *, steps: int = 3, seed: int = 0, lr: float = 1e-5, offset: float = 0.0, **summary: Any
) -> Path:
    """The files of a run with ``steps`` rows."""
    path.mkdir(parents=True)
    (path / ".lock").touch()
    config = {"run": {"name": path.name, "seed": seed, "steps": 3}, "optim": {"lr": lr}, "data": {"train": "a.jsonl"}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {"kind": "step", "step": step, "time": 10.0 * step, "loss": 0.0, "reward/mean": offset + 0.1 * step}
        for step in range(1, steps + 1)
    ]
    rows += [{"kind": "eval", "step": steps, "time": 99.0, "accuracy": 0.25, "items": 4, "reward_mean": 0.5}] * bool(
        steps
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        (path / "summary.json").write_text(json.dumps({"steps": steps, "wall_s": 72.0, **summary}))
    return path


if __name__ == "__main__":
    count, length = ([int(word) for word in sys.argv[2:]] + [10_000, 200][len(sys.argv) - 2 :])[:2]
    made = write_run(
        Path(sys.argv[1]), steps=20, prompts=count // 160, n=8, tokens=length, tokenizer=word_tokenizer(), trouble=True
    )
    print(made)  # noqa: T201 - a script speaks through print
