"""A controller with more than 1,023 open descriptors: select() cannot take those above."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

import podium
from podium import Worker, endpoint
from podium.rewards import Grader, RewardConfig


class Echo(Worker):
    @endpoint
    def echo(self, value: int) -> int:
        return value


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"at most {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for fd in opened:
        os.close(fd)


@pytest.mark.usefixtures("many_descriptors")
def test_workers_and_graders_start_beyond_descriptor_1023() -> None:
    with podium.connect("local", preload=()) as cluster:
        assert cluster.start(Echo.bind(), cluster.pool([2])).echo(3) == [3, 3]
    with Grader(RewardConfig(name="exact")) as grader:
        assert grader.grade(["1"], [{"answer": "1"}])[0].correct
