"""Sessions whose generators are killed: a run in which one of two generators ends by SIGKILL in each step, at a random
moment, beside the same run without a kill.

    python -m bench.session_kills            50 kills, 800 sessions of five turns: about five minutes
    python -m bench.session_kills --kills 5  a short look

Writes session_kills.json beside this file. A session that goes on at another generator draws the same ids there, as
requests carry their seeds, so both runs train on the same rows in each step, bit by bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from podium.trainer import GRPOConfig, PPOTrainer, build_config
from podium_agents import Client

SEED = 0
TURNS, PROMPTS, N = 5, 4, 4
LATEST_S = 0.6  # after the beginning of a step; undisturbed, its sessions take about as long
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
SHAPE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


async def play(task: dict[str, Any], client: Client) -> float:
    """Five turns with pauses. The reward is the share of digits in what was said last."""
    reply = await client.chat(task["prompt"])
    for _ in range(TURNS - 1):
        await asyncio.sleep(0.05)
        reply = await client.chat([*reply.messages, {"role": "user", "content": "="}])
    return sum(character.isdigit() for character in reply.text) / 3


class Struck(PPOTrainer):
    """In each step a generator is killed, if ``dice`` are given."""

    dice: random.Random | None = None
    struck = 0

    def collect_sessions(self, sessions: Any, prompts: Any, step: int) -> Any:
        """As the trainer's, while a generator is killed."""
        if self.dice is None:
            return super().collect_sessions(sessions, prompts, step)
        pids = [pid for handle in self.run.roles.generators for pid in handle.group.pids]
        after_s = self.dice.uniform(0.0, LATEST_S)
        self.dice.shuffle(pids)

        def strike() -> None:
            time.sleep(after_s)
            for pid in pids:  # the one of the step before may not have been started again yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.struck += 1
                    return

        striking = threading.Thread(target=strike)
        striking.start()
        try:
            return super().collect_sessions(sessions, prompts, step)
        finally:
            striking.join()


def run(folder: Path, name: str, steps: int, dice: random.Random | None) -> tuple[Path, int]:
    """Train, and return the run's directory and how many generators were killed."""
    (folder / "chat.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"{number:02d}=", "answer": ""} for number in range(100)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {"config": SHAPE, "tokenizer": "chars:0123456789= "},
        "data": {"train": str(folder / "tasks.jsonl"), "chat_template": str(folder / "chat.jinja")},
        "environment": {"name": f"{__file__}:play"},
        "sampling": {"n": N, "max_new_tokens": 3},
        "batch": {"prompts": PROMPTS},
        "optim": {"lr": 1e-3},
        "eval": {"items": 0},
        "placement": {"layout": "split", "generator_ranks": 2},
        "run": {"dir": str(folder), "name": name, "steps": steps, "seed": SEED, "max_restarts": 10 * steps},
    }
    trainer = Struck(build_config(GRPOConfig, values), cluster="local", show=False)
    trainer.dice = dice
    trainer.fit()
    return folder / name, trainer.struck


def compared(undisturbed: Path, struck: Path, steps: int) -> dict[str, int]:
    """What became of the sessions of both runs."""
    found: Counter[str] = Counter()
    for step in range(1, steps + 1):
        tables = [pq.read_table(one / "completions" / f"step-{step:06d}.parquet") for one in (undisturbed, struck)]
        rows = [dict(zip(table["session"].to_pylist(), table["tokens"].to_pylist(), strict=True)) for table in tables]
        found["rows"] += tables[1].num_rows
        found["sessions"] += len(rows[1])
        found["with the same ids"] += sum(rows[1].get(number) == ids for number, ids in rows[0].items())
    metrics = [json.loads(line) for line in (struck / "metrics.jsonl").read_text().splitlines()]
    found["failed"] = round(sum(one["sessions/failed"] * PROMPTS * N for one in metrics if one["kind"] == "step"))
    return {name: found[name] for name in ("sessions", "rows", "with the same ids", "failed")}


def main() -> None:
    """Run, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.session_kills")
    parser.add_argument("--kills", type=int, default=50)
    steps = parser.parse_args().kills
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        undisturbed, _ = run(Path(folder), "undisturbed", steps, None)
        struck, kills = run(Path(folder), "struck", steps, random.Random(SEED))
        result = {"kills": kills, **compared(undisturbed, struck, steps)}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result) + "\n")
    sys.stdout.write(f"{json.dumps(result)}\n")
    expected = steps * PROMPTS * N
    if result["sessions"] != result["rows"] or result["sessions"] + result["failed"] != expected:
        sys.exit(f"of {expected} sessions some are lost or count twice")


if __name__ == "__main__":
    main()
