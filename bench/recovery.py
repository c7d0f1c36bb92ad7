"""`python -m bench.recovery`: how long a run stands still after a kill of its script, or of the policy.

    python -m bench.recovery             ten kills of each: two minutes on two idle cores
    python -m bench.recovery --kills 2   a short look
    python -m bench.recovery --report    measure nothing, and write docs/reliability.md from recovery.json

The script is `podium train grpo --resume auto` with the run of bench/chaos, whose steps take a twentieth of a second.
It is started again as soon as it has ended, in a new interpreter, as a cluster's scheduler would. A time goes from
SIGKILL to the end of the first step that began after it. The load before tells whether the machine was idle.
Writes recovery.json beside this file, and the section of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from bench.chaos.leftovers import below
from bench.chaos.training import configuration
from bench.report import machine, put_section

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = Path(__file__).with_suffix(".json")
PAGE: Final = ROOT / "docs" / "reliability.md"
MARK: Final = "<!-- begin: python -m bench.recovery --report -->"
TITLES: Final = {
    "controller": "SIGKILL of the script, which a new interpreter resumes",
    "policy": "SIGKILL of the policy",
}
ENDLESS: Final = 10**6
QUIET_S: Final = (0.1, 1.0)  # between the step after one kill and the next kill
PATIENCE_S: Final = 180.0


class Script:
    """`podium train` in a process of its own, with a run in ``folder``."""

    def __init__(self, folder: Path, schedule: str) -> None:
        rows = ({"prompt": f"{n:03d}=", "answer": f"{n:03d}"} for n in range(500) if n % 100)  # grading never hangs
        (folder / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._config, self._output = folder / "config.yaml", folder / "output"
        self._config.write_text(json.dumps(configuration(folder, "run", schedule, ENDLESS)))
        self._run = folder / "runs" / "run"
        self.start()

    def start(self) -> None:
        """Start it, or resume its run."""
        line = [sys.executable, "-m", "podium", "train", "grpo", "--config", str(self._config), "--resume", "auto"]
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(line, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)

    def step(self) -> int:
        """The last step in the metrics."""
        try:
            with (self._run / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                steps = re.findall(rb'"step": (\d+), "time"', file.read())
        except OSError:
            return 0
        return int(steps[-1]) if steps else 0

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` has ended. Raises RuntimeError with the script's last words if it ends before."""
        until = time.monotonic() + PATIENCE_S
        while self.step() < step:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"there is no step {step}: {self._output.read_text(errors='replace')[-3000:]}")
            time.sleep(0.01)

    def find_policy(self) -> int:
        """The process whose output goes into the policy's log."""
        for pid in below(self.process.pid):
            with suppress(OSError):
                if Path(os.readlink(f"/proc/{pid}/fd/1")).name.startswith("policy"):
                    return pid
        raise RuntimeError(f"no process below {self.process.pid} writes the policy's log")

    def kill(self, role: str) -> float:
        """Kill the controller or the policy. Returns the seconds until the first step that begins afterwards ended."""
        pid = self.process.pid if role == "controller" else self.find_policy()
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if role == "controller":
            self.process.wait()
            self.start()
        self.wait_for_step(self.step() + 2)  # one may have been about to end
        return time.monotonic() - struck

    def end(self) -> None:
        """End the script and its run."""
        self.process.terminate()
        try:
            self.process.wait(60.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure(kills: int, schedule: str, seed: int) -> dict[str, Any]:
    """The seconds of each kill, by what was killed, and the machine."""
    chance, about = random.Random(seed), machine(os.getloadavg()[0])
    seconds: dict[str, list[float]] = {role: [] for role in TITLES}
    with tempfile.TemporaryDirectory(prefix="podium-recovery-") as folder:
        script = Script(Path(folder), schedule)
        try:
            script.wait_for_step(2)
            for _ in range(kills):
                for role, times in seconds.items():
                    time.sleep(chance.uniform(*QUIET_S))
                    times.append(round(script.kill(role), 2))
                    sys.stdout.write(f"{role} {times[-1]:.2f} s\n")
                    sys.stdout.flush()
        finally:
            script.end()
    return {"schedule": schedule, "seconds": seconds, "machine": about}


def section(results: Mapping[str, Any]) -> str:
    """The section of the page."""
    about = results["machine"]
    where = f"{about['cores']} cores ({about['processor']}) with a load of {about['load_before']:.1f} before"
    lines = [
        f"Measured on {where}, {about['when'][:10]}, `{results['schedule']}`, torch {about['libraries']['torch']}.",
        "",
        "| fault | kills | median, s | slowest, s |",
        "|---|---|---|---|",
    ]
    for role, times in results["seconds"].items():
        lines.append(f"| {TITLES[role]} | {len(times)} | {statistics.median(times):.1f} | {max(times):.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="kills of each kind")
    parser.add_argument("--schedule", default="sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="measure nothing: write the page from the last results")
    options = parser.parse_args(arguments)
    if not options.report:
        RESULTS.write_text(json.dumps(measure(options.kills, options.schedule, options.seed), indent=1) + "\n")
    text = section(json.loads(RESULTS.read_text()))
    sys.stdout.write(text + "\n")
    PAGE.write_text(put_section(PAGE.read_text(), text, MARK))
    return 0


if __name__ == "__main__":
    sys.exit(main())
