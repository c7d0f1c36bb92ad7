"""The number of steps of a run follows from its data, and what a user would not expect of it is said."""

from __future__ import annotations

from typing import Any

import pytest

from podium.config import build_config
from podium.telemetry import Note, subscribe
from podium.trainer import GRPOConfig, SFTConfig
from podium.trainer.run_setup import count_steps


def count(cls: type[Any], examples: int, **sections: Any) -> tuple[int, list[str]]:
    """The number of steps of a run over so many examples, and the notes."""
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        return count_steps(build_config(cls, sections), examples).run.steps, notes
    finally:
        unsubscribe()


def test_an_epoch_has_each_example_once() -> None:
    assert count(SFTConfig, 8, run={"epochs": 1}, batch={"examples": 8}) == (1, [])
    assert count(SFTConfig, 17, run={"epochs": 1}, batch={"examples": 8}) == (3, [])
    assert count(GRPOConfig, 16, run={"steps": 7}, batch={"prompts": 16}) == (7, [])


@pytest.mark.parametrize(
    ("cls", "batch", "run", "steps", "told"),
    [
        (SFTConfig, {"examples": 8}, {"epochs": 1}, 1, "and run.epochs = 1 means 4.0 passes over them"),
        (GRPOConfig, {"prompts": 16}, {"steps": 3}, 3, "and run.steps = 3 means 24.0 passes over them"),
        (GRPOConfig, {"prompts": {"count": 4}}, {"steps": 3}, 3, "and run.steps = 3 means 6.0 passes over them"),
    ],
)
def test_fewer_examples_than_a_step_takes_are_told(
    cls: type[Any], batch: dict[str, Any], run: dict[str, Any], steps: int, told: str
) -> None:
    counted, (note,) = count(cls, 2, batch=batch, run=run)
    assert counted == steps and told in note
    assert note.startswith(f"batch.{next(iter(batch))} = ") and "only 2 examples" in note
