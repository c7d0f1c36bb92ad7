"""The run on a GPU: budgets, skips, ends of stages, results that are always whole, and the page."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.__main__ import LIMIT_S, PAGE, RESULTS, ROOT, main, parse, place_of
from bench.gpu.limits import longest
from bench.gpu.numerics import rows_a_token
from bench.gpu.plan import STAGES
from bench.gpu.report import merge_results, page, read_results
from bench.gpu.runner import Planned, Prediction, run
from bench.gpu.stage import Stage, write_whole
from tests.waits import LONG_S, wait_until

HERE = "tests.unit.bench.gpu_stages"


def planned(name: str, budget_s: float = LONG_S, least_s: float | None = None) -> Planned:
    expected = Prediction(figure="rate", low=2, high=4, unit="GB/s", why="it was seen")
    return Planned(
        name=name, what=f"it {name}", budget_s=budget_s, least_s=least_s, function=f"{HERE}:{name}",
        predictions=(expected,),
    )  # fmt: skip


def run_here(folder: Path, *stages: Planned, limit_s: float = 100 * LONG_S, dry: bool = True) -> list[dict[str, Any]]:
    out = folder / "book.json"
    results = run(stages, out, limit_s=limit_s, dry=dry, say=_mute, environment={"BOOK": str(out)}, settle_s=0)
    assert json.loads(out.read_text())["stages"] == json.loads(json.dumps(results))
    assert [path.name for path in folder.iterdir()] == ["book.json"]
    return results


def test_a_stage_that_goes_wrong_ends_alone_and_keeps_its_figures(tmp_path: Path) -> None:
    names = ("fails", "crashes", "hangs", "fails_in_parts", "cannot", "tries_cuda", "passes")
    for budget_s in (3, 12, 48, 192):  # of the stage that hangs
        found = run_here(tmp_path, *(planned(name, budget_s if name == "hangs" else LONG_S) for name in names))
        if "rate" in found[2]["figures"]:  # otherwise it was stopped before it had begun
            break
    assert [one["status"] for one in found] == ["failed", "failed", "timeout", "failed", "skipped", "passed", "passed"]
    assert [one["figures"]["rate"]["value"] for one in found if "rate" in one["figures"]] == [1.0, 1.0, 1.0, 2.0, 3.0]
    failed, crashed, hung, parts, cannot, tried, passed = (one["message"] for one in found)
    assert failed == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "SIGSEGV" in crashed
    assert hung == f"it was stopped after {budget_s} s"
    assert "first: ZeroDivisionError" in parts
    assert "difference is nan nats" in parts
    assert cannot == "this machine has no such thing"
    assert (tried, passed) == ("", "")
    assert "illegal memory access" in found[0]["log"]
    assert found[-2]["skipped"] == {"ipc": "no CUDA device"}


def test_predictions_and_results_are_written_before_the_next_stage_begins(tmp_path: Path) -> None:
    *_, last = run_here(tmp_path, planned("passes"), planned("cannot"), planned("reads_the_book"))
    assert last["facts"] == {"statuses": "passed,skipped,planned", "predicted": "3"}


def test_a_stage_that_does_not_fit_into_what_is_left_is_skipped_and_says_so(tmp_path: Path) -> None:
    found = run_here(tmp_path, planned("passes", 3000.0), planned("passes", LONG_S), limit_s=1000.0)
    assert [one["status"] for one in found] == ["skipped", "passed"]
    assert found[0]["message"] == "it may take 3000 s, and 1000 s are left"


def test_a_stage_that_the_limit_stops_is_skipped(tmp_path: Path) -> None:
    (found,) = run_here(tmp_path, planned("hangs", LONG_S, least_s=0.0), limit_s=2.0)
    assert found["status"] == "skipped"
    assert re.fullmatch(r"the run's limit came after [0-2] s of it", found["message"])


def test_a_figure_is_judged_by_its_prediction_except_in_a_dry_run(tmp_path: Path) -> None:
    (dry,) = run_here(tmp_path, planned("passes"))
    assert dry["verdicts"] == []
    within, below, none = run_here(tmp_path, planned("passes"), planned("fails"), planned("cannot"), dry=False)[:3]
    assert within["verdicts"] == ["rate: predicted 2 to 4 GB/s; 3, as predicted"]
    assert below["verdicts"] == ["rate: predicted 2 to 4 GB/s; 1, lower than predicted"]
    assert none["verdicts"] == ["rate: predicted 2 to 4 GB/s; not measured"]


def test_a_run_that_is_killed_leaves_whole_results_and_no_process(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from bench.gpu.runner import Planned, run
stages = [Planned(name=n, what=n, budget_s=50, function="{HERE}:" + n) for n in ("passes", "hangs")]
run(stages, Path({str(tmp_path / "book.json")!r}), limit_s=100, dry=True, say=print)
"""
    pid_file = tmp_path / "pid"
    environment = {**os.environ, "PIDFILE": str(pid_file)}
    runner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    assert [one["status"] for one in json.loads((tmp_path / "book.json").read_text())["stages"]] == [
        "passed",
        "planned",
    ]
    assert wait_until(lambda: not _alive(int(pid_file.read_text())))


