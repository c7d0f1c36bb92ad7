"""`python -m bench.gpu`: prove Podium on one GPU, and measure it there, in at most 21 minutes.

    make gpu                          on a machine with a GPU, in .venv
    make gpu ARGS=--dry               all stages on a CPU with tiny shapes: their code runs
    make gpu GPU_PYTHON=python3 ARGS="--wheels .gpu-wheels"    in that Python, with packages that make gpu-wheels packed
    python -m bench.gpu --report      write docs/gpu.md from the results

Each stage runs in a process of its own, within its budget, and the results are written after each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.gpu.plan import STAGES
from bench.gpu.runner import ROOT, run
from bench.gpu.stage import write_whole
from tests.warm_python import Server, WarmPopen

RESULTS = ROOT / "bench" / "gpu" / "results.json"
DRY_RESULTS = ROOT / "runs" / "gpu" / "dry.json"
SOME_RESULTS = ROOT / "runs" / "gpu" / "some.json"
PAGE = ROOT / "docs" / "gpu.md"
LIMIT_S, DRY_LIMIT_S = 1260.0, 240.0
DRY_BUDGET_S, DRY_LEAST_S = 120.0, 15.0  # of each stage of a dry run: a busy processor is slow, and proves no less


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.report is not None:
        return report(options.report)
    unknown = [name for name in options.only or () if name not in {stage.name for stage in STAGES}]
    if unknown:
        say(f"no stage {', '.join(unknown)}; there are {', '.join(stage.name for stage in STAGES)}")
        return 2
    chosen = [stage for stage in STAGES if not options.only or stage.name in options.only]
    if options.dry:
        chosen = [replace(stage, budget_s=DRY_BUDGET_S, least_s=DRY_LEAST_S) for stage in chosen]
    out = place_of(options)
    limit_s = options.limit_s or (DRY_LIMIT_S if options.dry else LIMIT_S)
    with wheels(options.wheels) as site:
        sources = [ROOT / "src", *sorted(ROOT.glob("plugins/*/src"))]
        paths = [*map(str, sources), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if options.dry:
            environment["OMP_NUM_THREADS"] = "1"  # tiny shapes; threads of several processes would wait for one another
        WarmPopen.server = Server.launch(environment["PYTHONPATH"], warnings_end=False)
        results = run(
            chosen, out, limit_s=limit_s, dry=options.dry, say=say, environment=environment, popen=WarmPopen
        )  # fmt: skip
    for result in results:
        say(f"{result['status']:8} {result['name']:12} {result.get('message', '')}")
    say(f"written to {out}")
    return int(any(result["status"] in ("failed", "timeout") for result in results))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="run all stages on the CPU with tiny shapes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"these stages: {', '.join(s.name for s in STAGES)}")
    parser.add_argument("--out", type=Path, help=f"write the results here ({RESULTS.relative_to(ROOT)})")
    parser.add_argument("--limit-s", type=float, help=f"the whole run's limit ({LIMIT_S:.0f}, dry {DRY_LIMIT_S:.0f})")
    parser.add_argument("--wheels", type=Path, help="install the wheels of this folder for the run alone")
    parser.add_argument(
        "--report", nargs="*", type=Path, metavar="FILE",
        help="run nothing: keep the results of FILE, if given, and write docs/gpu.md from the results; of several "
        "files, from the oldest, each stage as it passed last",
    )  # fmt: skip
    return parser.parse_args(arguments)


def place_of(options: argparse.Namespace) -> Path:
    """Where the results go: only those of a whole run on a GPU take the place of the last ones."""
    return options.out or (DRY_RESULTS if options.dry else SOME_RESULTS if options.only else RESULTS)


def report(files: Sequence[Path]) -> int:
    """Keep the results of ``files`` where the page is made from, and write the page."""
    from bench.gpu.report import merge_results, page, read_results

    if files:
        write_whole(RESULTS, merge_results([read_results(file) for file in files]))  # refuses those of a dry run
    PAGE.write_text(page(STAGES, read_results(RESULTS) if RESULTS.exists() else None))
    return 0


@contextmanager
def wheels(folder: Path | None) -> Iterator[Path | None]:
    """Install the wheels of ``folder`` into a directory of their own, for as long as the block runs."""
    if folder is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="podium-gpu-site-") as site:
        packed = sorted(map(str, folder.glob("*.whl")))
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-index",
            "--no-deps",
        ]
        subprocess.run([*command, "--no-compile", "--target", site, *packed], check=True)
        yield Path(site)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
