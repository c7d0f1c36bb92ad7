from __future__ import annotations

import pytest
import torch

from podium.data import Batch
from podium.errors import DataError
from podium.training.micro_batches import cut, plan
from tests.unit.workers.tiny import LENGTHS, recorded, tokens


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_a_plan_holds_every_row_once_within_its_budget(packed: bool, budget: int) -> None:
    groups = plan(LENGTHS, budget, packed=packed)
    assert sorted(row for group in groups for row in group) == list(range(len(LENGTHS)))
    for group in groups:
        lengths = [LENGTHS[row] for row in group]
        cost = sum(lengths) if packed else len(lengths) * max(lengths)
        assert cost <= budget or len(group) == 1


def test_rows_of_like_length_go_together() -> None:
    assert plan([3, 30, 4, 29], 60, packed=False) == [[1, 3], [2, 0]]


def test_rows_on_two_sides_of_a_turn_do_not_share_a_pass() -> None:
    assert plan([3, 30, 16, 17], 1000, packed=True, turn=16) == [[1, 3], [2, 0]]


@pytest.mark.parametrize("packed", [False, True])
def test_every_token_with_loss_appears_once_with_the_place_that_predicts_it(packed: bool) -> None:
    batch = recorded()
    values, mask = batch.jagged("tokens").values, batch.jagged("loss_mask").values
    seen = []
    for micro in cut(batch, 40, packed=packed, columns=("advantages",)):
        ids = micro.input_ids.flatten()
        assert torch.equal(values[micro.index], micro.targets)
        assert torch.equal(ids[micro.select], values[micro.index - 1])
        assert torch.equal(micro.columns["advantages"], batch.jagged("advantages").values[micro.index])
        if packed:
            assert micro.position_ids is not None
            assert micro.packed is not None
            starts = (micro.position_ids[0] == 0).nonzero()[:, 0]
            assert torch.equal(starts.int(), micro.packed.offsets[:-1])
        seen.append(micro.index)
    assert torch.equal(torch.cat(seen).sort().values, mask.nonzero()[:, 0])


def test_rows_without_loss_and_empty_batches_cost_nothing() -> None:
    rows, mask = tokens((4, 6))
    batch = Batch({"tokens": rows, "loss_mask": rows.like(mask & (torch.arange(10) < 4))})
    (micro,) = cut(batch, 100, packed=False)
    assert micro.index.tolist() == mask[:4].nonzero()[:, 0].tolist()
    assert list(cut(batch.slice(0, 0), 100, packed=False)) == []


def test_loss_on_a_first_token_and_misaligned_columns_are_errors() -> None:
    rows, mask = tokens((4, 6))
    with pytest.raises(DataError, match="first token"):
        list(cut(Batch({"tokens": rows, "loss_mask": rows.like(torch.ones(10, dtype=torch.bool))}), 9, packed=False))
    shifted, _ = tokens((6, 4))
    batch = Batch({"tokens": rows, "loss_mask": rows.like(mask), "advantages": shifted})
    with pytest.raises(DataError, match="advantages"):
        list(cut(batch, 9, packed=False, columns=("advantages",)))
