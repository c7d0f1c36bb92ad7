"""Every Python example of the README and of docs/ that is a whole script runs as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from podium.cli import main
from podium.trainer import GRPOConfig, PPOConfig, SFTConfig, keys_of
from tests.warm_python import run_python

ROOT = Path(__file__).parents[2]
COMING_FROM = ("coming-from-trl", "coming-from-verl", "coming-from-areal")
PAGES = [ROOT / "README.md"] + [
    ROOT / "docs" / f"{page}.md" for page in ("quick-start", "workers", "references", *COMING_FROM)
]


LOOP = (ROOT / "examples" / "grpo_loop.py").read_text()


def test_the_first_code_of_the_quick_start_is_the_loop_of_the_examples() -> None:
    first = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quick-start.md").read_text(), re.DOTALL)[0]
    assert first == LOOP
    assert len(first.splitlines()) <= 60


def _scripts() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        whole = [block for block in blocks if "podium.connect" in block and "..." not in block.split("with podium")[1]]
        whole = [block for block in whole if block != LOOP]  # tests/integration/test_train_examples.py runs that one
        found += [(f"{page.name}-{number}", block) for number, block in enumerate(whole)]
    return found


@pytest.mark.parametrize("script", [pytest.param(code, id=name) for name, code in _scripts()])
def test_a_script_of_the_docs_runs_as_printed(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    done = run_python(path)
    assert done.returncode == 0, done.stderr


def test_there_are_scripts_to_run_on_every_page() -> None:
    assert {name.rpartition("-")[0] for name, _ in _scripts()} == {page.name for page in PAGES}
    assert len(_scripts()) == 11


@pytest.mark.ray
@pytest.mark.slow
def test_the_scripts_of_the_page_on_ray_run_as_printed_one_after_the_other(tmp_path: Path) -> None:
    """On a running cluster of two nodes, which is the one that "auto" means."""
    from tests.integration.ray_nodes import add_node, ray_nodes

    scripts = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ray.md").read_text(), re.DOTALL)
    assert len(scripts) == 5
    with ray_nodes(num_cpus=1) as nodes:
        add_node(nodes, "second", num_cpus=1)
        for number, script in enumerate(scripts):
            path = tmp_path / f"script_{number}.py"
            path.write_text(script)
            done = run_python(path, env={**os.environ, "RAY_ADDRESS": str(nodes.address)})
            assert done.returncode == 0, f"{script}\n{done.stderr}"


def test_the_requests_of_the_page_on_engines_are_served(tmp_path: Path) -> None:
    script, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engines.md").read_text(), re.DOTALL)
    path = tmp_path / "script.py"
    path.write_text(script)
    done = run_python(path)
    assert done.returncode == 0, done.stderr
    assert {line.partition(" ")[0] for line in done.stdout.splitlines()} == {"a", "b"}


def test_the_engine_of_the_page_on_engines_is_the_one_of_the_examples() -> None:
    """tests/contract/test_engines.py runs the contract suite on the latter."""
    _, engine, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engines.md").read_text(), re.DOTALL)
    assert engine == (ROOT / "examples" / "custom_engine.py").read_text()


def test_the_page_on_configuration_prints_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python")
    for code, printed in blocks:
        (tmp_path / "script.py").write_text(code)
        done = run_python("script.py", cwd=tmp_path)
        assert sorted(done.stdout.splitlines()) == sorted(printed.splitlines()), done.stderr


TRAINING = (ROOT / "docs" / "training.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_run_of_the_page_on_training_goes_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are written, its scripts and its commands run, one after the other in one directory."""
    monkeypatch.chdir(tmp_path)
    printed = name = ""
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", TRAINING, re.DOTALL | re.MULTILINE):
        if not language:
            for line in code.splitlines():
                words = shlex.split(line)[1:]
                again = {"--resume", "--replay", "eval"} & {*words}  # test_train_backends.py does them on local ones
                assert main([*words, "--backend", "inline"] if again else words) == 0, line
            continue
        name = code.partition("\n")[0].removeprefix("# ")
        Path(name).write_text(code)
        if language == "python":
            done = run_python(name)
            assert done.returncode == 0, done.stderr
            printed = done.stdout
    assert len((tmp_path / "runs/copy/metrics.jsonl").read_text().splitlines()) == 5 + 3  # 0, 3 and 5 were evaluated
    assert "accuracy " in capsys.readouterr().out
    assert printed.endswith("3 steps, model in runs/reinforce/model\n")
    weights = [Path("runs", name, "model/model.safetensors").read_bytes() for name in ("copy", "again")]
    assert weights[0] == weights[1], "a replay ends with the same weights"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_runs_of_the_page_on_preferences_go_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "preferences.md").read_text()
    printed = name = ""
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for line in code.splitlines() if not language else ():
            assert main([*shlex.split(line)[1:], "--backend", "inline"]) == 0, line
        if language:
            name = code.partition("\n")[0].removeprefix("# ")
            Path(name).write_text(code)
        if language == "python":
            done = run_python(name)
            assert done.returncode == 0, done.stderr
            printed = done.stdout
    assert "options.gamma = 1" not in (shown := capsys.readouterr().out)
    assert shown.count("held-out accuracy") >= 3
    assert printed.startswith("accuracy 0.50 before, ")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_student_of_the_page_on_distillation_learns_what_its_teacher_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "distillation.md").read_text()
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if language in ("python", "yaml"):
            name = code.partition("\n")[0].removeprefix("# ")
            Path(name).write_text(code)
            assert language == "yaml" or run_python(name).returncode == 0
        for line in code.splitlines() if not language else ():
            assert main([*shlex.split(line)[1:], "--backend", "inline"]) == 0, line
    teacher, student = (json.loads(Path("runs", name, "summary.json").read_text()) for name in ("teacher", "student"))
    assert teacher["after"]["accuracy"] >= 0.9
    assert student["before"]["accuracy"] <= 0.1
    assert student["after"]["accuracy"] >= 0.5


@pytest.mark.exhaustive
def test_the_commands_of_the_page_on_how_to_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dry runs, in a directory with the files of the page on training and a model to begin with."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "how-to.md").read_text()
    for name, text in re.findall(
        r"^```(?:python|yaml)\n# ([\w.]+)\n(.*?)^```", TRAINING + page, re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(text)
    assert run_python("make_data.py").returncode == 0
    assert main(["train", "sft", "--config", "warm.yaml", "--run.steps", "1", "--backend", "inline"]) == 0
    lines = re.findall(r"^podium (train .*)$", page, re.MULTILINE)
    assert len(lines) > 15
    for line in lines:
        words = shlex.split(line)
        if "ray" not in words:  # a dry run asks the cluster for its nodes
            assert main([*words, "--dry-run"]) == 0, line


def test_every_section_and_only_keys_that_exist_are_on_the_page_on_training() -> None:
    known = {key.path for cls in (GRPOConfig, PPOConfig, SFTConfig) for key in keys_of(cls)}
    rows = re.findall(r"^\| `([a-z]+)` \| [^|`]+ \| (.*) \|$", TRAINING, re.MULTILINE)
    assert {section for section, _ in rows} == {path.partition(".")[0] for path in known}
    assert {f"{section}.{key}" for section, keys in rows for key in re.findall(r"`([a-z][\w.]*)`", keys)} <= known
    mentioned = re.findall(r"`([a-z]+\.[a-z_.]+)(?:: \w+)?`", TRAINING)
    assert {path for path in mentioned if path.partition(".")[0] in dict(rows)} <= known | {"model.lora"}
