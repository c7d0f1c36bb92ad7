"""Seeds of what is drawn, and the order of rows."""

from __future__ import annotations

import torch

from podium.rollout.tasks import Example
from podium.trainer.prompts import Prompt, completion_seeds, row_order


def test_seeds_depend_on_seed_and_step_alone() -> None:
    seeds = completion_seeds(3, 5, 4, 2)
    assert seeds.shape == (4, 2)
    assert len(set(seeds.flatten().tolist())) == 8
    assert torch.equal(seeds, completion_seeds(3, 5, 4, 2))
    others = [completion_seeds(3, 6, 4, 2), completion_seeds(4, 5, 4, 2), completion_seeds(3, None, 4, 2)]
    assert all(not (seeds == other).any() for other in others)
    assert torch.equal(completion_seeds(3, None, 9, 1)[:4], completion_seeds(3, None, 4, 1))  # as many as are asked for


def test_each_epoch_goes_through_all_rows_in_an_order_of_its_own() -> None:
    first, second = row_order(0, 1, 0, 50), row_order(0, 1, 1, 50)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(50))
    assert not torch.equal(first, second)
    assert torch.equal(first, row_order(0, 1, 0, 50))


def test_a_person_reads_a_prompt_without_its_template() -> None:
    ids, decode = torch.tensor([1]), lambda ids: "<|im_start|>user\nHow?<|im_end|>"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]
    for prompt, shown in (("How?", "How?"), (turns[1:], "How?"), (turns, "system: Be brief.\nuser: How?")):
        assert Prompt(ids, Example(prompt, None, {}), decode).shown == shown
