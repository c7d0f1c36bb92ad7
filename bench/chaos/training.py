"""The run that is disturbed, from inside: a small GRPO run on a copy task, whose roles and clock fail on order.

Each prompt is answered once, or asked twice in a session of the environment in bench/chaos/world.py.

An order is a file in a folder that the variable ORDERS names. Whoever obeys it removes it first, so it works once.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.chaos.leftovers import process
from bench.chaos.pairs import read_pair
from bench.chaos.spares import make_spares
from podium.data import Batch
from podium.rollout.sampling import SamplingParams
from podium.runtime import concat, endpoint, first, shard
from podium.telemetry import Event, WorkerStarted, subscribe
from podium.trainer import PRELOAD, GRPOConfig, PPOTrainer, build_config
from podium.workers import Generator, Policy

__all__ = ["HOARD", "ON_PURPOSE", "PROMPTS", "STALENESS", "configuration", "train"]

ORDERS = "PODIUM_CHAOS_ORDERS"
ON_PURPOSE = "raised on purpose"
HOARD = "take memory until there is none"
PROMPTS = 4
STALENESS = {"sync": 0, "one_step_off": 1, "asynchronous": 2}
GRADING_S = 1.5
MODEL = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip

RAY = {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "150"}
"""Without these, Ray hardly starts beside what else keeps the machine busy."""

_IN_EVERY_INTERPRETER = """
import faulthandler, os, signal, time
faulthandler.register(signal.SIGUSR1)  # write the stacks of all threads to stderr, see Victim.write_stacks
def _jumping(name, unit):
    true = getattr(time, name)
    def now():
        try:
            with open(os.environ["PODIUM_CHAOS_ORDERS"] + "/clock") as file:
                return true() + int(file.read()) * unit
        except (OSError, KeyError, ValueError):
            return true()
    setattr(time, name, now)
_jumping("time", 1)
_jumping("time_ns", 10**9)
"""


TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


def configuration(
    folder: Path, name: str, schedule: str, steps: int, *, sessions: bool = False, keep: int = 2
) -> dict[str, Any]:
    """The configuration of the run ``name`` in ``folder``."""
    data = folder / "copy.jsonl"
    if not data.exists():
        rows = ({"prompt": f"{n:03d}=", "answer": f"{n:03d}"} for n in range(500))
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "name": name, "steps": steps, "schedule": schedule, "resume": "auto",
                "max_restarts": 1000, "max_staleness": STALENESS["asynchronous"]},
        "model": {"config": MODEL, "tokenizer": "chars:0123456789= "},
        "data": {"train": str(data), "holdout": 0.1},
        "reward": {"name": "bench.chaos.reward:copied", "processes": 1, "time_limit_s": GRADING_S},
        "batch": {"prompts": PROMPTS},
        "sampling": {"n": 4, "max_new_tokens": 24},
        "optim": {"lr": 1e-3 if schedule == "sync" else 1e-7},  # elsewhere no two runs learn the same: lengths drift
        "eval": {"items": 0},
        "save": {"every": 2, "model": False, "keep": keep},
        "placement": {"layout": "split"},
    }  # fmt: skip
    if sessions:
        (folder / "chat.jinja").write_text(TEMPLATE)
        config["data"]["chat_template"] = str(folder / "chat.jinja")
        config["environment"] = {"name": "bench.chaos.world:copied"}
        config["sampling"]["max_new_tokens"] = 12
        del config["reward"]
    return config


class FailingPolicy(Policy):
    """It raises once in its update, or takes all memory, if it is told to."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        _obey("policy")
        return super().update(batch)


class FailingGenerator(Generator):
    """It raises once where it begins to draw, or takes all memory, if it is told to."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        _obey("generator")
        return super().generate(prompts, sampling)


def _obey(role: str) -> None:
    path, hoard = Path(os.environ[ORDERS]) / role, list[bytearray]()
    with suppress(FileNotFoundError):
        told = path.read_text()
        path.unlink()
        while told == HOARD and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            hoard.append(bytearray(1 << 20))
        raise RuntimeError(f"the {role} {ON_PURPOSE}")


def train(
    config: Mapping[str, Any], folder: str, temporary: str, backend: str, options: Mapping[str, Any], warm: bool = False
) -> None:
    """Be the controller of a run, in a process of its own. Its error is written to ``errors.jsonl`` in ``folder``, and
    number and start of each worker's process to ``pids``. Temporary files of all processes lie in ``temporary``. With
    ``warm``, fork servers are forks of this process."""
    home = Path(folder)
    output = os.open(home / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()
    clock = home / "clock" / "sitecustomize.py"  # which every interpreter runs that is started below this one
    clock.parent.mkdir(exist_ok=True)
    clock.write_text(_IN_EVERY_INTERPRETER)
    os.environ |= {ORDERS: str(home / "orders"), "TMPDIR": temporary, "PYTHONPATH": str(clock.parent), **RAY}
    tempfile.tempdir = None
    exec(_IN_EVERY_INTERPRETER, {})
    if warm:
        make_spares(PRELOAD)

    order = home / "orders" / "second"

    def note(event: Event) -> None:
        if isinstance(event, WorkerStarted) and (one := process(event.pid)):
            with (home / "pids").open("a", encoding="utf-8") as file:
                file.write(f"{event.role} {event.pid} {one.started}\n")
        if (second := read_pair(home)) is not None:
            second(event)
            if second.struck:
                order.unlink()

    subscribe(note)
    workers = {"policy": FailingPolicy, "generator": FailingGenerator}
    began = time.monotonic()
    try:
        PPOTrainer(
            build_config(GRPOConfig, config), cluster=backend, backend_options=options, workers=workers,
            show=False, report=False,
        ).fit()  # fmt: skip
    except Exception as error:  # noqa: BLE001 - whatever ends the run is what is looked at
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        said = {"type": type(error).__name__, "text": str(error), "after_s": time.monotonic() - began}
        with (home / "errors.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")
        traceback.print_exc()
        sys.exit(1)
