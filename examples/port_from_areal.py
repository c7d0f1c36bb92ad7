"""An AReaL job, ported: two rollout workers sample while two training workers learn, with a bound on staleness.

python examples/port_from_areal.py
python examples/port_from_areal.py --backend inline      in this process, for a debugger

In AReaL 1.0.4 (api/scheduler_api.py, infra/controller/train_controller.py) a controller does for its training side:

    job = Job(role="actor", replicas=2, tasks=[SchedulingSpec(cpu=1, mem=1)])           # here: cluster.pool([2])
    scheduler.create_workers(job)
    workers = scheduler.get_workers("actor", timeout=60)
    for rank, worker in enumerate(workers):
        await scheduler.set_worker_env(worker.id, {"RANK": str(rank), ...})             # self.ctx
        await scheduler.create_engine(worker.id, "my.Actor", config=config)             # start(Actor.bind(...), pool)
    await gather(*[scheduler.async_call_engine(w.id, "initialize") for w in workers])   # __init__
    parts, order = _dispatch_tensors(trajectories, dp_size=2)                           # shard(balance="tokens")
    await gather(*[scheduler.async_call_engine(w.id, "train_batch", None, part)         # actor.train_batch(batch)
                   for w, part in zip(workers, parts)])
    scheduler.call_engine(workers[0].id, "get_version")                                 # actor.version()
    scheduler.delete_workers("actor")                                                   # the end of `with`

Trajectories are dicts of padded tensors there; results stay on their workers as RTensors until clear_batches() frees
them. Here they are rows of a Batch, jagged and so without padding, and what nobody holds any more is freed.

Legend: B rows (trajectories), N tokens of all rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor

import podium
from podium import Batch, Call, Cluster, Handle, Jagged, Worker, concat, endpoint, first, nothing, reduce, shard

VOCABULARY, GROUPS, SAMPLES, LONGEST = 8, 8, 6, 7
STEPS, MAX_STALENESS, LEARNING_RATE = 30, 1, 0.05

Weights = dict[str, Tensor]


class Policy(torch.nn.Module):
    """Log-probabilities of the next token, from the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every worker
        self.network = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Of ``tokens [B]``: ``[B, V]``."""
        return self.network(tokens).log_softmax(dim=-1)

    def logprobs(self, tokens: Jagged) -> Tensor:
        """``[N]``: of each token given the one before it; what stands at a row's first token means nothing."""
        return self(tokens.values.roll(1)).gather(1, tokens.values[:, None])[:, 0]


class Rollout(Worker):
    """An inference engine. Each is a group of its own: it is called, fails and restarts alone."""

    def __init__(self, seed: int) -> None:
        self.policy, self.version = Policy(), 0
        self.generator = torch.Generator().manual_seed(seed)

    @endpoint(collect=first())
    @torch.no_grad()
    def generate(self, prompts: Batch) -> Batch:
        """Sample ``length [B]`` tokens after each of ``tokens [B, 1]``."""
        tokens, lengths = prompts.dense("tokens"), prompts.dense("length").tolist()
        logprobs = torch.zeros(len(tokens), 1)
        for _ in range(max(lengths)):
            next_BV = self.policy(tokens[:, -1])
            sampled = torch.multinomial(next_BV.exp(), 1, generator=self.generator)
            tokens = torch.cat([tokens, sampled], dim=1)
            logprobs = torch.cat([logprobs, next_BV.gather(1, sampled)], dim=1)
        rows = Jagged.from_rows([row[: 1 + length] for row, length in zip(tokens, lengths, strict=True)])
        is_sampled = torch.ones_like(rows.values, dtype=torch.bool)
        is_sampled[rows.offsets[:-1]] = False
        return Batch(
            {
                "tokens": rows,
                "loss_mask": rows.like(is_sampled),
                "rollout_logprobs": Jagged.from_rows(
                    [row[: 1 + length] for row, length in zip(logprobs, lengths, strict=True)]
                ),
                "versions": rows.like(torch.full_like(rows.values, self.version)),
                "group": prompts.dense("group"),
            }
        )

    @endpoint(collect=nothing())
    def load_weights(self, weights: Weights, version: int) -> None:
        self.policy.load_state_dict(weights)
        self.version = version


class Actor(Worker):
    """A training engine, data parallel over the ranks of its group."""

    def __init__(self, learning_rate: float) -> None:
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), learning_rate)
        self.steps = 0

    @endpoint(dispatch=shard(balance="tokens"), collect=reduce("sum"))
    def train_batch(self, batch: Batch) -> dict[str, float]:
        """One optimizer step over the rows of all ranks; sums over them."""
        tokens, mask_N = batch.jagged("tokens"), batch.jagged("loss_mask").values
        total = self._sum(mask_N.sum().float())
        logprobs_N = self.policy.logprobs(tokens)
        stale_N = (logprobs_N.detach() - batch.jagged("rollout_logprobs").values).exp().clamp(max=2.0)
        advantages_N = batch.dense("advantages").repeat_interleave(tokens.lengths)
        loss = -(stale_N * advantages_N * logprobs_N)[mask_N].sum() / total
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.policy.parameters():
            assert parameter.grad is not None
            self._sum(parameter.grad)
        self.optimizer.step()
        self.steps += 1
        return {"loss": float(loss.detach()), "tokens": float(mask_N.sum())}

    @endpoint(collect=first())
    def weights(self) -> Weights:
        return self.policy.state_dict()

    @endpoint(collect=first())
    def version(self) -> int:
        return self.steps

    def _sum(self, value: Tensor) -> Tensor:
        if self.ctx.world_size > 1:
            dist.all_reduce(value)
        return value