def test_whoever_reads_results_while_they_are_written_finds_them_whole(tmp_path: Path) -> None:
    path = tmp_path / "book.json"
    write_whole(path, {"stages": [1]})
    with path.open() as reader:
        write_whole(path, {"stages": [1, 2]})
        assert json.load(reader) == {"stages": [1]}
    with pytest.raises(TypeError):
        write_whole(path, {"stages": [object()]})
    assert json.loads(path.read_text()) == {"stages": [1, 2]}
    assert [*tmp_path.iterdir()] == [path]


def test_the_budgets_fit_into_the_limit_and_every_stage_has_its_function() -> None:
    assert sum(stage.budget_s for stage in STAGES) <= LIMIT_S <= 21 * 60
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    for stage in STAGES:
        module, _, name = stage.function.partition(":")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, stage.function
        assert all(one.low < one.high for one in stage.predictions)


@pytest.mark.exhaustive
def test_a_dry_stage_runs_by_the_command_and_its_results_are_no_figures_of_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    assert main(["--dry", "--only", "rates", "--out", str(out)]) == 0
    (found,) = json.loads(out.read_text())["stages"]
    assert found["figures"]["product_bf16"]["unit"] == "TFLOP/s"
    assert found["skipped"] == {"bus": "no CUDA device"}
    with pytest.raises(SystemExit, match="dry run"):
        read_results(out)


def test_only_a_whole_run_on_a_gpu_takes_the_place_of_the_last_results() -> None:
    kept = [arguments for arguments in ([], ["--dry"], ["--only", "rates"]) if place_of(parse(arguments)) == RESULTS]
    assert kept == [[]]


def test_the_page_is_what_the_results_say() -> None:
    assert PAGE.read_text() == page(STAGES, read_results(RESULTS) if RESULTS.exists() else None)


def test_a_page_without_results_says_that_no_figure_was_taken_and_one_with_results_has_them(tmp_path: Path) -> None:
    assert "Nothing has been measured on a GPU yet" in page(STAGES, None)
    out = tmp_path / "book.json"
    run((planned("passes"), planned("cannot")), out, limit_s=100 * LONG_S, dry=False, say=_mute)
    text = page(STAGES, read_results(out))
    assert "Nothing has been measured" not in text
    assert "| `rate` | 3 | GB/s | 2 to 4 GB/s: as predicted |" in text
    assert "| `rate` | not measured | GB/s | 2 to 4 GB/s |" in text
    assert re.search(
        r"^\| cannot \| skipped \| [\d.]+ \| \w+ \| this machine has no such thing \|$", text, re.MULTILINE
    )


def test_of_several_runs_each_stage_is_as_it_passed_last_or_else_as_it_last_ran() -> None:
    runs = [
        {
            "commit": commit,
            "began": commit,
            "dry": False,
            "stages": [{"name": n, "status": s} for n, s in stages.items()],
        }
        for commit, stages in (
            ("a", {"x": "passed", "y": "failed", "z": "skipped"}),
            ("b", {"x": "timeout", "y": "timeout", "z": "skipped"}),
            ("c", {"y": "skipped", "w": "passed"}),
        )
    ]
    merged = merge_results(runs)
    assert merged["commit"] == "a, b, c"
    assert [(stage["name"], stage["status"], stage["commit"]) for stage in merged["stages"]] == [
        ("x", "passed", "a"),
        ("y", "timeout", "b"),
        ("z", "skipped", "a"),
        ("w", "passed", "c"),
    ]


@pytest.mark.parametrize(("most_that_fits", "found"), [(7, None), (8, 8), (13, 12), (100, 96), (1000, 128)])
def test_the_longest_row_is_looked_for_by_doubling(most_that_fits: int, found: int | None) -> None:
    tried: list[int] = []

    def attempt(size: int) -> bool:
        tried.append(size)
        return size <= most_that_fits

    assert longest(attempt, 8, 128) == found
    assert sum(size > most_that_fits for size in tried) <= 2


def test_the_growth_of_memory_is_counted_in_rows_of_logits() -> None:
    words, gib = 1 << 18, 2**30
    peaks = {tokens: 1.0 + 2 * tokens * words * 4 / gib for tokens in (4096, 16_384)}
    assert rows_a_token(peaks, words) == pytest.approx(2.0)


def test_a_stage_asks_for_a_gpu_unless_it_is_dry(tmp_path: Path) -> None:
    assert Stage(tmp_path / "result", dry=True).gpus == 0
    with pytest.raises(RuntimeError, match="no CUDA device; --dry"):
        _ = Stage(tmp_path / "result", dry=False).device


def _mute(line: str) -> None:
    """Print nothing."""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
