"""A hub that does not answer is not asked again and again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from podium.hub import explain_offline

SCRIPT = """
from podium.errors import PodiumError
from podium.rollout.tasks import DataConfig, load_examples
from podium.models import ModelConfig, load_tokenizer
from podium.models.loading import load_scorer, position_limit
for work in (
    lambda: load_tokenizer("nobody/nothing"),
    lambda: position_limit(ModelConfig(path="nobody/nothing")),
    lambda: load_scorer("nobody/nothing"),
    lambda: load_examples("nobody/nothing", DataConfig()),
):
    try:
        work()
    except PodiumError as error:
        print(type(error).__name__, error, sep=": ")
"""
OFFLINE = (
    "it is not on this machine, and the hub is offline (no network, or HF_HUB_OFFLINE is set): connect to the "
    "network, or give the path of a copy"
)


def test_a_hub_that_does_not_answer_is_asked_once_and_the_remedy_is_a_line(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.splitlines() == [
        f"ConfigError: no tokenizer 'nobody/nothing': {OFFLINE}",
        f"ConfigError: model.path='nobody/nothing': its configuration cannot be read: {OFFLINE}",
        f"ConfigError: reward.path = 'nobody/nothing' cannot be loaded: {OFFLINE}",
        f"DataError: nobody/nothing: neither a file nor a dataset that can be loaded: {OFFLINE}",
    ]
    assert done.stderr.count("the hub at http://127.0.0.1:9 does not answer") == 1
    assert "Retrying" not in done.stderr


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("no file"), OfflineModeIsEnabled("off"), ConnectionError("no")]
)
def test_offline_mode_is_said_of_what_is_absent_and_of_nothing_else(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = OSError("transformers cannot find it")
    wrapped.__cause__ = error
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert explain_offline(wrapped) == explain_offline(error) == OFFLINE
    assert explain_offline(ValueError("the file is broken")) == ""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert explain_offline(wrapped) == ""
