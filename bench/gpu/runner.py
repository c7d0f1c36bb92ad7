"""Runs the stages one after the other, each in a process of its own, within its budget and the whole run's limit.

    for each stage:   does its budget fit into what is left? --no--> skipped, and says so
                      yes: start `bench.gpu.stage`, wait for it at most its budget, end its processes
                      write all results anew, whole, before the next stage begins

A stage's process is a fork of a server that has imported torch, transformers and Podium, which takes 15 s where a
disk is slow. A crash, a hang or a CUDA error of a stage ends that stage. A run that is killed keeps the results of what
it ran, and the predictions of what it did not, because predictions are written before the first stage begins.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from bench.gpu.stage import write_whole

ROOT = Path(__file__).resolve().parents[2]
TAIL = 20_000  # characters of a failed stage's output that the results keep
Popen: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]
SETTLE_S = 3.0  # worker processes of a stage that was killed end within two seconds, and give back the GPU's memory


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a figure was expected to be before it was first measured, and from what that follows.

    Attributes:
        low, high: The figure is expected between these two.
    """

    figure: str
    low: float
    high: float
    unit: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A stage of the run.

    Attributes:
        what: What the stage shows, as a sentence.
        budget_s: The stage is killed after so many seconds, and skipped where fewer are left.
        least_s: The stage begins where so many seconds are left; by default the budget. A stage that the whole run's
            limit stops counts as skipped.
        function: ``module:function`` that takes a :class:`bench.gpu.stage.Stage`.
    """

    name: str
    what: str
    budget_s: float
    function: str
    least_s: float | None = None
    predictions: tuple[Prediction, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "status": "planned"}


def run(
    stages: Sequence[Planned],
    out: Path,
    *,
    limit_s: float,
    dry: bool,
    say: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
    settle_s: float = SETTLE_S,
    popen: Popen = subprocess.Popen,
) -> list[dict[str, Any]]:
    """Run the stages and return their results, which ``out`` has too, with the predictions, after each stage.

    Args:
        popen: Starts the process of a stage, as :class:`subprocess.Popen` does.
    """
    until = time.monotonic() + limit_s
    out.parent.mkdir(parents=True, exist_ok=True)
    results = [stage.as_json() for stage in stages]
    book: dict[str, Any] = {"dry": dry, "began": datetime.now(UTC).isoformat(timespec="seconds")}
    book |= {"commit": _commit(), "limit_s": limit_s, "stages": results}
    write_whole(out, book)
    for number, (stage, result) in enumerate(zip(stages, results, strict=True), 1):
        say(f"[{number}/{len(stages)}] {stage.name} (at most {stage.budget_s:.0f} s): {stage.what}")
        left = until - time.monotonic()
        least_s = stage.budget_s if stage.least_s is None else stage.least_s
        if left < least_s:
            result |= {
                "status": "skipped",
                "message": f"it may take {least_s:.0f} s, and {max(left, 0):.0f} s are left",
            }
        else:
            time_s = min(stage.budget_s, left)
            result |= _run_one(stage, time_s, popen, dry=dry, environment={**os.environ, **(environment or {})})
            if result["status"] == "timeout" or "by SIG" in result["message"]:
                time.sleep(settle_s)
        result["verdicts"] = [] if dry else verdicts(stage.predictions, result.get("figures", {}))
        write_whole(out, book)
        for line in _lines(result):
            say(f"    {line}")
    return results


def verdicts(predictions: Sequence[Prediction], figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say of each prediction whether the figure is as predicted."""
    said: list[str] = []
    for one in predictions:
        found = figures.get(one.figure)
        how = "not measured" if found is None else f"{found['value']:g}, {judge(one, found['value'])}"
        said.append(f"{one.figure}: predicted {one.low:g} to {one.high:g} {one.unit}; {how}")
    return said


def judge(prediction: Prediction, value: float) -> str:
    """Whether ``value`` is as predicted."""
    if prediction.low <= value <= prediction.high:
        return "as predicted"
    return "lower than predicted" if value < prediction.low else "higher than predicted"


def _run_one(
    stage: Planned, time_s: float, popen: Popen, *, dry: bool, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run one stage in a session of its own; its status, figures, seconds and, where it failed, its last output."""
    with tempfile.TemporaryDirectory(prefix="podium-gpu-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "bench.gpu.stage", stage.function, str(result), f"--seconds={time_s}"]
        command += ["--dry"] if dry else []
        began = time.monotonic()
        with log.open("w") as file:
            process = popen(
                command, cwd=ROOT, env=dict(environment), stdin=subprocess.PIPE, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(time_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        seconds = round(time.monotonic() - began, 2)
        found = json.loads(result.read_text()) if result.exists() else {}
        found.pop("failures", None)
        status = found.get("status", "failed")
        if code is None and time_s < stage.budget_s:
            found |= {"status": "skipped", "message": f"the run's limit came after {time_s:.0f} s of it"}
        elif code is None:
            found |= {"status": "timeout", "message": f"it was stopped after {time_s:.0f} s"}
        elif "status" not in found:
            found |= {"status": "failed", "message": _ended(code)}
        if status == "failed" or code is None:
            found["log"] = log.read_text(errors="replace")[-TAIL:]
        return {**found, "seconds": seconds}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the stage's whole session, and its input."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _ended(code: int) -> str:
    return f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with code {code}"


def _lines(result: Mapping[str, Any]) -> list[str]:
    """What the terminal shows of a stage."""
    took = f" in {result['seconds']:.1f} s" if "seconds" in result else ""
    lines = [f"{result['status']}{took}" + (f": {result['message']}" if result.get("message") else "")]
    lines += [f"{name}: {text}" for name, text in result.get("facts", {}).items()]
    lines += [f"{name}: {one['value']:g} {one['unit']}" for name, one in result.get("figures", {}).items()]
    lines += [f"{name} skipped: {reason}" for name, reason in result.get("skipped", {}).items()]
    return lines + list(result.get("verdicts", ()))


def _commit() -> str:
    """The commit of the working tree; "unknown" where it is no checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
