"""From a name in a configuration to a function, and what a mistake in the name says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from podium.errors import ConfigError
from podium.functions import check_function_name, load_function
from tests.warm_python import run_python

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from neighbor_under_test import BONUS

@dataclass
class Rule:
    bonus: float = BONUS

def plain(text):
    return len(text) + Rule().bonus

LIMIT = 3
"""
KNOWN = {"length": len, "mean": "statistics:mean"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of this test, with a module, its neighbor and an empty module."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("neighbor_under_test", "functions_under_test", "empty_under_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "neighbor_under_test.py").write_text("BONUS = 0.5\n")
    (tmp_path / "functions_under_test.py").write_text(SOURCE)
    (tmp_path / "empty_under_test.py").write_text("from math import sqrt\n_hidden = len\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(spec: str) -> object:
    return load_function(spec, key="section.key", known=KNOWN)


def test_a_known_name() -> None:
    assert load_function("length", key="section.key", known=KNOWN)("four") == 4
    assert load_function("mean", key="section.key", known=KNOWN)([1, 3]) == 2


@pytest.mark.parametrize("form", ["functions_under_test:plain", "functions_under_test.py:plain", "{}:plain"])
def test_a_module_and_a_file(form: str, folder: Path) -> None:
    assert load_function(form.format(folder / "functions_under_test.py"), key="section.key")("four") == 4.5


def test_a_file_may_import_its_neighbors_from_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    monkeypatch.chdir(folder.parent)
    assert load_function(f"{folder}/functions_under_test.py:plain", key="section.key")("four") == 4.5


def test_a_nested_name() -> None:
    assert load("builtins:str.count") is str.count


@pytest.mark.usefixtures("folder")
def test_a_file_is_loaded_once() -> None:
    assert load("functions_under_test.py:plain") is load("functions_under_test.py:plain")


def test_a_file_that_was_edited_is_loaded_again(folder: Path) -> None:
    """As in a notebook, where a reward is edited between two runs of one process."""
    file = folder / "edited.py"
    for score in (1.0, 22.0):
        file.write_text(f"def score(completion, row):\n    return {score}\n")
        assert load_function("edited.py:score", key="reward.name")("", {}) == score


def test_two_files_of_one_name_are_two_modules(folder: Path) -> None:
    other = folder / "other" / "functions_under_test.py"
    other.parent.mkdir()
    other.write_text("def plain(text):\n    return 0.0\n")
    first, second = (load_function(f"{path}:plain", key="k") for path in (folder / other.name, other))
    assert (first("four"), second("four")) == (4.5, 0.0)
    assert sys.modules[first.__module__] is not sys.modules[second.__module__]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lenght", "did you mean length"),
        ("zzz", r"expected one of length, mean, module:function, or path/file\.py:function"),
        ("module:", "expected one of"),
        (":function", "expected one of"),
        ("module:not a name", "expected one of"),
    ],
)
def test_a_wrong_form_is_refused_before_anything_is_imported(spec: str, message: str) -> None:
    for check in (load_function, check_function_name):
        with pytest.raises(ConfigError, match=message) as caught:
            check(spec, key="section.key", known=KNOWN)
        assert f"section.key = {spec!r}" in str(caught.value)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("functions_under_tset:plain", "no module 'functions_under_tset'.*did you mean functions_under_test"),
        ("functions_under_tset:plain", r"name a file by its path: functions_under_tset\.py:plain"),
        ("functions_under_test:plian", r"functions_under_test has no 'plian'; did you mean plain"),
        ("functions_under_test:zzz", "has no 'zzz'; it defines Rule, plain"),
        ("empty_under_test:zzz", "has no 'zzz'; it defines no function"),
        ("functions_under_test:LIMIT", "'LIMIT' in functions_under_test is not a function but of type int"),
        ("functions_under_tset.py:plain", r"no file .*did you mean .*functions_under_test\.py"),
        ("nowhere/at_all.py:plain", r"no file .*nowhere/at_all\.py, and no directory .*nowhere"),
    ],
)
def test_a_wrong_name_is_explained_with_the_nearest(spec: str, message: str) -> None:
    check_function_name(spec, key="section.key")  # only loading finds these
    with pytest.raises(ConfigError, match=message) as caught:
        load(spec)
    assert f"section.key = {spec!r}" in str(caught.value)


def test_a_file_beside_that_cannot_be_imported_is_not_its_own_nearest_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(folder))])
    with pytest.raises(
        ConfigError, match=r"no module 'functions_under_test' on .*: functions_under_test\.py:plain"
    ) as caught:
        load("functions_under_test:plain")
    assert "did you mean functions_under_test" not in str(caught.value)


@pytest.mark.parametrize("form", ["broken_under_test:f", "broken_under_test.py:f"])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys\nimport not_installed_anywhere\n", "2: ModuleNotFoundError: No module named 'not_installed_any"),
        ("def f(x):\n    return (\n", "2: SyntaxError: '(' was never closed"),
        ("import json\n\njson.loads('{')\n", "3: JSONDecodeError: Expecting property name"),
        ("raise SystemExit('use it as a module')\n", "1: SystemExit: use it as a module"),
        ("raise KeyError\n", "1: KeyError"),
    ],
)
def test_an_error_inside_the_users_module_is_a_line_with_the_statement(
    form: str, source: str, said: str, folder: Path
) -> None:
    (folder / "broken_under_test.py").write_text(source)
    for _ in range(2):  # nothing stays half loaded
        with pytest.raises(ConfigError) as caught:
            load(form)
        assert str(caught.value).startswith(f"section.key = {form!r}: {folder}/broken_under_test.py:{said}")
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is not None


def test_an_error_in_a_file_beside_names_that_file(folder: Path) -> None:
    (folder / "neighbor_under_test.py").write_text("\nBONUS = 1 / 0\n")
    with pytest.raises(ConfigError, match=r": \S+/neighbor_under_test\.py:2: ZeroDivisionError: division by zero$"):
        load("functions_under_test:plain")


def test_the_module_is_light() -> None:
    script = "import sys, podium.functions; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


GRADE = """
import sys
from podium.rewards import RewardConfig
from podium.rewards.grader import Grader
from podium.rewards.resolve import resolve_reward

resolve_reward(f"{sys.argv[1]}:score")  # as a trainer does, which looks at its columns
with Grader(RewardConfig(name=f"{sys.argv[1]}:score", processes=1)) as grader:
    (grade,) = grader.grade(["one"], [{"prompt": "", "answer": None}])
print(grade.score)
"""


@pytest.mark.everyday("random", "types")
@pytest.mark.parametrize("name", ["logging", "random", "types", "math"])
def test_a_file_called_like_a_module_of_python_hides_it_from_no_process(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("from helper import LENGTH\n\ndef score(completion):\n    return LENGTH\n")
    (tmp_path / "helper.py").write_text("LENGTH = 3.0\n")
    done = run_python("-c", GRADE, str(tmp_path / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3.0"]
