"""A hub that does not answer is not asked again and again."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from podium.errors import PodiumError
from podium.rollout.tasks import DataConfig, load_examples
from podium.models import ModelConfig, load_tokenizer
from podium.models.loading import longest_text
for work in (
    lambda: load_tokenizer("nobody/nothing"),
    lambda: longest_text(ModelConfig(path="nobody/nothing")),
    lambda: load_examples("nobody/nothing", DataConfig()),
):
    try:
        work()
    except PodiumError as error:
        print(type(error).__name__)
"""


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["ConfigError", "ConfigError", "DataError"]
    assert done.stderr.count("the hub at http://127.0.0.1:9 does not answer") == 1
    assert "Retrying" not in done.stderr
