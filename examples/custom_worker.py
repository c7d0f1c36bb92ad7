"""A worker of your own, called from one ordinary script: four processes, each with its share of the rows.

python examples/custom_worker.py
python examples/custom_worker.py --backend inline      the same in this process, for a debugger
python examples/custom_worker.py --backend ray         the same on Ray
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import podium
from podium import Batch, Worker, concat, endpoint, first, shard


class Statistics(Worker):
    """Standardizes rows with the mean and deviation over all ranks' rows."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon  # self.ctx is there already: rank, world_size, devices

    @endpoint(dispatch=shard(), collect=concat())
    def standardize(self, batch: Batch) -> Batch:
        """Each rank gets some of the rows; the results come back in the order of the rows."""
        scores = batch.dense("scores")
        sums = torch.stack([scores.sum(), scores.square().sum(), torch.tensor(float(len(scores)))])
        if self.ctx.world_size > 1:
            dist.all_reduce(sums)  # the ranks' process group is there without any setting
        mean = sums[0] / sums[2]
        deviation = (sums[1] / sums[2] - mean.square()).clamp(min=0).sqrt()
        return batch.with_columns(scores=(scores - mean) / (deviation + self.epsilon))

    @endpoint(collect=first())
    def ranks(self) -> int:
        """Called on every rank; the first one's answer is taken."""
        return self.ctx.world_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="local")
    arguments = parser.parse_args()
    batch = Batch({"scores": torch.arange(10.0)})
    with podium.connect(arguments.backend) as cluster:
        slots = 4 if cluster.capabilities.collectives else 1
        workers = cluster.start(Statistics.bind(epsilon=1e-6), cluster.pool([slots]))
        call = workers.standardize.submit(batch)  # does not wait; call.result() does
        print(f"ranks: {workers.ranks()}")
        print([round(score, 3) for score in call.result().dense("scores").tolist()])


if __name__ == "__main__":
    main()
