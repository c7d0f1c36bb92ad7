"""Which prompts a lost worker makes suspects: those that its process had, in this attempt."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from podium.errors import WorkerDied
from podium.trainer import PPOTrainer
from podium.trainer.restart_limit import LostWorkers, RunLost

ENDED = WorkerDied("policy.update: rank 0 has ended", rank=0, node="localhost", cause="signal SIGKILL", role="policy")


def raise_ended(*arguments: object) -> None:
    raise ENDED


class Attempt:
    """A trainer whose policy's process can end, and which has lost nothing yet."""

    def __init__(self) -> None:
        self.losses = LostWorkers(most=3)
        self.ended: dict[int, Any] = {}
        group = SimpleNamespace(lost=self.ended, check_alive=lambda: raise_ended() if self.ended else None)
        roles = SimpleNamespace(workers={"policy": SimpleNamespace(group=group)})
        roles.lost = lambda: ["rank 0 of policy (signal SIGKILL)"] if self.ended else []
        roles.find_lost_roles = lambda: ["policy"] if self.ended else []
        saver = SimpleNamespace(wait=lambda: None)
        self.trainer: Any = object.__new__(PPOTrainer)
        self.run: Any = SimpleNamespace(losses=self.losses, roles=roles, saver=saver)
        self.trainer.run, self.trainer._at_work = self.run, {}
        self.trainer.ledger = SimpleNamespace(states=SimpleNamespace(in_flight=lambda steps: [8, 9]))

    def train(self, resume: Any) -> None:
        """Have one attempt at the run, which ends with a loss."""
        self.trainer.resume = resume
        with pytest.raises(RunLost):
            self.trainer._train(self.run, ExitStack())

    def learn(self, *, ends: str) -> None:
        """Learn from the prompts 8 and 9. The policy ends "before" it gets them or "during" that."""
        if ends == "before":
            self.ended[0] = "SIGKILL"
        with self.trainer.at_work(3, "policy"):
            self.ended[0] = "SIGKILL"
            raise_ended()

    def learn_in_resume(self, *, ends: str) -> Any:
        return lambda: self.learn(ends=ends)


@pytest.mark.parametrize("ends", ["before", "during"])
def test_prompts_of_the_attempt_before_are_no_suspects_of_a_loss_before_the_first_step(ends: str) -> None:
    attempt = Attempt()
    attempt.train(attempt.learn_in_resume(ends=ends))
    attempt.train(raise_ended)
    assert attempt.losses.suspects == {}


@pytest.mark.parametrize(("first", "suspects"), [("before", []), ("during", [8, 9])])
def test_prompts_that_a_process_has_not_got_are_no_suspects(first: str, suspects: list[int]) -> None:
    attempt = Attempt()
    attempt.train(attempt.learn_in_resume(ends=first))
    attempt.ended.clear()
    attempt.train(attempt.learn_in_resume(ends="during"))
    assert sorted(attempt.losses.suspects) == suspects
