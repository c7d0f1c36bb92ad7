"""`python -m bench.stops`: how soon a run ends after a second signal, whatever it does at that moment.

A small GRPO run gets stuck in one of its stages: in C for hours, as a large model on a slow machine is for minutes, or
in code of the user's that never returns. It gets a signal, says that it finishes its step, and gets the second one.
One JSON line a row: the seconds from the second signal to the end of the script, those until none of its processes is
left, its exit status, what it printed after the signals, and what is left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.chaos.leftovers import Process, below, leftovers, process, segments
from bench.chaos.training import MODEL, RAY, TEMPLATE
from podium.data import Batch
from podium.rollout.sampling import SamplingParams
from podium.runtime import concat, endpoint, first, shard
from podium.trainer import GRPOConfig, PPOTrainer, build_config
from podium.workers import Generator, Policy

__all__ = ["STAGES", "StuckRun", "train"]

STAGES: Final = ("start", "evaluate", "generate", "reward", "sessions", "update", "publish", "save")
"""Where the run gets stuck. A run that is stuck in "start" ends with the first signal."""
BUSY: Final = "PODIUM_STOPS_BUSY"
STAGE: Final = "PODIUM_STOPS_STAGE"
LONG_S: Final = 120.0  # for a run to get stuck, on a machine with other work
GONE_S: Final = 60.0
KEPT_FILES: Final = (".id", ".lock", ".tracker_id")  # hidden files of a run, which is the same run when it is resumed


def be_stuck(stage: str) -> None:
    """Compute in C for hours, without the interpreter's lock, if the run is to be stuck in ``stage``."""
    if os.environ[STAGE] == stage:
        Path(os.environ[BUSY]).touch()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


class StuckPolicy(Policy):
    """It may get stuck where it is made, in its update, and where it writes a checkpoint."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        be_stuck("start")
        super().__init__(*arguments, **settings)

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        be_stuck("update")
        return super().update(batch)

    @endpoint(concurrent=True)
    def write_state(self, path: str) -> dict[str, Any]:
        (Path(path) / "half").mkdir(parents=True)
        be_stuck("save")
        return super().write_state(path)


class StuckGenerator(Generator):
    """It may get stuck where it draws, and where it gets new weights."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        be_stuck("generate" if sampling.n > 1 else "evaluate")
        return super().generate(prompts, sampling)

    @endpoint()
    def refresh(self, version: int) -> int:
        if version:
            be_stuck("publish")
        return super().refresh(version)


def never_score(completion: str, row: dict[str, Any]) -> float:
    """A reward that spins."""
    Path(os.environ[BUSY]).touch()
    while True:
        pass


def block() -> None:
    """Wait for ever."""
    Path(os.environ[BUSY]).touch()
    threading.Event().wait()


async def never_end(task: Any, client: Any) -> float:
    """A session that blocks the loop of all sessions."""
    await client.chat([{"role": "user", "content": "1="}])
    block()
    return 0.0


def configuration(folder: Path, stage: str) -> dict[str, Any]:
    """The configuration of a run that saves after each step."""
    data = folder / "copy.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n:02d}=", "answer": f"{n:02d}"}) + "\n" for n in range(60)))
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "name": "run", "steps": 1000},
        "model": {"config": MODEL, "tokenizer": "chars:0123456789= "},
        "data": {"train": str(data), "holdout": 0.2},
        "reward": {"name": "fraction", "processes": 1, "time_limit_s": 3600.0},
        "batch": {"prompts": 2},
        "sampling": {"n": 2, "max_new_tokens": 3},
        "eval": {"items": 4 if stage == "evaluate" else 0, "at_start": False, "every": 1},
        "save": {"every": 1, "model": False},
        "placement": {"cpus": 1},
    }
    if stage == "reward":
        values["reward"]["name"] = "bench.stops:never_score"
    if stage == "sessions":
        (folder / "chat.jinja").write_text(TEMPLATE)
        values["data"]["chat_template"] = str(folder / "chat.jinja")
        values["environment"] = {"name": "bench.stops:never_end"}
    return values


