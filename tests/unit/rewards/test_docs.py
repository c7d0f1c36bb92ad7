"""docs/rewards.md does what it says: its files are written, its script is run, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from podium.config import keys_of
from podium.rewards import NAMED_REWARDS, Grader, RewardConfig
from tests.warm_python import run_python

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


def test_the_examples_run_as_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in blocks] == ["my_rewards.py", "judge.py", "try_it.py", "joined.py", "my_judge.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    done = run_python("try_it.py", cwd=tmp_path)
    assert f"```\n{done.stdout}```" in PAGE


def test_the_command_of_the_judge_leaves_it_the_time_that_it_may_take(tmp_path: Path) -> None:
    code = re.search(r"```python\n(# my_judge.py\n.*?)```", PAGE, re.DOTALL)
    limit = re.search(r"--reward.name my_judge.py:score --reward.time_limit_s (\d+)", PAGE)
    assert code is not None and limit is not None
    (tmp_path / "my_judge.py").write_text(code[1])
    config = RewardConfig(name=f"{tmp_path}/my_judge.py:score", time_limit_s=float(limit[1]))
    with Grader(config, columns=["prompt"], in_script=True):
        pass


def test_every_reward_and_every_setting_is_on_the_page() -> None:
    assert all(f"| `{name}` |" in PAGE for name in NAMED_REWARDS)
    for key in keys_of(RewardConfig, "reward"):
        default = f"{key.default:g}" if isinstance(key.default, float) else re.escape(str(key.default))
        assert re.search(rf"^\| `{re.escape(key.path)}` \| `?{default}`? \|", PAGE, re.MULTILINE), key.path


def test_the_rewards_of_the_page_on_trl_are_rewards() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from-trl.md").read_text()
    section = page.partition("## Rewards")[2].partition("\n## ")[0]
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(code, names)
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "solution": "4"}
    expected = {"reward": (1.0, 0.0), "score": (1.0, 0.0), "joined": (1.0, 0.2)}
    for name, (right, wrong) in expected.items():
        with Grader(RewardConfig(processes=1), reward=names[name]) as grader:
            grades = grader.grade(["4", "<answer>5"], [row, row])
        assert [grade.score for grade in grades] == [right, wrong], name


def test_the_reward_of_trl_on_the_page_on_rewards_is_one() -> None:
    code = re.findall(r"```python\n(def score\(completions.*?)```", PAGE, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    with Grader(RewardConfig(processes=1), reward=names["score"]) as grader:
        assert grader.submit("4", {"prompt": "2+2=", "solution": "4"}).result().score == 1.0
