"""`podium runs compare` shows how runs differ, by their files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from podium.cli import main
from tests.made_runs import make_run


def test_runs_are_compared_and_seeds_are_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, seed, lr in (("a0", 0, 1e-5), ("a1", 1, 1e-5), ("b0", 0, 1e-4)):
        make_run(tmp_path / name, seed=seed, lr=lr, offset=seed)
    assert main(["runs", "compare", "a0", "a1", "b0"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["run.seed", "0", "1", "0"] in lines
    assert ["optim.lr", "1e-05", "1e-05", "0.0001"] in lines
    assert not any("data.train" in line for line in lines), "it is the same in all"
    assert lines[-1] == ["reward/mean:", "comparison.png"]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert main(["runs", "compare", "a0"]) == 2
    assert main(["runs", "compare", "a0", "b0", "--metric", "absent"]) == 2


def test_a_metric_of_evaluations_alone_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures: list[bytes] = []
    for offset in (0.0, 0.5):
        runs = [make_run(tmp_path / f"{offset}" / name) for name in "ab"]
        for run in runs:
            rows = [{"kind": "eval", "step": step, "accuracy": offset * step} for step in (1, 2)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        out = tmp_path / f"{offset}.png"
        assert main(["runs", "compare", *map(str, runs), "--metric", "accuracy", "--out", str(out)]) == 0
        pictures.append(out.read_bytes())
    assert pictures[0] != pictures[1], "the curve is in the picture"


def test_what_the_picture_leaves_out_of_runs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        make_run(tmp_path / name, seed=seed, steps=steps) for seed, (name, steps) in enumerate({"a": 3, "b": 2}.items())
    ]
    command = ["runs", "compare", *map(str, runs), "--out", str(tmp_path / "x.png")]
    assert main(command) == 0
    assert capsys.readouterr().err == (
        "a (2 seeds): drawn at the 2 steps that all of them have, of a 3 steps up to 3, b 2 steps up to 2\n"
    )
    rows = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps({**row, "step": row["step"] + 7}) + "\n" for row in rows))
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "a (2 seeds): not drawn, of a 3 steps up to 3, b 2 steps up to 9\n" in err
    assert (
        "--metric reward/mean: runs that differ only in their seeds are drawn at the steps that all of them have" in err
    )
    assert main([*command, "--metric", "low"]) == 2
    (runs[1] / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "time": 1.0, "loss": 0.5}) + "\n")
    assert main([*command, "--metric", "reward/mean"]) == 0
    assert "b has no reward/mean, and is not drawn\n" in capsys.readouterr().err


def test_runs_are_counted_once_and_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy is no further seed, and runs without settings are not known to be alike."""
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / name / "run", steps=steps) for name, steps in (("x", 3), ("y", 2))]
    command = ["runs", "compare", "--out", str(tmp_path / "x.png"), str(runs[0]), str(tmp_path / "x")]
    assert main(command) == 0
    assert ["run"] in [line.split() for line in capsys.readouterr().out.splitlines()], "it is one column"
    assert main([*command, str(runs[1])]) == 0
    out, err = capsys.readouterr()
    assert ["x/run", "y/run"] in [line.split() for line in out.splitlines()]
    assert "x/run (2 runs): drawn at the 2 steps that all of them have" in err
    for run in runs:
        (run / "config.yaml").write_text("a: [")
    assert main([*command, str(runs[1])]) == 0
    assert "2 runs" not in capsys.readouterr().err


