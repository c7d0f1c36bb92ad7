"""What is kept of a run, and how it is read from the run's directory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.measure import covered
from podium.telemetry import metrics as names


@dataclass(frozen=True, kw_only=True)
class Point:
    """A held-out evaluation, ``seconds`` after the one before the first step."""

    step: int
    seconds: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. Shares are in 0..1; staleness is in updates; times of a step's parts are medians over the steps."""

    arm: str
    seed: int
    points: tuple[Point, ...]
    step_s: float
    generate_s: float
    update_s: float
    sampled_tokens_per_s: float
    generator_busy: float
    policy_busy: float
    staleness_mean: float
    staleness_max: int
    weights_capped: float
    others_cpu: float

    def as_json(self) -> dict[str, Any]:
        """Evaluations as lists of step, seconds and accuracy; numbers with as many digits as are read."""
        values = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}
        points = [[point.step, round(point.seconds, 2), round(point.accuracy, 4)] for point in self.points]
        return {**values, "points": points}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Run:
        points = (Point(step=step, seconds=seconds, accuracy=share) for step, seconds, share in values["points"])
        return cls(**{**values, "points": tuple(points)})


def read_run(folder: Path, arm: str, seed: int, rows: int, others_cpu: float) -> Run:
    """Read a finished run from its directory; a step has ``rows`` completions."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    steps = [line for line in lines if line["kind"] == "step"]
    began = evaluations[0]["time"]
    points = tuple(
        Point(step=line["step"], seconds=line["time"] - began, accuracy=line["accuracy"]) for line in evaluations
    )
    ages = list(staleness(folder / "ledger.jsonl"))
    busy = read_busy(folder / "trace.json", ("generator", "policy"))

    def median(name: str) -> float:
        return statistics.median(line[name] for line in steps)

    return Run(
        arm=arm,
        seed=seed,
        points=points,
        step_s=median(names.STEP_S),
        generate_s=median(names.TIME_PREFIX + "generate"),
        update_s=median(names.TIME_PREFIX + "update"),
        sampled_tokens_per_s=rows * sum(line[names.LENGTH_MEAN] for line in steps) / points[-1].seconds,
        generator_busy=busy["generator"],
        policy_busy=busy["policy"],
        staleness_mean=statistics.fmean(ages),
        staleness_max=max(ages),
        weights_capped=statistics.fmean(line.get("mismatch/weight_capped", 0.0) for line in steps),
        others_cpu=others_cpu,
    )


def staleness(ledger: Path) -> Iterable[int]:
    """For each prompt, the number of updates by which the weights of its oldest token were behind."""
    for line in map(json.loads, ledger.read_text().splitlines()):
        if line.get("state") == "rolled_out":
            yield from (line["step"] - 1 - oldest for oldest, _ in line["versions"])


def read_busy(trace: Path, roles: Sequence[str]) -> dict[str, float]:
    """The share of the time from the first stage to the last in which a process with each role ran a call."""
    text = trace.read_text().rstrip().rstrip("]").rstrip().rstrip(",")
    events = [event for event in json.loads(text + "]") if event]
    processes = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
    slices = [event for event in events if event["ph"] == "X"]
    stages = [event for event in slices if event["pid"] == processes["controller"] and "step" in event.get("args", {})]
    began, ended = min(event["ts"] for event in stages), max(event["ts"] + event["dur"] for event in stages)
    shares: dict[str, float] = {}
    for role in roles:
        pids = {pid for process, pid in processes.items() if role in process.split("+")}
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in slices if event["pid"] in pids]
        shares[role] = covered(spans, began, ended) / (ended - began)
    return shares