class Reference(Worker):
    """Colocated with the actor: SchedulingStrategy(type="colocation", target="actor", fork=False) in AReaL."""

    def __init__(self) -> None:
        self.policy = Policy()

    @endpoint(dispatch=shard(balance="tokens"), collect=concat())
    @torch.no_grad()
    def distance(self, batch: Batch) -> Tensor:
        """``[B]``: by how much the actor in this process likes each row better than the reference does, in nats."""
        actor: Actor = self.ctx.colocated["actor"]
        tokens, mask = batch.jagged("tokens"), batch.jagged("loss_mask")
        gain_N = torch.where(mask.values, actor.policy.logprobs(tokens) - self.policy.logprobs(tokens), 0.0)
        return torch.stack([row.sum() for row in tokens.like(gain_N).unbind()])


def prompts(step: int) -> Batch:
    """``GROUPS`` prompts, ``SAMPLES`` rows of each; completions are 1 to ``LONGEST`` tokens long."""
    group = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    return Batch({"tokens": group[:, None] % VOCABULARY, "length": (group + step) % LONGEST + 1, "group": group})


def judged(batch: Batch) -> Batch:
    """With ``rewards [B]``, the share of tokens that count upwards, and ``advantages [B]`` within each group."""
    rewards = torch.stack(
        [(row[1:] == (row[:-1] + 1) % VOCABULARY).float().mean() for row in batch.jagged("tokens").unbind()]
    )
    means = torch.zeros(GROUPS).index_add(0, batch.dense("group"), rewards) / SAMPLES
    return batch.with_columns(rewards=rewards, advantages=rewards - means[batch.dense("group")])


def submit_rollouts(rollouts: list[Handle[Rollout]], step: int) -> list[Call[Batch]]:
    """Each worker its share of the prompts; nobody waits."""
    rows = prompts(step)
    share = len(rows) // len(rollouts)
    return [rollout.generate.submit(rows.slice(at * share, (at + 1) * share)) for at, rollout in enumerate(rollouts)]


def train(actor: Handle[Actor], rollouts: list[Handle[Rollout]]) -> tuple[list[float], Batch]:
    """Rollouts sample the next step's rows while the actor learns from this step's; rewards, and the last rows."""
    rewards, batch, stalest = [], Batch({}), 0
    in_flight = submit_rollouts(rollouts, 0)
    for step in range(STEPS):
        batch = judged(Batch.concat([call.result() for call in in_flight]))
        in_flight = submit_rollouts(rollouts, step + 1)
        staleness = step - int(batch.jagged("versions").values.min())
        assert staleness <= MAX_STALENESS, f"step {step} learns from rows that are {staleness} versions old"
        stalest = max(stalest, staleness)
        metrics = actor.train_batch(batch)
        assert metrics["tokens"] == float(batch.jagged("loss_mask").values.sum()), "every token counts once"
        weights = actor.weights.submit()
        loads = [rollout.load_weights.submit(weights.arg(), step + 1) for rollout in rollouts]
        for load in loads:  # each after what its worker is sampling: calls of a group run in the order submitted
            load.result()
        rewards.append(float(batch.dense("rewards").mean()))
    assert stalest == MAX_STALENESS, "sampling and learning did not overlap"
    return rewards, batch


def digest(actor: Actor) -> float:
    """Shipped to every rank by ``group.run``: no endpoint is needed for a question asked once."""
    return sum(float(value.sum()) for value in actor.policy.state_dict().values())


def run(cluster: Cluster) -> str:
    """Start the groups, train, and check what came of it."""
    ranks = 2 if cluster.capabilities.collectives else 1
    for_actor, for_rollouts = cluster.pool([ranks + 2]).split([ranks, 2])
    actor = cluster.start(Actor.bind(LEARNING_RATE), for_actor, name="actor")
    reference = cluster.start(Reference.bind(), into=actor, name="reference")
    rollouts = [
        cluster.start(Rollout.bind(seed=at), slot, name=f"rollout-{at}")
        for at, slot in enumerate(for_rollouts.split([1, 1]))
    ]
    rewards, batch = train(actor, rollouts)
    assert actor.version() == STEPS
    assert len(set(actor.group.run(digest))) == 1, "the ranks of the actor have drifted apart"
    gain = float(reference.distance(batch).mean())
    assert gain > 1.0, "the actor is still the reference"
    assert rewards[0] < 0.3 < 0.8 < rewards[-1], f"nothing was learned: {rewards}"
    return f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f} in {STEPS} steps, {gain:.1f} nats a row from the reference"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="local")
    with podium.connect(parser.parse_args().backend) as cluster:
        print(run(cluster))


if __name__ == "__main__":
    main()
