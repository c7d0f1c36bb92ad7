"""What rests leaves its device, and comes back to the last bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from podium.models import ModelConfig, load_model
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium.training import TrainEngine
from podium.training.offload import Offload
from tests.unit.training.test_train_engine import make_engine as make_train_engine, sft_step
from tests.unit.workers.tiny import ADAPTED, TINY, recorded


def own_part(tensor: Any) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held(tensors: list[Tensor]) -> int:
    """Bytes of the storages."""
    local = map(own_part, tensors)
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in local)}.values())


def state_of(engine: TrainEngine) -> list[Tensor]:
    assert engine.optimizer is not None
    return [value for state in engine.optimizer.state.values() for value in state.values()]


def test_storages_leave_and_come_back_under_their_views() -> None:
    whole = torch.randn(6, 4)
    tensors = [whole[:3], whole[3:], torch.arange(5), torch.tensor([True, False]), torch.zeros(0)]
    before, gradient = [tensor.clone() for tensor in tensors], torch.ones(7)
    offload = Offload(lambda: tensors, lambda: [gradient, whole])
    for _ in range(2):
        offload.sleep()
        offload.sleep()
        assert not offload.awake
        assert held([*tensors, gradient]) == 0
        offload.wake()
        offload.wake()
        assert offload.awake
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
        assert gradient.shape == (7,)
        assert whole[3:].data_ptr() == tensors[1].data_ptr()


CASES = {
    "float32": (TINY, {}),
    "adapters": (ADAPTED, {}),
    "bfloat16": (ModelConfig(config=TINY.config, tokenizer=TINY.tokenizer, dtype="bfloat16"), {}),
    "fsdp2": (TINY, {"strategy": "fsdp2"}),
}


@pytest.mark.everyday("float32-all", "adapters-all", "fsdp2-optimizer")
@pytest.mark.parametrize(
    ("case", "offload"),
    list(product(CASES, ("optimizer", "all"))),
)
def test_steps_with_rests_between_them_are_the_same_bits(case: str, offload: str, tmp_path: Path) -> None:
    model, parallel = CASES[case]
    if case == "fsdp2":
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        resting = make_train_engine(model=model, offload=offload, **parallel)
        plain = make_train_engine(model=model, **parallel)
        for _ in range(3):
            resting.rest()
            assert held(state_of(resting)) == 0
            assert held(list(resting.parallel.gradients())) == 0
            assert (held(list(resting.model.parameters())) == 0) == (offload == "all")
            one, other = sft_step(resting, recorded()), sft_step(plain, recorded())
            assert one == other
        resting.rest()
        with resting.awake():
            for own, twin in zip(state_of(resting), state_of(plain), strict=True):
                assert torch.equal(own_part(own), own_part(twin))
            assert held(state_of(resting)) > 0
        assert held(state_of(resting)) == 0
        with torch.no_grad():
            resting.wake()
            for own, twin in zip(resting.model.parameters(), plain.model.parameters(), strict=True):
                assert torch.equal(own_part(own), own_part(twin))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_what_woke_sleeps_again_where_the_rest_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_train_engine(offload="all")
    sft_step(engine, recorded())
    engine.rest()
    wake = Offload.wake

    def without_room(part: Offload) -> None:
        if part.awake or held(list(engine.model.parameters())) == 0:
            wake(part)
        else:
            raise torch.OutOfMemoryError("no room for the optimizer's state")

    monkeypatch.setattr(Offload, "wake", without_room)
    with pytest.raises(torch.OutOfMemoryError), engine.awake():
        pass
    assert held(list(engine.model.parameters())) == 0


def test_nothing_rests_unless_it_is_asked_for() -> None:
    engine = make_train_engine()
    sft_step(engine, recorded())
    engine.rest()
    assert held(state_of(engine)) > 0
    assert held(list(engine.model.parameters())) > 0
    evaluating = TrainEngine(
        load_model(TINY), optim=None, parallel=make_train_engine(offload="all").config, device=torch.device("cpu")
    )
    assert held(list(evaluating.model.parameters())) == 0  # from the beginning
    evaluating.wake()
    evaluating.rest(weights=False)
    assert held(list(evaluating.model.parameters())) > 0


@pytest.mark.parametrize("name", ["native", "transformers"])
def test_an_engine_over_weights_that_rested_draws_what_it_drew(name: Any) -> None:
    model = load_model(TINY)
    engine = make_engine(EngineConfig(name=name), model)
    draw = (([4, 9], [7]), SamplingParams(max_new_tokens=8), [1, 2])
    before = engine.generate(*draw)
    offload = Offload(lambda: (*model.parameters(), *model.buffers()))
    engine.release()
    offload.sleep()
    offload.wake()
    after = engine.generate(*draw)
    assert [one.token_ids.tolist() for one in after] == [one.token_ids.tolist() for one in before]
    assert all(torch.equal(one.logprobs, other.logprobs) for one, other in zip(after, before, strict=True))
