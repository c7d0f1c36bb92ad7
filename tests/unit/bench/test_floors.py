"""The raw floors move what they claim to move: a floor that cheats would flatter or shame Podium."""

from __future__ import annotations

import pytest
import torch

from bench.floors import HopFloor, PipeFloor, SharedFloor, copy_s, decode_rate, products_s, step_rate
from bench.workload import SHAPES, StepLoad


def test_every_pipe_worker_answers() -> None:
    with PipeFloor.start(3) as floor:
        for _ in range(3):
            floor.noop()


@pytest.mark.parametrize("reuse", [False, True])
def test_an_echo_comes_back_whole_and_in_order(reuse: bool) -> None:
    rows = torch.arange(4 * 1000, dtype=torch.float32).view(4, 1000)
    joined = torch.zeros_like(rows) if reuse else None
    with SharedFloor.start(2, rows.nbytes // 2) as floor:
        for scale in (1, 2):  # the second time over memory that holds the first answer
            assert torch.equal(floor.echo(rows * scale, joined), rows * scale)


def test_a_broadcast_lands_in_the_one_segment_all_workers_see() -> None:
    rows = torch.rand(8, 1024)
    with SharedFloor.start(2, rows.nbytes, one_inbox=True) as floor:
        floor.broadcast(rows)
        assert floor._inboxes[0] is floor._inboxes[1]
        assert torch.equal(floor._inboxes[0].bytes_N.view(torch.float32), rows.view(-1))


def test_a_hop_passes_the_tensor_and_takes_longer_the_more_of_it_is_looked_at() -> None:
    with HopFloor.start() as floor:
        for nbytes in (1, 4097, 1 << 20):  # the floor itself checks what arrived
            figures = floor.hop(nbytes, fresh=nbytes == 1)
            assert set(figures) == {"put", "hop", "inside", "touch"}
            assert 0 < figures["inside"] < figures["hop"]


def test_a_copy_takes_time() -> None:
    assert copy_s(1 << 20, fresh=True) > 0
    assert copy_s(1 << 20, fresh=False) > 0


def test_products_of_more_tokens_take_longer_and_threads_stay_as_they_were() -> None:
    threads = torch.get_num_threads()
    small, large = (StepLoad(prompts=prompts, new_tokens=4) for prompts in (2, 64))
    assert products_s(SHAPES["1m"], 2048) > products_s(SHAPES["1m"], 16) > 0
    assert decode_rate(SHAPES["1m"], 128) > 0
    assert step_rate(small) > 0
    assert step_rate(large) > 0
    assert torch.get_num_threads() == threads
