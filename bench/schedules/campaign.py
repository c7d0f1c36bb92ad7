"""The runs: a task whose answers differ in length, one warm start, and GRPO from there under each schedule."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.report import machine
from bench.schedules.records import Run, read_run

MAX_STALENESS: Final = 2
_SPLIT: Final = {"layout": "split", "cpus": 1}
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sync_colocated": {"run": {"schedule": "sync"}, "placement": {"ranks": 2, "cpus": 1}},
    "sync": {"run": {"schedule": "sync"}, "placement": _SPLIT},
    "one_step_off": {"run": {"schedule": "one_step_off"}, "placement": _SPLIT},
    "asynchronous": {"run": {"schedule": "asynchronous", "max_staleness": MAX_STALENESS}, "placement": _SPLIT},
}
"""What is compared: each name's settings beside those of all, on the same two processes."""
STEPS: Final = 100
MODEL: Final = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TASK: Final = {"items": 3300, "held_out": 300, "terms_median": 5, "terms_spread": 1.0, "terms_most": 60, "slips": 0.12}
WARM_UP: Final[Mapping[str, Any]] = {
    "run": {"steps": 600, "seed": 0},
    "model": {"config": MODEL, "tokenizer": "chars:0123456789 :", "seed": 0},
    "sampling": {"max_new_tokens": 184},
    "optim": {"lr": 2e-3, "warmup_steps": 30},
    "batch": {"examples": 64},
    "placement": {"ranks": 2, "cpus": 1},
    "eval": {"items": 200, "every": 50, "temperature": 1.0, "at_start": False},
    "save": {"every": 100, "minutes": 0.0},
}
GRPO: Final[Mapping[str, Any]] = {
    "reward": {"name": "exact", "processes": 1},
    "sampling": {"max_new_tokens": 184, "n": 8},
    "optim": {"lr": 1e-4},
    "batch": {"prompts": 8},
    "eval": {"items": 300, "every": 10, "temperature": 1.0},
    "save": {"model": False, "minutes": 0.0},
}


