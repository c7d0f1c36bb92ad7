"""What bench.memory reads from a dry run, and the page that it writes."""

from __future__ import annotations

import json

from bench import memory

LINES = """# memory
model        63.71 M parameters, 63.71 M trained, float32
memory       about 1.50 GiB each on processes 0-1 (estimate):
  weights                            121.5 MiB
memory       about 743.5 MiB on process 2 (estimate):
  generator's own weights            243.0 MiB
memory       about 3.73 GiB on all processes
"""


def test_each_process_has_the_estimate_of_its_kind() -> None:
    assert memory.estimates(LINES) == [1536, 1536, 744]


def test_the_page_has_what_was_measured() -> None:
    results = json.loads(memory.RESULTS.read_text())
    assert memory.section(results) in memory.PAGE.read_text(), "run python -m bench.memory --report"
    for name in memory.FITTED.keys() & results.keys():
        run = results[name]
        for estimate, peak in zip(run["estimate"], run["measured"], strict=True):
            assert abs(estimate / peak - 1) <= 0.15, name
