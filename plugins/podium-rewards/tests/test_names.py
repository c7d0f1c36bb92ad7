"""The rewards that the package brings by name."""

from __future__ import annotations

import shutil
import sys
import threading
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.rewards import resolve_reward
from podium.rewards.resolve import columns_read

pytest.importorskip("podium_rewards")
NAMES = {"code": set[str](), "math": {"answer"}, "reasoning_gym": {"metadata"}}


@pytest.mark.parametrize("name", NAMES)
def test_the_columns_that_a_reward_reads_are_known_before_a_run_starts(name: str) -> None:
    pytest.importorskip({"math": "math_verify", "code": "podium_rewards"}.get(name, name))
    if name == "code" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    assert columns_read(name) == NAMES[name]


def test_a_row_without_an_answer_says_which_setting_to_change() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match=r"data\.answer_column"):
        resolve_reward("math")("1", {"question": "?"})


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"thus $\frac{1}{2}$", "1/2", 1.0),
        ("$1+x^2$", "x^2+1", 1.0),
        ("it is 72.", "48 + 24 = 72\n#### 72", 1.0),
        (r"\boxed{\{2,1\}}", r"$\{1,2\}$", 1.0),
        (r"\boxed{3}", "x=3", 1.0),
        (r"\boxed{4}", "3", 0.0),
        ("no idea", "3", 0.0),
    ],
)
def test_math(completion: str, answer: str, score: float) -> None:
    assert resolve_reward("math")(completion, {"answer": answer}) == score


@pytest.mark.parametrize(
    ("completion", "stop_text", "answer", "score"),
    [
        (r"so \boxed{4", "}", "4", 1.0),
        (r"it is $3$, no: \boxed{\frac{1}{2}", "}\n", "1/2", 1.0),
        (r"it is $3$, no: $\boxed{4", "}$ Next", "4", 1.0),
        (r"it is $3$, no: \(4", r"\)", "4", 1.0),
        (r"it is $3$, no: \[4", r"\]", "4", 1.0),
        ("it is $3$, no: $$4", "$$", "4", 1.0),
        (r"it is $4$.", "Question: $x$", "4", 1.0),
        ("it is 4.", " Question 2:", "4", 1.0),
        (r"it is 4, so \boxed{3", "}", "4", 0.0),
    ],
)
def test_math_reads_a_formula_that_the_stop_text_ends(
    completion: str, stop_text: str, answer: str, score: float
) -> None:
    pytest.importorskip("math_verify")
    assert resolve_reward("math")(completion, {"answer": answer}, stop_text) == score


def test_math_works_in_a_thread_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scores: list[object] = []
    reward = resolve_reward("math")
    thread = threading.Thread(target=lambda: scores.append(reward(r"\boxed{1/2}", {"answer": "0.5"})))
    thread.start()
    thread.join()
    assert scores == [1.0]
    assert caplog.records == []


def test_reasoning_gym_scores_with_the_tasks_own_scorer() -> None:
    import reasoning_gym

    reward = resolve_reward("reasoning_gym")
    options: dict[str, Any] = {"min_terms": 2, "max_terms": 2}
    row: dict[str, Any] = {**reasoning_gym.create_dataset("chain_sum", size=1, seed=3, **options)[0]}
    row["task_options"] = options
    answer: str = row["answer"]
    assert reward(answer, row) == 1.0
    assert reward(f"<think>hm 1</think> <answer> {answer} </answer> I hope", row) == 1.0
    assert reward("no number", row) == 0.0
    assert reward(f"<answer>{answer}</answer> no: <answer>x</answer>", row) == 0.0
    thoughts = f"<think>It is {answer}0.</think><answer>"
    assert reward(f"{thoughts}{answer}", row, "</answer>") == 1.0
    assert reward(f"{thoughts}x", row, "</answer>") == 0.0
    assert reward(answer, row, "\n\nQuestion 2:") == 1.0
    assert reward(f"<answer>{answer}</answer> so", row, "<answer>x</answer>") == 1.0


def test_reasoning_gym_refuses_rows_of_other_data() -> None:
    with pytest.raises(ValueError, match="not of a reasoning_gym task"):
        resolve_reward("reasoning_gym")("5", {"question": "2+3", "answer": "5"})


@pytest.mark.parametrize(
    ("name", "module", "library", "package"),
    [
        ("math", "podium_rewards.symbolic", "math_verify", "math-verify"),
        ("reasoning_gym", "podium_rewards.gym", "reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_remedy(
    name: str, module: str, library: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"reward\.name = '{name}' needs .*pip install '{package}"):
        resolve_reward(name)