class Campaign:
    """Runs in ``folder``, whose figures go to the file ``results`` as they come. What is there is not run again."""

    def __init__(self, folder: Path, results: Path, steps: int, say: Callable[[str], None]) -> None:
        self.folder, self.results, self.steps, self.say = folder.absolute(), results, steps, say
        self.settings = {"steps": steps, "arms": ARMS, "task": TASK, "warm_up": WARM_UP, "grpo": GRPO}

    def run(self, arms: Sequence[str], seeds: int) -> None:
        """Make the runs that are missing, a seed after the other, and the schedules in turns.

        Raises:
            SystemExit: The results are those of other settings, or a run failed.
        """
        kept = read_results(self.results)
        if kept["runs"] and kept["settings"] != json.loads(json.dumps(self.settings)):
            raise SystemExit(f"{self.results} is of other settings: remove it, or name another file with --results")
        done = {(run["arm"], run["seed"]) for run in kept["runs"]}
        for seed in range(seeds):
            turn = seed % len(arms)  # whatever the machine does over the hour, no schedule is always the first
            for arm in (*arms[turn:], *arms[:turn]):
                if (arm, seed) in done:
                    continue
                if not kept["runs"]:
                    kept |= {"settings": self.settings, "machine": machine(os.getloadavg()[0])}
                run = self._train(arm, seed)
                kept["runs"].append(run.as_json())
                write_results(self.results, kept)
                last = run.points[-1]
                self.say(
                    f"{arm} {seed}: accuracy {run.points[0].accuracy:.2f} to {last.accuracy:.2f} in "
                    f"{last.seconds:.0f} s; others took {run.others_cpu:.0%} of the processors"
                )

    def _train(self, arm: str, seed: int) -> Run:
        model = self._warm_up()
        name = f"{arm}-{seed}"
        shutil.rmtree(self.folder / name, ignore_errors=True)  # a run that was interrupted begins anew
        run = {"dir": str(self.folder), "name": name, "seed": seed, "steps": self.steps}
        config: dict[str, Any] = {
            **GRPO,
            **ARMS[arm],
            "run": {**run, **ARMS[arm]["run"]},
            "model": {"path": str(model)},
            "data": {"train": str(self.folder / "train.jsonl"), "eval": str(self.folder / "held_out.jsonl")},
        }
        self.say(f"{arm} {seed}: {self.steps} steps of GRPO")
        others = self._podium("grpo", config)
        rows = GRPO["batch"]["prompts"] * GRPO["sampling"]["n"]
        found = read_run(self.folder / name, arm, seed, rows, others)
        if found.points[-1].step != self.steps:
            raise SystemExit(f"{name} was stopped after step {found.points[-1].step}")
        return found

    def _warm_up(self) -> Path:
        """The model from which all runs start. It is trained once, and trained again if its settings change."""
        note = self.folder / "warm_up.json"
        settings = json.dumps({"task": TASK, "warm_up": WARM_UP})
        model = self.folder / "warm_up" / "model"
        if not note.exists() or note.read_text() != settings:
            shutil.rmtree(self.folder / "warm_up", ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_data(self.folder)
            note.write_text(settings)
        if not model.exists():
            self.say(f"warm-up: {WARM_UP['run']['steps']} steps of supervised fine-tuning, once")
            config = {
                **WARM_UP,
                "run": {**WARM_UP["run"], "dir": str(self.folder), "name": "warm_up", "resume": "auto"},
                "data": {
                    "train": str(self.folder / "demonstrations.jsonl"),
                    "eval": str(self.folder / "held_out.jsonl"),
                },
            }
            self._podium("sft", config)
        return model

    def _podium(self, recipe: str, config: Mapping[str, Any]) -> float:
        """Run the command that users run. Returns the share of the processors that other processes took meanwhile."""
        name = config["run"]["name"]
        path, log = self.folder / f"{name}.yaml", self.folder / f"{name}.log"
        path.write_text(json.dumps(config, indent=1))  # JSON is YAML
        words = [sys.executable, "-m", "podium", "train", recipe, "--config", str(path)]
        before, began = _processor_s(), time.monotonic()
        with log.open("wb") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            status = subprocess.run(words, stdout=file, stderr=file, env=environment, check=False).returncode
        if status:
            raise SystemExit(f"{name} ended with status {status}: see {log}")
        all_s, own_s = (now - then for now, then in zip(_processor_s(), before, strict=True))
        return max(0.0, all_s - own_s) / ((time.monotonic() - began) * (os.cpu_count() or 1))


def _processor_s() -> tuple[float, float]:
    """Seconds of processor time so far: of the whole machine, and of the child processes that have ended."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = ticks
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy / os.sysconf("SC_CLK_TCK"), used.ru_utime + used.ru_stime


def problems(count: int, seed: int = 0) -> dict[str, list[int]]:
    """Prompts with the numbers to write: ``"12 7 40:"`` asks for 19, 26, 33 and 40.

    The number of terms is log-normal, so that a few answers are far longer than the others.
    """
    chance, found = random.Random(seed), dict[str, list[int]]()
    while len(found) < count:
        drawn = chance.lognormvariate(math.log(TASK["terms_median"]), TASK["terms_spread"])
        terms = min(int(TASK["terms_most"]), max(1, round(drawn)))
        by = chance.randint(1, min(9, 89 // terms))
        first = chance.randint(10, 99 - by * terms)
        found[f"{first} {by} {first + by * terms}:"] = [first + by * number for number in range(1, terms + 1)]
    return found


def write_data(folder: Path) -> None:
    """Write the held-out problems, the training problems, and demonstrations of the latter with slips."""
    found = list(problems(int(TASK["items"])).items())
    held_out, train = found[: int(TASK["held_out"])], found[int(TASK["held_out"]) :]
    chance = random.Random(1)

    def slip(number: int) -> int:
        return min(99, number + chance.choice((-10, -1, 1, 10))) if chance.random() < TASK["slips"] else number

    for name, rows in (
        ("held_out", held_out),
        ("train", train),
        ("demonstrations", [(prompt, [slip(number) for number in answer]) for prompt, answer in train]),
    ):
        lines = (json.dumps({"prompt": prompt, "answer": " ".join(map(str, answer))}) for prompt, answer in rows)
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))


def read_results(path: Path) -> dict[str, Any]:
    """The settings, the machine and the runs; without runs if the file is not there."""
    return json.loads(path.read_text()) if path.exists() else {"settings": {}, "machine": {}, "runs": []}


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write with one line a run, so that a difference is read easily."""
    head = json.dumps({name: value for name, value in results.items() if name != "runs"}, indent=1)
    runs = ",\n".join("  " + json.dumps(run) for run in results["runs"])
    path.write_text(f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n')
