"""A framework that numbers ranks in its own way, as Megatron-LM does: its workers say where they stand.

python examples/framework_layout.py
python examples/framework_layout.py --backend ray

Megatron's ranks vary in the order tp, cp, dp, pp, and only the last stage of its pipeline has results. The workers
declare that, and shard() splits over what they declare. The script checks that the ranks fill a grid, and takes one
result for each dp coordinate.
"""

from __future__ import annotations

import argparse
import os

import podium
from podium import Worker, concat, endpoint, first, shard


class Stage(Worker):
    """One rank of a model in two pipeline stages."""

    def __init__(self, tp: int = 1, pp: int = 2) -> None:
        dp = self.ctx.world_size // (tp * pp)
        tp_rank, rest = self.ctx.rank % tp, self.ctx.rank // tp  # here a framework tells: parallel_state.get_…_rank()
        self.ctx.declare_mesh("model", tp=tp_rank, cp=0, dp=rest % dp, pp=rest // dp, output={"pp": -1})

    @endpoint(dispatch=shard("model"), collect=concat())
    def score(self, rows: list[float]) -> list[float]:
        """Return a score for each row."""
        return [row * 2 for row in rows]

    @endpoint(dispatch=shard("model"))
    def count(self, rows: list[float]) -> int:
        """Return how many rows each dp rank got."""
        return len(rows)


class Judge(Worker):
    @endpoint(collect=first())
    def judge(self, scores: dict[str, list[float]]) -> str:
        """Return the name of the best scores."""
        return max(scores, key=lambda name: sum(scores[name]))

    @endpoint(collect=first())
    def variable(self) -> str:
        """Return a variable that the other group was started with."""
        return os.environ.get("EXAMPLE_LAYOUT", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="local")
    with podium.connect(parser.parse_args().backend) as cluster:
        pool = cluster.pool([4])  # on a machine with accelerators: cluster.pool([4], gpus=1, accelerator="H100")
        env = {"EXAMPLE_LAYOUT": "tp-cp-dp-pp"} if cluster.capabilities.processes else {}
        stages = cluster.start(Stage.bind(), pool, env=env, distributed=False)
        judge = cluster.start(Judge.bind(), pool[0:1], env=stages.group.env, distributed=False)  # as a fork of it has
        print("mesh:", stages.group.meshes["model"], "in rank order:", stages.group.meshes["model"].along("pp"))
        print("rows:", stages.count([1.0, 2.0, 3.0]), "padded at the call:", stages.count.pad()([1.0, 2.0, 3.0]))
        calls = {name: stages.score.submit(rows) for name, rows in {"low": [1.0, 2.0], "high": [3.0, 4.0]}.items()}
        best = judge.judge.submit({name: call.arg() for name, call in calls.items()})  # starts when both are done
        print("best:", best.result(), "inherited:", judge.variable() or "nothing")


if __name__ == "__main__":
    main()
