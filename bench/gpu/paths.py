"""Short trainings of a tiny model on the GPU, one for each way through the trainers: which of them CUDA breaks.

    python -m bench.gpu.paths CASE FOLDER      one training, with its own backend and processes

Most cases are those of :mod:`bench.golden`, whose bits are compared on CPUs. Here each has to end, with finite metrics
and every role on the GPU.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.golden import CASES as GOLDEN, COMMON, GROUPS
from bench.gpu.stage import Stage
from tests.warm_python import NewPopen, run_python

AT_A_TIME: Final = 10
MARKED: Final = (
    "plugins/podium-native/tests/test_native.py",
    "tests/unit/test_devices.py",
    "tests/unit/algorithms/test_devices.py",
)
ROOT: Final = Path(__file__).resolve().parents[2]
REAL_STEPS: Final = 12
PAIRS: Final = {
    **{key: value for key, value in COMMON.items() if key.startswith(("model.", "data.", "optim.", "run."))},
    "batch.examples": 8,
}  # fmt: skip
SPLIT: Final = {**GROUPS, "placement.layout": "split"}
CASES: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    **{name: (recipe, backend, {**COMMON, **changes}) for name, (recipe, backend, changes) in GOLDEN.items()},
    "grpo-one-step-off": ("grpo", "local", {**COMMON, **SPLIT, "run.schedule": "one_step_off"}),
    "grpo-asynchronous": ("grpo", "local", {**COMMON, **SPLIT, "run.schedule": "asynchronous"}),
    "grpo-sharded-offloaded": (
        "grpo",
        "local",
        {**COMMON, **GROUPS, "parallel.strategy": "fsdp2", "parallel.offload": "all"},
    ),
    "grpo-checkpointing-graphs": (
        "grpo",
        "local",
        {
            **COMMON,
            **GROUPS,
            "model.gradient_checkpointing": True,
            "engine.name": "native",
            "engine.options.cuda_graphs": True,
        },
    ),
    "grpo-two-ranks-sharded-split": (
        "grpo",
        "local",
        {**COMMON, **SPLIT, "placement.ranks": 2, "parallel.strategy": "fsdp2"},
    ),
    "grpo-padded": ("grpo", "local", {**COMMON, **GROUPS, "parallel.batching": "padded", "algorithm.loss": "gspo"}),
    "ppo-split": ("ppo", "local", {**COMMON, "batch.prompts": 8, "placement.layout": "split"}),
    "dpo": ("dpo", "local", PAIRS),
    "rm": ("rm", "local", PAIRS),
}


def paths(stage: Stage) -> None:
    """Train each case in a process of its own, a few at a time, and then score and sample from what one has left."""
    names = ("grpo", "rm") if stage.dry else tuple(CASES)
    with tempfile.TemporaryDirectory(prefix="podium-gpu-") as folder, ThreadPoolExecutor(AT_A_TIME) as pool:
        began = time.monotonic()
        ended = {name: pool.submit(_run, ["-m", "bench.gpu.paths", name, folder]) for name in names}
        for name, future in ended.items():
            stage.part(name, lambda name=name, future=future: _check(stage, name, Path(folder), *future.result()))
        stage.figure("trainings", len(names) / (time.monotonic() - began), f"trainings/s, {AT_A_TIME} at a time")
        run = str(Path(folder, "grpo"))
        later = {"eval": ["eval", run, "--eval.items", "6"], "sample": ["sample", run, "--prompt", "12="]}
        ended = {name: pool.submit(_run, ["-m", "podium", *words]) for name, words in later.items()}
        for name, future in ended.items():
            stage.part(name, lambda name=name, future=future: _expect_status(stage, name, *future.result()))


def marked(stage: Stage) -> None:
    """The tests that are marked gpu, which a machine without one skips."""
    if not stage.on_gpu:
        stage.skip("no CUDA device")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *MARKED]
    done = NewPopen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # pytest imports by itself
    output, status = done.communicate()[0], done.returncode
    last = output.strip().splitlines()[-1] if output.strip() else "no output"
    stage.fact("pytest", last)
    if status:
        sys.stdout.write(output[-3000:])
        stage.failures.append(f"pytest ended with status {status}: {last}")


def learns(stage: Stage) -> None:
    """The README's quickstart in its short form: from random weights to numbers that are copied, by GRPO."""
    with tempfile.TemporaryDirectory(prefix="podium-gpu-") as folder:
        began = time.monotonic()
        if stage.dry:
            stage.skip("make smoke shows it on a CPU")
        _expect_status(stage, "quickstart", *_run(["examples/quickstart.py", "--smoke", "--out", f"{folder}/smoke"]))
        stage.figure("seconds", time.monotonic() - began, "s with the start of all processes")
        summary = json.loads(Path(folder, "smoke", "summary.json").read_text())
    before, after = (summary[when]["accuracy"] for when in ("before", "after"))
    stage.figure("accuracy_before", before, "of held-out numbers")
    stage.figure("accuracy_after", after, "of held-out numbers")
    if after - before < 0.5:
        stage.failures.append(f"the accuracy rose from {before:.3f} to {after:.3f} only")