def train(folder: str, backend: str, stage: str) -> None:
    """Be the script of a run that gets stuck in ``stage``."""
    tempfile.tempdir = None  # a process that was forked may know another directory
    config = build_config(GRPOConfig, configuration(Path(folder), stage))
    PPOTrainer(config, cluster=backend, workers={"policy": StuckPolicy, "generator": StuckGenerator}).fit()


class StuckRun:
    """A script that runs :func:`train` in a session of its own, as in a terminal.

    Args:
        folder: An empty directory for the run and its temporary files.
        start: Starts a process, as ``subprocess.Popen`` does.

    Attributes:
        processes: All processes of the run when it is stuck.
    """

    def __init__(
        self, folder: Path, backend: str, stage: str, start: Callable[..., subprocess.Popen[str]] = subprocess.Popen
    ) -> None:
        self.folder, self.stage = folder, stage
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._segments = segments()
        busy, root = folder / "busy", str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        variables = {BUSY: str(busy), STAGE: stage, "TMPDIR": str(self.temporary), "PYTHONPATH": path, **RAY}
        code = f"import sys; sys.path.insert(0, {root!r}); from bench.stops import train; train(*sys.argv[1:])"
        with (folder / "output").open("w") as output:
            self.process = start(
                [sys.executable, "-c", code, str(folder), backend, stage], stdout=output, stderr=output, text=True,
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip
        self.processes: list[Process] = []
        self._wait_for(busy.exists, "it does not get stuck")
        members = [self.process.pid, *below(self.process.pid)]
        self.processes = [member for pid in members if (member := process(pid)) is not None]

    @property
    def output(self) -> str:
        """What the script and the terminal's other writers have printed so far."""
        return (self.folder / "output").read_text()

    def ask(self, number: signal.Signals) -> None:
        """Send the first signal, and wait until the run says that it has heard it."""
        os.killpg(self.process.pid, number)
        self._wait_for(lambda: "a second signal ends it now" in self.output, "it does not hear the signal")

    def end(self, number: signal.Signals) -> float:
        """Send the second signal. Returns the seconds until the script has ended."""
        began = time.monotonic()
        os.killpg(self.process.pid, number)
        self.process.wait(GONE_S)
        return time.monotonic() - began

    def find_leftovers(self, within_s: float = GONE_S) -> list[str]:
        """Say what is left of the run."""
        left = leftovers(self.processes, self.temporary, self._segments, within_s)
        run = self.folder / "runs" / "run"
        return left + [f"{path} is left" for path in run.rglob(".*") if path.name not in KEPT_FILES]

    def kill(self) -> None:
        """End the run in any case."""
        self.process.kill()
        self.process.wait()

    def _wait_for(self, condition: Callable[[], bool], problem: str) -> None:
        until = time.monotonic() + LONG_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise AssertionError(f"{self.stage}: {problem}\n{self.output}")
            time.sleep(0.01)


def measure(backend: str, stage: str, number: signal.Signals) -> dict[str, Any]:
    """One row."""
    with tempfile.TemporaryDirectory(prefix="p-") as folder:  # Ray's sockets take short paths
        run = StuckRun(Path(folder), backend, stage)
        try:
            if stage != "start":
                run.ask(number)
            before = run.output
            seconds = run.end(number)
            ended = time.monotonic()
            left = run.find_leftovers()
            gone_s = seconds + time.monotonic() - ended
        finally:
            run.kill()
        lines = run.output[len(before) :].splitlines()
        row = {"backend": backend, "stage": stage, "signal": number.name, "end_s": round(seconds, 2)}
        return row | {"gone_s": round(gone_s, 2), "status": run.process.returncode, "printed": lines, "left": left}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stops", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--backends", nargs="+", default=("local", "inline"))
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--signal", default="SIGINT", choices=("SIGINT", "SIGTERM"))
    options = parser.parse_args(arguments)
    for backend in options.backends:
        for stage in options.stages:
            row = measure(backend, stage, signal.Signals[options.signal])
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
