"""`python -m bench.chaos`: runs that lose processes at random moments, in every schedule; what became of each prompt.

A small GRPO run trains on a copy task while a killer sends SIGKILL to its controller, its policy, its generator, or to
the controller in the middle of a save, and stops workers for a while. The moments and the victims follow from a seed.
A killed controller is started again with `--resume auto`, as a cluster's scheduler would. Then the books are checked:

    every prompt was trained exactly once, and in the order of the data
    no token is older than the schedule allows
    with `sync`, losses and completions are those of an undisturbed run, to the bit
    the lengths that trained are those of the undisturbed run (Kolmogorov-Smirnov, where the schedule reorders time)
    no process and no shared memory is left

One line a run is printed, with the number of faults and the longest time from a fault to the next finished step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from podium.supervisor import children_of
from podium.telemetry import Event, WorkerStarted, subscribe
from podium.trainer import GRPOConfig, PPOTrainer, load_config
from podium.trainer.ledger import read_ledger

SCHEDULES = ("sync", "one_step_off", "asynchronous")
FAULTS = ("controller", "policy", "generator", "save", "pause")
PROMPTS = 4
MODEL = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
QUIET_S = (0.3, 2.5)  # between the step after one fault and the next fault
PAUSE_S = 0.7
PATIENCE_S = 180.0  # for a run to finish its next step
ODDS = 0.001  # the largest p-value at which lengths count as other lengths


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=5, help="faults of each kind, in each schedule")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=3, metavar=("CONFIG", "PIDS", "BACKEND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return _train(*options.train)
    failed = 0
    for schedule in options.schedules:
        with tempfile.TemporaryDirectory(prefix="podium-chaos-") as folder:
            chaos = Chaos(Path(folder), schedule, options.backend, options.faults, options.kills, options.seed)
            found = chaos.run()
        failed += bool(found["wrong"])
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    return min(failed, 1)


def _train(config: str, pids: str, backend: str) -> int:
    """The controller: a run that notes the processes of its workers."""

    def note(event: Event) -> None:
        if isinstance(event, WorkerStarted):
            with open(pids, "a", encoding="utf-8") as file:
                file.write(f"{event.role} {event.pid}\n")

    subscribe(note)
    PPOTrainer(load_config(GRPOConfig, config), cluster=backend, show=False, report=False).fit()
    return 0


class Chaos:
    """One run under faults, and its undisturbed twin, in ``folder``."""

    def __init__(self, folder: Path, schedule: str, backend: str, faults: Sequence[str], kills: int, seed: int) -> None:
        self.folder, self.schedule, self.backend = folder, schedule, backend
        self.random = random.Random(f"{seed}/{schedule}")
        self.plan = [fault for fault in faults for _ in range(kills)]
        self.random.shuffle(self.plan)
        self.steps = 10 + 30 * len(self.plan)
        self.resumed = 0
        self.ever: set[int] = set()

    def run(self) -> dict[str, Any]:
        before = _segments()
        began = time.monotonic()
        slowest, done = self._disturb("disturbed")
        seconds = time.monotonic() - began
        self._finish("undisturbed")
        left = sorted(pid for pid in self.ever if _alive(pid))
        wrong = self._wrong() + [f"process {pid} is left" for pid in left]
        wrong += [f"{name} is left in shared memory" for name in sorted(_segments() - before)]
        return {
            "schedule": self.schedule, "backend": self.backend, "faults": dict(Counter(done)), "steps": self.steps,
            "controllers_started": self.resumed, "seconds": round(seconds, 1), "slowest_recovery_s": round(slowest, 1),
            "wrong": wrong,
        }  # fmt: skip

    def _disturb(self, name: str) -> tuple[float, list[str]]:
        controller, slowest, done = self._start(name), 0.0, list[str]()
        plan = list(self.plan)
        while plan and controller.poll() is None:
            self._wait_for_step(name, controller, self._step(name) + 1)
            time.sleep(self.random.uniform(*QUIET_S) if plan[0] != "save" else 0.0)
            fault, step = plan.pop(0), self._step(name)
            if controller.poll() is not None or not self._strike(name, fault, controller):
                break
            done.append(fault)
            struck = time.monotonic()
            if fault in ("controller", "save"):
                controller.wait()
                controller = self._start(name)
            self._wait_for_step(name, controller, step + 1)
            slowest = max(slowest, time.monotonic() - struck)
        if controller.wait() != 0:
            raise SystemExit(f"{self.schedule}: the run failed: {(self.folder / 'errors').read_text()[-3000:]}")
        return slowest, done

    def _finish(self, name: str) -> None:
        if self._start(name).wait() != 0:
            raise SystemExit(f"{name}: {(self.folder / 'errors').read_text()[-3000:]}")

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        path = self.folder / f"{name}.json"  # JSON is YAML
        path.write_text(json.dumps(self._config(name)))
        self.resumed += name == "disturbed"
        words = [sys.executable, "-m", "bench.chaos", "--train", str(path), str(self._pids(name)), self.backend]
        with (self.folder / "errors").open("ab") as errors:
            process = subprocess.Popen(words, stdout=errors, stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.ever.add(process.pid)
        return process

    def _config(self, name: str) -> dict[str, Any]:
        data = self.folder / "copy.jsonl"
        if not data.exists():
            rows = ({"prompt": f"{n:03d}=", "answer": f"{n:03d}"} for n in range(500))
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {
            "run": {"dir": str(self.folder), "name": name, "steps": self.steps, "schedule": self.schedule,
                    "resume": "auto", "max_restarts": 1000},
            "model": {"config": MODEL, "tokenizer": "chars:0123456789= "},
            "data": {"train": str(data), "holdout": 0.1},
            "reward": {"name": "fraction", "processes": 1},
            "batch": {"prompts": PROMPTS},
            "sampling": {"n": 4, "max_new_tokens": 24},
            "optim": {"lr": 1e-3},
            "eval": {"items": 0},
            "save": {"every": 2, "model": False},
            "placement": {"layout": "split"},
        }  # fmt: skip

    def _strike(self, name: str, fault: str, controller: subprocess.Popen[bytes]) -> bool:
        """Do harm. Returns False if the run has ended before."""
        if fault == "save":
            until = time.monotonic() + PATIENCE_S
            while not list((self.folder / name / "checkpoints").glob(".step-*.tmp")):
                if controller.poll() is not None or time.monotonic() > until:
                    return False
                time.sleep(0.0005)
        self.ever.update(_below(controller.pid))
        if fault in ("controller", "save"):
            controller.kill()
            return True
        role = self.random.choice(("policy", "generator")) if fault == "pause" else fault
        pid = self._worker(name, role)
        try:
            os.kill(pid, signal.SIGSTOP if fault == "pause" else signal.SIGKILL)
            if fault == "pause":
                time.sleep(PAUSE_S)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return controller.poll() is None
        return True

    def _worker(self, name: str, role: str) -> int:
        """The newest process that holds ``role``."""
        lines = [line.split() for line in self._pids(name).read_text().splitlines()]
        return next(int(pid) for names, pid in reversed(lines) if role in names.split("+"))

    def _pids(self, name: str) -> Path:
        return self.folder / f"{name}.pids"

    def _step(self, name: str) -> int:
        """The last step in the metrics, which a resume takes back to the latest checkpoint."""
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        steps = [json.loads(line)["step"] for line in lines if line.endswith(b"}")]
        return max(steps, default=0)

    def _wait_for_step(self, name: str, controller: subprocess.Popen[bytes], step: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while self._step(name) < min(step, self.steps) and controller.poll() is None:
            if time.monotonic() > until:
                raise SystemExit(f"{self.schedule}: no step {step} within {PATIENCE_S:g} s")
            time.sleep(0.02)

    def _wrong(self) -> list[str]:
        """What is not as it should be."""
        wrong: list[str] = []
        runs = [self.folder / name for name in ("undisturbed", "disturbed")]
        whole = {"trained": PROMPTS * self.steps}
        for run in runs:
            if (counts := read_ledger(run / "ledger.jsonl").counts()) != whole:
                wrong.append(f"{run.name}: prompts are {counts}, not {whole}")
        bound = {"sync": 0, "one_step_off": 1, "asynchronous": 2}[self.schedule]
        for line in map(json.loads, (runs[1] / "ledger.jsonl").read_text().splitlines()):
            if line.get("state") == "rolled_out":
                late = line["step"] - 1 - min(low for low, _ in line["versions"])
                if late > bound:
                    wrong.append(f"step {line['step']} has a token that is {late} versions old; allowed are {bound}")
        first, second = (_completions(run) for run in runs)
        if [row["prompt"] for row in first] != [row["prompt"] for row in second]:
            wrong.append("the prompts that trained are others, or in another order")
        if self.schedule == "sync" and first != second:
            wrong.append("the completions are not those of the undisturbed run")
        lengths = [[len(row["tokens"]) for row in rows] for rows in (first, second)]
        if (chance := _same_lengths(*lengths)) < ODDS:
            wrong.append(f"the lengths that trained are other lengths (p = {chance:.2g})")
        return wrong


def _completions(run: Path) -> list[dict[str, Any]]:
    columns = ["step", "prompt", "completion", "tokens", "reward", "advantage", "version"]
    files = sorted((run / "completions").glob("step-*.parquet"))
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]


def _same_lengths(first: Sequence[int], second: Sequence[int]) -> float:
    """The p-value of the two-sample Kolmogorov-Smirnov test, by its asymptotic series."""
    values = sorted({*first, *second})
    shares = [
        [sum(length <= value for length in lengths) / len(lengths) for value in values] for lengths in (first, second)
    ]
    distance = max(abs(one - other) for one, other in zip(*shares, strict=True))
    scaled = distance * math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    if scaled < 0.2:
        return 1.0
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)))


def _below(pid: int) -> list[int]:
    """All processes that ``pid`` started, and that those started."""
    children = children_of(pid)
    return children + [further for child in children for further in _below(child)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _segments() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if "podium" in entry.name}


if __name__ == "__main__":
    sys.exit(main())