def test_a_loss_is_that_of_steps_and_not_that_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / name) for name in "ab"]
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "eval", "step": 3, "time": 99.0, "loss": 2.5, "items": 4}) + "\n")
    assert main(["runs", "compare", *map(str, runs), "--out", str(tmp_path / "x.png")]) == 0
    assert ["loss", "0", "0"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_runs_that_have_not_measured_the_same_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out figures of other data or other lengths stand in one row, and one line of ``--best`` below the other."""
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    compare = ["runs", "compare", *map(str, runs), "--out", str(tmp_path / "x.png")]
    best = ["runs", str(tmp_path), "--best"]
    for command in (compare, best):
        assert main(command) == 0
        assert "measured" not in capsys.readouterr().err
    values = yaml.safe_load((runs[1] / "config.yaml").read_text())
    values["eval"] = {"items": 7}
    values["data"] = {**values.get("data", {}), "eval": {"hard": "hard.jsonl"}}
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(values))
    row = {"kind": "eval", "step": 3, "metric": "accuracy", "accuracy": 0.5, "items": 7}
    row |= {"accuracy/hard": 0.5, "items/hard": 7}
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    for command in (compare, best):
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert "accuracy of hard 50.0%" in out and "accuracy 25.0%" in out
        (line,) = [line for line in err.splitlines() if "measured" in line]
        assert line.startswith("held-out accuracy: these runs may not have measured the same, as they differ in ")
        named = {*line.partition("differ in ")[2].split(", ")}
        assert named == {"eval.items", "data.eval", "the set that judges them"}


def test_runs_of_other_prompts_or_other_tokens_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The columns of a prompt and the tokens of a loss decide what a figure means."""
    for name, column, model in (("a", "question", "qwen/small"), ("b", "{context} {question}", "llama/small")):
        (run := tmp_path / name).mkdir()
        values = {"model": {"path": model}, "data": {"train": "t.jsonl", "eval": "e.jsonl", "prompt_column": column}}
        (run / "config.yaml").write_text(yaml.safe_dump(values))
        row = {"kind": "eval", "step": 2, "time": 1.0, "metric": "loss", "loss": 0.5, "items": 7}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["runs", str(tmp_path), "--best"]) == 0
    assert "differ in data.prompt_column, the tokenizer\n" in capsys.readouterr().err


