"""The Parquet files of evaluations on held-out preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podium.rollout.tasks import Example
from podium.rollout.tasks.messages import message_text
from podium.runs.files import step_name
from podium.runs.run_files import RunFiles
from podium.telemetry.held_out import ACCURACY
from podium.trainer.completion_files import to_utf8
from podium_preferences.rows import EncodedPreferences, list_answers

__all__ = ["write_preferences"]


def write_preferences(
    folder: RunFiles, step: int, rows: EncodedPreferences, scores: Mapping[str, Sequence[float | None]]
) -> None:
    """Write held-out preferences, with their ``scores`` by the names of columns, to the Parquet file of ``step`` in
    ``folder``. The better answer is in ``expected``, and the worse one in ``rejected``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    answers = [[_write_turns(_turns_of(answer)) for answer in list_answers(example)] for example in rows.examples]
    table = {
        "step": pa.array([step] * len(rows), pa.int64()),
        "group": pa.array(range(len(rows)), pa.int64()),
        "prompt": pa.array([_write_turns(example.prompt) for example in rows.examples], pa.string()),
        "expected": pa.array([texts[0] for texts in answers], pa.string()),
        "rejected": pa.array([texts[1] if len(texts) > 1 else None for texts in answers], pa.string()),
        **{"correct" if name == ACCURACY else name: pa.array(column, pa.float64()) for name, column in scores.items()},
    }
    with folder.replace(f"{step_name(step)}.parquet") as file:
        pq.write_table(pa.table(table), file, compression="zstd")


def _turns_of(example: Example) -> str | Sequence[Mapping[str, Any]]:
    return example.turns or example.answer or ""


def _write_turns(said: str | Sequence[Mapping[str, Any]]) -> str:
    """A text, or the turns of a conversation without the template."""
    if isinstance(said, str):
        return to_utf8(said)
    if len(said) == 1:
        return to_utf8(message_text(said[0]))
    return to_utf8("\n".join(f"{turn['role']}: {message_text(turn)}" for turn in said))
