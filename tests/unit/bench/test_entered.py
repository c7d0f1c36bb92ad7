"""The list of the files that a step enters."""

from __future__ import annotations

import pytest

from bench.entered import count_calls


@pytest.mark.exhaustive
def test_a_step_enters_the_trainer_and_no_command() -> None:
    files = {file for file, _ in count_calls(steps=2)}
    assert {"trainer/ppo.py", "workers/policy.py", "algorithms/objective.py"} <= files
    assert not any(file.startswith("cli/") for file in files)
