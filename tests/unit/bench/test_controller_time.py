"""What the controller's time is, of steps whose times are known."""

from __future__ import annotations

import pytest

from bench.controller_time import WARMUPS, Mark, Meter

MS = 1_000_000


@pytest.fixture
def meter() -> Meter:
    """After the warm-up, three steps of 100 ms. In each, workers and graders work for 40 and 50 ms, 10 ms apart."""
    meter = Meter()
    meter.marks = [Mark(0, 0, 0)] * (WARMUPS - 1)
    for step in range(4):
        began = 100 * step * MS
        meter.marks.append(Mark(began, 2 * step * MS, 5 * step * MS))
        meter.working += [
            (began, began + 40 * MS),
            (began + 20 * MS, began + 30 * MS),
            (began + 50 * MS, began + 100 * MS),
        ]
        meter.computed += [
            ("generate", began + 45 * MS, 2 * step * MS + MS // 2),
            ("update", began + 99 * MS, 2 * step * MS + 3 * MS // 2),
            ("end", began + 100 * MS, 2 * (step + 1) * MS),
        ]
        meter.stages += [("generate", began, began + 45 * MS), ("update", began + 48 * MS, began + 100 * MS)]
    return meter


def test_the_shares_of_a_step(meter: Meter) -> None:
    found = {(row.name, row.unit): row.median for row in meter.rows("split")}
    assert found == pytest.approx(
        {
            ("step_s", "s"): 0.1,
            ("controller_waits_split", "%"): 10,
            ("controller_waits_split", "ms"): 10,
            ("controller_main_split", "%"): 2,
            ("controller_main_split", "ms"): 2,
            ("controller_process_split", "%"): 5,
            ("controller_process_split", "ms"): 5,
        }
    )


def test_where_nobody_works(meter: Meter) -> None:
    waits = {name: spent[0] for name, spent in meter.waits_ms().items()}
    assert waits == pytest.approx({"generate": 5, "update": 2, "between": 3})


def test_what_the_thread_that_runs_the_steps_computes(meter: Meter) -> None:
    assert meter.computed_ms() == {"generate": [0.5] * 3, "update": [1.0] * 3, "end": [0.5] * 3}
