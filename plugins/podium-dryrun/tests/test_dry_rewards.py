"""A dry run refuses the rewards that the run refuses, and says of them what the run says."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.errors import ConfigError, RewardError
from podium.telemetry import Note, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium_dryrun import describe_data
from tests.integration.test_environments import config_of
from tests.integration.training import tiny, train

MODULE = """
def good(completion, row): return 1.0
def foreign(completion, gold): return 1.0
def hidden(*args, **kwargs): return 1.0
def absent(completion, row): return float(row.get("gold") == completion)
def verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def lists(completions, **kwargs): return [1.0 for _ in completions]
class Judge:
    def __init__(self, key): ...
    def __call__(self, completion, row): return 1.0
"""


@pytest.fixture(params=["file", "module"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the rewards are: in a file, or in a module that nobody has imported yet."""
    name = f"rewards_of_{request.node.name.partition('[')[0]}"[:60]
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path / f"{name}.py") if request.param == "file" else name


def dry(config: GRPOConfig) -> str:
    trainer = PPOTrainer(config, cluster="inline", show=False)
    return describe_data(trainer.read_data, trainer.check_grader)


REFUSED = {
    "foreign": "its parameter 'gold' is neither",
    "hidden": "does not say what it takes",
    "Judge": "is a class",
    "nothing": "has no 'nothing'",
}


@pytest.mark.everyday("file")
def test_what_the_run_refuses(place: str, tmp_path: Path) -> None:
    for name, message in REFUSED.items():
        for names in (f"{place}:{name}", (f"{place}:good", f"{place}:{name}")):
            config = tiny(GRPOConfig, tmp_path, run={"name": name}, reward={"name": names})
            for start in (dry, train):
                with pytest.raises(ConfigError, match=message):
                    start(config)
    assert "number 0" in dry(tiny(GRPOConfig, tmp_path, reward={"name": f"{place}:good"}))


def test_what_the_run_says(place: str, tmp_path: Path) -> None:
    names = ("absent", "verl", "lists")
    said = dry(tiny(GRPOConfig, tmp_path, reward={"name": tuple(f"{place}:{name}" for name in names)}))
    assert "reads 'gold' of row, and some rows of the data do not have it" in said
    assert "no column data_source, so the reward verl gets None for it" in said
    assert "the reward lists takes lists of completions" in said


@pytest.mark.everyday("file")
def test_a_reward_beside_an_environment_is_refused_only_when_it_is_called(place: str, tmp_path: Path) -> None:
    reward = {"name": f"{place}:foreign"}
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        train(config_of("twice", tmp_path, reward=reward))  # which scores its sessions itself
        text = "\n".join(notes)
        assert "its parameter 'gold' is neither" in text
        assert "It is called, and then ends the run, where the environment gives no score" in text
        assert "has scored nothing yet" in text
        assert "its parameter 'gold' is neither" in dry(config_of("twice", tmp_path, reward=reward))
        with pytest.raises(RewardError, match="its parameter 'gold' is neither"):
            train(config_of("graded_by_reward", tmp_path, run={"name": "asks"}, reward=reward))
    finally:
        unsubscribe()
