"""The soak sees what it looks for: memory, descriptors and shared memory of all processes, and their growth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

import podium
from bench import soak
from bench.census import descendants, take_census

MIB = 1 << 20


def test_a_census_counts_a_segment_once_whoever_has_it() -> None:
    before = take_census(os.getpid())
    fd = os.memfd_create("census")
    os.write(fd, bytes(MIB))
    os.set_inheritable(fd, True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        assert child.pid in descendants(os.getpid())
        after = take_census(os.getpid())
    finally:
        os.close(fd)
        child.communicate(b"\n")
    assert after.processes == before.processes + 1
    assert after.segments == before.segments + 1
    assert after.segment_bytes == before.segment_bytes + MIB
    assert after.descriptors > before.descriptors + 1
    assert after.rss > before.rss


def test_growth_is_the_last_quarter_against_the_first() -> None:
    census = take_census(os.getpid())
    lines = soak.report([replace(census, segments=count) for count in (1, 1, 5, 9, 9, 9, 7, 7)])
    (line,) = [line for line in lines if line["figure"] == "segments"]
    assert (line["first_quarter"], line["last_quarter"], line["growth"]) == (1, 7, 6)


def test_a_short_soak_survives_its_faults() -> None:
    with podium.connect("local", echo=False) as cluster:
        samples, counts = soak.soak(cluster, steps=40, kills=2, seed=1)
    assert len(samples) == 40
    assert (counts["killed_producer"], counts["killed_consumer"]) == (1, 1)


def test_figures_are_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--steps", "4", "--kills", "0"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"figure", "first_quarter", "last_quarter", "growth"} == set(lines[0])
    assert lines[-1]["steps"] == 4
