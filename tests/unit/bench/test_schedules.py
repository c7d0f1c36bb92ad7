"""The report on schedules: bands over seeds, the time to an accuracy, what is read of a run, and the page's section."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.report import END, put_section
from bench.schedules.__main__ import PAGE, PICTURE, RESULTS, main
from bench.schedules.campaign import Campaign, problems, read_results, write_data, write_results
from bench.schedules.figures import BAR, BEGIN, band, curve, reaching, section, spread, table
from bench.schedules.records import Point, Run, read_run


def run_of(arm: str, seed: int, accuracies: list[float], seconds: float = 10.0) -> Run:
    """A run that is evaluated every 5 steps, each of which takes ``seconds`` / 5."""
    points = tuple(
        Point(step=5 * number, seconds=seconds * number, accuracy=share) for number, share in enumerate(accuracies)
    )
    return Run(
        arm=arm, seed=seed, points=points, step_s=seconds / 5, generate_s=0.5, update_s=1.0,
        sampled_tokens_per_s=1234.5, generator_busy=0.4, policy_busy=0.9, staleness_mean=1.5, staleness_max=2,
        weights_capped=0.001, others_cpu=0.02,
    )  # fmt: skip


def seconds_of(point: Point) -> float:
    return point.seconds


def test_a_band_holds_the_mean_of_normal_samples_95_times_in_100() -> None:
    chance = random.Random(0)
    held = 0
    for _ in range(2000):
        mean, low, high = band([chance.gauss(3.0, 2.0) for _ in range(5)])
        assert low < mean < high
        held += low <= 3.0 <= high
    assert 0.93 < held / 2000 < 0.97


def test_a_band_by_hand_and_of_one_value() -> None:
    assert band([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    mean, low, high = band([0.5])
    assert mean == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def test_the_time_to_an_accuracy_lies_between_two_evaluations() -> None:
    run = run_of("sync", 0, [0.4, 0.6, 0.9, 0.7])
    assert reaching(run, 0.75, seconds_of) == pytest.approx(15.0)
    assert reaching(run, 0.75, lambda point: point.step) == pytest.approx(7.5)
    assert reaching(run, 0.4, seconds_of) == 0.0
    assert reaching(run, 0.95, seconds_of) == math.inf


def test_a_curve_ends_with_the_shortest_run_and_its_band_stays_between_0_and_1() -> None:
    runs = [run_of("sync", 0, [0.2, 0.6, 1.0]), run_of("sync", 1, [0.4, 0.8, 1.0], seconds=8.0)]
    rows = curve(runs, seconds_of, places=3)
    assert [place for place, *_ in rows] == [0.0, 8.0, 16.0]
    assert rows[1][1] == pytest.approx((0.2 + 0.8 * 0.4 + 0.8) / 2)
    assert all(0.0 <= low <= mean <= high <= 1.0 for _, mean, low, high in rows)
    assert all(math.isnan(low) and math.isnan(high) for _, _, low, high in curve(runs[:1], seconds_of))


def test_a_run_that_never_gets_there_is_told_as_such() -> None:
    assert spread([3.0, 1.0, 2.0], "{:.0f}".format) == "2 (1 to 3)"
    assert spread([1.04, 1.0], "{:.1f}".format) == "1.0"
    assert spread([3.0, math.inf, 2.0], "{:.0f}".format) == "3 (2 to never)"


def test_the_table_compares_runs_of_the_same_seed() -> None:
    middle = [BAR - 0.4, BAR - 0.2, BAR + 0.2]  # the bar lies between the second evaluation and the third
    slow = [run_of("sync", seed, middle, seconds=10.0 + seed) for seed in range(3)]
    fast = [run_of("asynchronous", seed, middle, seconds=5.0 + seed / 2) for seed in range(3)]
    never = run_of("one_step_off", 0, [BAR - 0.4, BAR - 0.3, BAR - 0.2])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table([*fast, never, *slow]).splitlines()]
    found = {row[0]: row[1:] for row in cells}
    assert cells[0] == ["", "`sync`, split", "`one_step_off`", "`asynchronous`, `max_staleness: 2`"]
    assert found[f"seconds to {BAR:.0%}"] == ["16.5 (15.0 to 18.0)", "never", "8.2 (7.5 to 9.0)"]
    assert found["times faster than `sync`, split, with the same seed"] == ["1.00", "0.00", "2.00"]
    assert "times faster than `sync`, colocated, with the same seed" not in found, "none was run"
    assert found["sampled tokens/s"][0] == "1,234"


def test_a_run_is_read_from_its_directory(tmp_path: Path) -> None:
    step = {"kind": "step", "time/step": 2.0, "time/generate": 0.5, "time/update": 1.0, "completion/length_mean": 10.0}
    rows = [
        {"kind": "eval", "step": 0, "time": 100.0, "accuracy": 0.25},
        {**step, "step": 1, "mismatch/weight_capped": 0.5},
        {**step, "step": 2, "mismatch/weight_capped": 0.0},
        {"kind": "eval", "step": 2, "time": 104.0, "accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        {"first": 0},
        {"state": "taken", "step": 1, "prompts": [0, 1]},
        {"state": "rolled_out", "step": 1, "prompts": [0, 1], "versions": [[0, 0], [0, 0]]},
        {"state": "rolled_out", "step": 3, "prompts": [2, 3], "versions": [[0, 2], [2, 2]]},
    ]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "controller"}},
        {"ph": "M", "name": "process_name", "pid": 2, "tid": 1, "args": {"name": "policy+estimator"}},
        {"ph": "M", "name": "process_name", "pid": 3, "tid": 1, "args": {"name": "generator"}},
        {"ph": "X", "name": "generate", "pid": 1, "tid": 100, "ts": 100, "dur": 50, "args": {"step": 1}},
        {"ph": "X", "name": "update", "pid": 1, "tid": 200, "ts": 150, "dur": 50, "args": {"step": 1}},
        {"ph": "X", "name": "construct", "pid": 2, "tid": 1, "ts": 0, "dur": 90, "args": {"call": 0}},
        {"ph": "X", "name": "update", "pid": 2, "tid": 1, "ts": 160, "dur": 30, "args": {"call": 2}},
        {"ph": "X", "name": "generate", "pid": 3, "tid": 1, "ts": 100, "dur": 40, "args": {"call": 1}},
        {"ph": "X", "name": "generate", "pid": 3, "tid": 2, "ts": 120, "dur": 30, "args": {"call": 3}},
    ]
    (tmp_path / "trace.json").write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in trace))

    run = read_run(tmp_path, "asynchronous", seed=3, rows=64, others_cpu=0.01)

    assert run.points == (Point(step=0, seconds=0.0, accuracy=0.25), Point(step=2, seconds=4.0, accuracy=0.5))
    assert run.sampled_tokens_per_s == 64 * 20 / 4
    assert (run.policy_busy, run.generator_busy) == (0.3, 0.5)
    assert (run.staleness_mean, run.staleness_max) == (0.5, 2)
    assert run.weights_capped == 0.25
    assert Run.from_json(json.loads(json.dumps(run.as_json()))) == run


def test_results_are_continued_and_those_of_other_settings_are_refused(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    campaign = Campaign(tmp_path / "runs", results, steps=10, say=lambda line: None)
    done = [run_of("sync", 0, [0.1, 0.9]).as_json()]
    write_results(results, {"settings": campaign.settings, "machine": {}, "runs": done})
    assert read_results(results)["runs"] == done
    campaign.run(["sync"], seeds=1)  # there is nothing to run
    with pytest.raises(SystemExit, match="other settings"):
        Campaign(tmp_path / "runs", results, steps=11, say=lambda line: None).run(["sync"], seeds=1)
    assert not (tmp_path / "runs").exists()


def test_answers_lead_to_the_last_number_and_demonstrations_have_slips(tmp_path: Path) -> None:
    for prompt, numbers in problems(200).items():
        first, by, last = map(int, prompt.rstrip(":").split())
        assert numbers == list(range(first + by, last + 1, by))
    write_data(tmp_path)
    held_out, train, shown = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("held_out", "train", "demonstrations")
    )
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in train}
    assert [row["prompt"] for row in train] == [row["prompt"] for row in shown]
    pairs = [
        pair
        for right, said in zip(train, shown, strict=True)
        for pair in zip(right["answer"].split(), said["answer"].split(), strict=True)
    ]
    assert 0.1 < sum(right != said for right, said in pairs) / len(pairs) < 0.14


def test_the_page_has_what_the_report_makes_from_the_stored_results() -> None:
    page = PAGE.read_text()
    assert put_section(page, section(read_results(RESULTS), PICTURE), BEGIN) == page
    assert PAGE.with_name(PICTURE).exists() == bool(read_results(RESULTS)["runs"])


@pytest.mark.exhaustive
def test_the_report_writes_the_page_and_draws_the_same_picture_twice(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "runs", tmp_path / "results.json", steps=10, say=lambda line: None)
    arms = ("sync_colocated", "sync", "one_step_off", "asynchronous")
    runs = [run_of(arm, seed, [0.3, 0.6 + seed / 10, 0.9]).as_json() for arm in arms for seed in range(2)]
    machine = {"cores": 2, "processor": "one", "when": "2026-11-22T20:00:00", "libraries": {"torch": "2.13.0"}}
    write_results(campaign.results, {"settings": campaign.settings, "machine": machine, "runs": runs})
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    words = ["--report", "--results", str(campaign.results), "--page", str(page)]

    assert main(words) == 0
    first, drawn = page.read_text(), page.with_name(PICTURE).read_bytes()
    assert main(words) == 0

    assert first.startswith(f"before\n{BEGIN}\n10 steps of GRPO")
    assert first.endswith(f"{END}\nafter\n")
    assert (page.read_text(), page.with_name(PICTURE).read_bytes()) == (first, drawn)
    assert drawn.startswith(b"<?xml")
    with pytest.raises(ValueError, match="the page has no"):
        put_section("nothing", "text", BEGIN)


def test_runs_that_differ_in_nothing_have_a_band_without_width() -> None:
    runs = [replace(run_of("sync", 0, [0.5, 0.7]), seed=seed) for seed in range(3)]
    assert all(low == mean == high for _, mean, low, high in curve(runs, seconds_of))