def _spoil(run: Path, metric: str, text: str, first: int) -> None:
    """Let the metric be no finite number from the step ``first`` on, as the writer of metrics.jsonl records it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if metric in row and row["step"] >= first:
            row |= {metric: None, "nonfinite": {metric: text}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("metric", "text", "kind"),
    [("loss", "nan", "step"), ("reward/mean", "inf", "step"), ("loss", "-inf", "step"), ("reward_mean", "nan", "eval")],
)
def test_a_value_that_is_not_finite_is_the_last_one_and_is_counted(
    metric: str, text: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / name, lr=lr) for name, lr in (("a", 1e-5), ("b", 1e-4))]
    _spoil(runs[1], metric, text, 3)
    command = ["runs", "compare", *map(str, runs), "--metric", metric, "--out", str(tmp_path / "x.png")]
    assert main(command) == 0
    out, err = capsys.readouterr()
    if kind == "step":
        (line,) = [line.split() for line in out.splitlines() if line.startswith(f"{metric} ")]
        assert line[2] == text, "the earlier value is not the last one"
        assert err == f"b: {metric} is not finite at 1 step, first at step 3, and is not drawn there\n"
    else:
        assert f"b: {metric} is not finite at 1 step, first at step 3, and is not drawn there\n" in err
        assert f"b has no finite {metric}, and is not drawn\n" in err
    assert main(["runs", str(runs[1])]) == 0
    out = capsys.readouterr().out
    assert ("(not finite at 1 step)" in out) == (metric == "reward/mean"), "which is the metric of its curve"
    for run in runs:
        _spoil(run, metric, text, 1)
    assert main(command) == 2
    assert f"--metric {metric}: no value of these runs is finite" in capsys.readouterr().err


def _make_seeds(folder: Path, **contents: str) -> list[Path]:
    """Three runs with other seeds that name files, the last one of which had the contents ``contents``."""
    runs: list[Path] = []
    for seed, name in enumerate("abc"):
        run = make_run(folder / name, seed=seed)
        values = yaml.safe_load((run / "config.yaml").read_text())
        values["data"] = {"train": {"/x/t.jsonl": 2, "/x/u.jsonl": 1}, "eval": {"hard": "/x/e.jsonl"}}
        values |= {"reward": {"name": ["/x/r.py:grade"]}, "environment": {"name": "/x/w.py:World"}}
        values |= {"algorithm": {"advantage": "/x/a.py:estimate"}, "engine": {"options": {"run": "/x/run"}}}
        values["data"]["chat_template"] = "/x/c.jinja"
        (run / "config.yaml").write_text(yaml.safe_dump(values))
        files = ("t.jsonl", "u.jsonl", "e.jsonl", "r.py", "w.py", "a.py", "c.jinja", "run")
        places = {
            f"/x/{file}": {"given": file, "from_run": "", "nbytes": 7, "sha256": "0" * 64}
            | {"sha256": contents.get(file.partition(".")[0], "0" * 64) if seed == 2 else "0" * 64}
            for file in files
        }
        (run / "places.json").write_text(json.dumps(places))
        runs.append(run)
    return runs


@pytest.mark.parametrize(
    ("file", "name", "measures"),
    [
        ("e", "the content of e.jsonl (data.eval.hard)", True),
        ("r", "the content of r.py (reward.name)", True),
        ("w", "the content of w.py (environment.name)", True),
        ("c", "the content of c.jinja (data.chat_template)", True),
        ("u", "the content of u.jsonl (data.train)", False),
        ("a", "the content of a.py (algorithm.advantage)", False),
    ],
)
def test_runs_whose_files_had_other_contents_are_no_seeds(
    file: str, name: str, measures: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of the same name that was edited between two runs is another setting."""
    pytest.importorskip("matplotlib")
    runs = _make_seeds(tmp_path, **{file: "f" * 64})
    with (runs[2] / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"kind": "step", "step": 4, "time": 99.5, "loss": 0.0, "reward/mean": 0.5}) + "\n")
    assert main(["runs", "compare", *map(str, runs), "--out", str(tmp_path / "x.png")]) == 0
    out, err = capsys.readouterr()
    assert f"a, b, c: these runs are no seeds of one another where they differ in {name}\n" in err
    assert "seeds)" not in err, "the third has a line of its own, with its last step"
    (line,) = [line for line in out.splitlines() if line.startswith("the content of")]
    assert line.removeprefix(name).split() == ["0" * 12, "0" * 12, "f" * 12]
    sentence = f"these runs may not have measured the same, as they differ in {name}\n"
    assert (sentence in err) == measures
    assert main(["runs", str(tmp_path), "--best"]) == 0
    assert (sentence in capsys.readouterr().err) == measures


@pytest.mark.parametrize("content", [None, "[", '{"/x/e.jsonl": 3}'])
def test_contents_that_are_not_known_do_not_part_runs(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run there may be no places.json, or a damaged one; and the directory of a replayed run changes."""
    pytest.importorskip("matplotlib")
    runs = _make_seeds(tmp_path, run="f" * 64)
    if content is not None:
        for run in runs:
            (run / "places.json").write_text(content)
    assert main(["runs", "compare", *map(str, runs), "--out", str(tmp_path / "x.png")]) == 0
    out, err = capsys.readouterr()
    assert "the content of" not in out + err


def test_a_large_file_is_compared_by_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    runs = _make_seeds(tmp_path)
    for nbytes, run in enumerate(runs, 100_000_000):
        places = json.loads((run / "places.json").read_text())
        places["/x/t.jsonl"] |= {"nbytes": nbytes, "sha256": None}
        (run / "places.json").write_text(json.dumps(places))
    assert main(["runs", "compare", *map(str, runs), "--out", str(tmp_path / "x.png")]) == 0
    assert "the content of t.jsonl (data.train)  100,000,000 bytes  100,000,001 bytes  " in capsys.readouterr().out
