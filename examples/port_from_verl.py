"""A verl worker with two device meshes, ported: one set of ranks, an actor laid out one way and a rollout another.

python examples/port_from_verl.py
python examples/port_from_verl.py --backend inline      one rank in this process, for a debugger

In verl 0.9.1 (single_controller/base/decorator.py) such a worker registers, for each mesh, its rank's place and whether
its result is taken, and names the mesh at each method:

    class ActorRollout(Worker):                                             # here
        def __init__(self, config):
            super().__init__()                                              # not needed
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            self._register_dispatch_collect_info(                           # Mesh(dp=3, tp=2), given to start()
                "actor", dp_rank=mesh["dp"].get_local_rank(), is_collect=mesh["tp"].get_local_rank() == 0)
            ...                                                             # the same for "rollout"

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
        def generate_sequences(self, data: DataProto) -> DataProto: ...     # dispatch=shard("rollout"), concat()

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
        def compute_log_prob(self, data: DataProto) -> DataProto: ...       # dispatch=shard("actor"), concat()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def update_weights(self): ...                                       # @endpoint

    pool = RayResourcePool([6], use_gpu=False)                              # pool = cluster.pool([6])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(ActorRollout), config))
                                                                            # cluster.start(ActorRollout.bind(...), ...)

The model is a table of next-token logits, cut by columns over the tensor-parallel ranks, so that every number below is
a real collective's and can be checked: the same class, made by hand in this script, is the reference.

Legend: B rows, T tokens of a row, N = B * (T - 1) steps, V tokens of the vocabulary, C this rank's columns of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import podium
from podium import Batch, Handle, Mesh, Worker, concat, endpoint, nothing, reduce, shard

MESHES = {"actor": Mesh(dp=3, tp=2), "rollout": Mesh(dp=2, infer_tp=3)}
ALONE = {name: Mesh(dict.fromkeys(mesh.axes, 1)) for name, mesh in MESHES.items()}
VOCABULARY, LENGTH = 12, 6
ROWS, STEPS, LEARNING_RATE = 35, 12, 40.0  # 35 divides by neither 3 nor 2: parts are uneven


class Layout:
    """This rank's place on one of its group's meshes, and the process group of each axis (None where it is alone)."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.place = mesh.coordinate(rank)
        self.sizes = mesh.axes
        self.groups: Mapping[str, dist.ProcessGroup | None] = dict.fromkeys(mesh.axes)
        if mesh.size > 1:
            devices = init_device_mesh("cpu", tuple(mesh.axes.values()), mesh_dim_names=tuple(mesh.axes))
            self.groups = {axis: devices.get_group(axis) for axis in mesh.axes}

    def columns(self, axis: str) -> slice:
        """The columns of the vocabulary that this rank holds, cut over ``axis``."""
        share = VOCABULARY // self.sizes[axis]
        return slice(self.place[axis] * share, (self.place[axis] + 1) * share)

    def sum(self, value: Tensor, axis: str) -> Tensor:
        """``value`` summed over the ranks along ``axis``, in place."""
        return self._reduce(value, axis, dist.ReduceOp.SUM)

    def max(self, value: Tensor, axis: str) -> Tensor:
        """The largest of each entry over the ranks along ``axis``, in place."""
        return self._reduce(value, axis, dist.ReduceOp.MAX)

    def join(self, columns: Tensor, axis: str) -> Tensor:
        """``columns [V, C]`` of all ranks along ``axis``, side by side: ``[V, V]``."""
        if self.groups[axis] is None:
            return columns
        parts = [torch.empty_like(columns) for _ in range(self.sizes[axis])]
        dist.all_gather(parts, columns.contiguous(), group=self.groups[axis])
        return torch.cat(parts, dim=1)

    def _reduce(self, value: Tensor, axis: str, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.groups[axis] is not None:
            dist.all_reduce(value, how, group=self.groups[axis])
        return value


class ActorRollout(Worker):
    """A policy that trains on one mesh and generates on another, both over the same ranks."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        meshes = {**ALONE, **self.ctx.meshes}  # made by hand, a worker has no meshes but the default one
        self.actor = Layout(meshes["actor"], self.ctx.rank)
        self.rollout = Layout(meshes["rollout"], self.ctx.rank)
        logits_VV = 0.1 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.trained_VC = logits_VV[:, self.actor.columns("tp")].clone()
        self.sampled_VC = logits_VV[:, self.rollout.columns("infer_tp")].clone()

    @endpoint(dispatch=shard("rollout"), collect=concat())
    def generate(self, prompts: Batch) -> Batch:
        """Sample a completion of each prompt: from ``tokens [B, 1]`` and ``seed [B]`` to ``tokens [B, T]``."""
        mine = self.rollout.columns("infer_tp")
        tokens = [prompts.dense("tokens")[:, 0]]
        for step in range(LENGTH - 1):
            scores = self.sampled_VC[tokens[-1]] + gumbel(prompts.dense("seed"), step)[:, mine]
            best, at = scores.max(dim=1)
            best_of_all = self.rollout.max(best.clone(), "infer_tp")
            tokens.append(self.rollout.max(torch.where(best == best_of_all, at + mine.start, -1), "infer_tp"))
        return prompts.with_columns(tokens=torch.stack(tokens, dim=1))

    @endpoint(dispatch=shard("actor"), collect=concat())
    def compute_log_prob(self, batch: Batch) -> Batch:
        """Add ``logprobs [B, T - 1]`` of the tokens."""
        tokens = batch.dense("tokens")
        logprobs, _ = self._logprobs(tokens)
        return batch.with_columns(logprobs=logprobs.view(len(tokens), -1))

    @endpoint(dispatch=shard("actor"), collect=reduce("sum"))
    def update_actor(self, batch: Batch) -> dict[str, float]:
        """One step of policy gradient on ``tokens [B, T]`` and ``advantages [B]``; sums over the rows."""
        tokens, advantages_N = batch.dense("tokens"), batch.dense("advantages").repeat_interleave(LENGTH - 1)
        logprobs_N, probabilities_NC = self._logprobs(tokens)
        rows = self.actor.sum(torch.tensor(float(len(tokens))), "dp")
        residual_NC = self._one_hot(tokens) - probabilities_NC
        gradient_VC = torch.zeros_like(self.trained_VC)
        gradient_VC.index_add_(0, tokens[:, :-1].reshape(-1), residual_NC * advantages_N[:, None])
        self.trained_VC += self.learning_rate * self.actor.sum(gradient_VC, "dp") / rows
        return {"rows": float(len(tokens)), "loss": -float(advantages_N @ logprobs_N / rows)}

    @endpoint(collect=nothing())
    def update_weights(self) -> None:
        """Give the rollout its columns of what the actor has learned."""
        self.sampled_VC = self.actor.join(self.trained_VC, "tp")[:, self.rollout.columns("infer_tp")].clone()

    def _logprobs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of each step: the log-probability ``[N]`` of its token, and this rank's columns ``[N, C]`` of all of them."""
        logits_NC = self.trained_VC[tokens[:, :-1].reshape(-1)]
        largest_N = self.actor.max(logits_NC.amax(dim=1), "tp")
        exp_NC = (logits_NC - largest_N[:, None]).exp()
        total_N = self.actor.sum(exp_NC.sum(dim=1), "tp")
        chosen_N = self.actor.sum((logits_NC * self._one_hot(tokens)).sum(dim=1), "tp")
        return chosen_N - largest_N - total_N.log(), exp_NC / total_N[:, None]

    def _one_hot(self, tokens: Tensor) -> Tensor:
        """``[N, C]``: 1 where a step's token is one of this rank's columns."""
        columns = torch.nn.functional.one_hot(tokens[:, 1:].reshape(-1), VOCABULARY).float()
        return columns[:, self.actor.columns("tp")]


def gumbel(seeds: Tensor, step: int) -> Tensor:
    """Noise ``[B, V]`` that depends on a row's seed and the step alone, so on no layout."""
    generators = [torch.Generator().manual_seed(LENGTH * seed + step) for seed in seeds.tolist()]
    uniform = torch.stack([torch.rand(VOCABULARY, generator=generator) for generator in generators])
    return -(-uniform.clamp(1e-6, 1 - 1e-6).log()).log()


def train(policy: ActorRollout | Handle[ActorRollout]) -> tuple[list[float], Tensor]:
    """The loop, as the trainer of verl writes it: the mean reward of each step, and the last log-probabilities."""
    rewards, logprobs = [], torch.empty(0)
    for step in range(STEPS):
        prompts = Batch({"tokens": torch.arange(ROWS)[:, None] % VOCABULARY, "seed": torch.arange(ROWS) + step * ROWS})
        batch = policy.generate(prompts)
        tokens = batch.dense("tokens")
        reward = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float().mean(dim=1)  # counting upwards
        batch = policy.compute_log_prob(batch.with_columns(advantages=reward - reward.mean()))
        metrics = policy.update_actor(batch)
        assert metrics["rows"] == ROWS, "every row counts once, whatever the layout"
        policy.update_weights()
        rewards.append(float(reward.mean()))
        logprobs = batch.dense("logprobs")
    return rewards, logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="local")
    with podium.connect(parser.parse_args().backend) as cluster:
        meshes = MESHES if cluster.capabilities.collectives else ALONE
        ranks = meshes["actor"].size
        policy = cluster.start(ActorRollout.bind(LEARNING_RATE), cluster.pool([ranks]), meshes=meshes)
        rewards, logprobs = train(policy)
    expected_rewards, expected_logprobs = train(ActorRollout(LEARNING_RATE))  # by hand: an object, its methods plain
    assert rewards == expected_rewards, "the layout changed what was sampled"
    assert torch.allclose(logprobs, expected_logprobs, atol=1e-4), "the layout changed what was learned"
    assert rewards[-1] > 2 * rewards[0], "nothing was learned"
    print(f"ranks: {ranks}; mean reward in {STEPS} steps: {rewards[0]:.2f} -> {rewards[-1]:.2f}, as one rank learns it")


if __name__ == "__main__":
    main()
