"""docs/rewards.md does what it says: its files are written, its script is run, and prints what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from podium.config import keys_of
from podium.rewards import NAMED_REWARDS, RewardConfig

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


def test_the_examples_run_as_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in blocks] == ["my_rewards.py", "try_it.py", "joined.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        [sys.executable, "try_it.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True
    )
    assert f"```\n{done.stdout}```" in PAGE


def test_every_reward_and_every_setting_is_on_the_page() -> None:
    assert all(f"| `{name}` |" in PAGE for name in NAMED_REWARDS)
    for key in keys_of(RewardConfig, "reward"):
        default = f"{key.default:g}" if isinstance(key.default, float) else re.escape(str(key.default))
        assert re.search(rf"^\| `{re.escape(key.path)}` \| `?{default}`? \|", PAGE, re.MULTILINE), key.path