def real(stage: Stage) -> None:
    """SmolLM2-135M-Instruct learns sums by GRPO on the GPU, with all weights and with adapters."""
    model = ROOT / ".cache" / "real" / "model"
    if stage.dry or not model.exists():
        stage.skip("make real shows it on a CPU" if stage.dry else "examples/real/convert.py has not made the model")
    with tempfile.TemporaryDirectory(prefix="podium-gpu-") as folder:
        for way, words in (("full", ()), ("lora", ("--lora",))):
            stage.part(way, lambda way=way, words=words: _learn_sums(stage, way, words, Path(folder, way)))


def _learn_sums(stage: Stage, way: str, words: Sequence[str], out: Path) -> None:
    status, output = _run(["examples/real/train.py", "--steps", str(REAL_STEPS), *words, "--out", str(out)])
    _expect_status(stage, way, status, output)
    summary = json.loads((out / "run" / "summary.json").read_text())
    before, after = (summary[when]["reward_mean"] for when in ("before", "after"))
    stage.figure(f"{way}_seconds", summary["wall_s"], "s with the start of all processes")
    stage.figure(f"{way}_before", before, "of held-out reward")
    stage.figure(f"{way}_after", after, "of held-out reward")
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    for name, unit in (("time/step", "s of the last step"), ("mismatch/mean", "nats, of the last step")):
        values = [row[name] for row in rows if name in row]
        if values:
            stage.figure(f"{way}_{name.rpartition('/')[2]}", values[-1], unit)
    if after - before < 0.25:
        stage.failures.append(f"{way}: the held-out reward rose from {before:.3f} to {after:.3f} only")


def train(name: str, folder: Path) -> int:
    """Train one case in ``folder / name``, and return the status of the command."""
    from podium.cli import main

    recipe, backend, settings = CASES[name]
    data = folder / f"{name}.jsonl"
    texts = [f"{number:02d}" for number in range(60)]
    if recipe in ("dpo", "rm"):
        rows = [{"prompt": f"{text}=", "chosen": text, "rejected": text[::-1] + "0"} for text in texts]
    else:
        rows = [{"prompt": f"{text}=", "answer": text} for text in texts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {**settings, "run.dir": str(folder), "run.name": name, "data.train": str(data)}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return main(["train", recipe, "--backend", backend, *(w if isinstance(w, str) else json.dumps(w) for w in words)])


def _run(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command of this Python in a process whose imports are done; its status, and what it printed."""
    done = run_python(*arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout + done.stderr


def _check(stage: Stage, name: str, folder: Path, status: int, output: str) -> None:
    """Expect that the training has ended, that its metrics are finite, and that no role was on the CPU."""
    _expect_status(stage, name, status, output)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    odd = {key for row in rows for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    if odd:
        raise RuntimeError(f"not finite: {', '.join(sorted(odd))}")
    log = (folder / name / "logs" / "controller.log").read_text() if stage.on_gpu else ""
    placed = [line for line in log.splitlines() if "placement" in line]
    if any(" on cpu" in line for line in placed):
        raise RuntimeError(f"a role is on the CPU, although there is a GPU: {placed[-1]}")


def _expect_status(stage: Stage, name: str, status: int, output: str) -> None:
    if status:
        sys.stdout.write(f"--- {name}\n{output[-12_000:]}\n")
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        raise RuntimeError(f"ended with status {status}: {last[:200]}")
    stage.fact(name, "ended as it should")


if __name__ == "__main__":
    raise SystemExit(train(sys.argv[1], Path(sys.argv[2])))
