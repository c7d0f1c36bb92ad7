"""GRPO, PPO and their kin: one loop, with or without a critic.

One step, from the controller; each stage is a call to workers:

    sample prompts ─▶ generate ─▶ score ─▶ log-probabilities ─▶ values ─▶ advantages ─▶ update ─▶ publish
                      generator   grader   policy, reference    critic    estimator     policy,   generator
                                                                                        critic

What has an entry for each token stays with the worker that made it: the batch here holds references to it, lengths and
rewards of rows, and lists. Only texts come here, a chunk at a time, to be graded and written down.

Legend: B rows (completions) of a step, P prompts, n completions a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace

from podium.algorithms import make_kl_controller
from podium.data import Batch, fields
from podium.errors import RewardError
from podium.runtime import Call
from podium.telemetry import CompletionsSampled, emit
from podium.telemetry import metrics as names
from podium.trainer.completions import CompletionsLog, Judged
from podium.trainer.config import PPOConfig
from podium.trainer.fitting import Trainer
from podium.trainer.metrics import KL_COEF, join_updates, rollout_metrics
from podium.trainer.prompts import Prompts, PromptSource, load_prompts
from podium.trainer.seeds import completion_seeds, row_order
from podium.trainer.state import TrainerState
from podium.workers import Estimator

__all__ = ["PPOTrainer"]

_MODEL_INPUTS = (fields.TOKENS, fields.LOSS_MASK, fields.KEPT_SIZES, fields.KEPT_IDS)
_ADVANTAGE_INPUTS = (fields.LOSS_MASK, fields.REWARDS, fields.GROUP, fields.VALUES)
_KL_INPUTS = (fields.OLD_LOGPROBS, fields.REF_LOGPROBS)
_MISMATCH_INPUTS = (fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS)
_UPDATE_INPUTS = (
    *(fields.ADVANTAGES, fields.OLD_LOGPROBS, fields.ROLLOUT_LOGPROBS, fields.REF_LOGPROBS),
    *(fields.VALUES, fields.RETURNS),
)


class PPOTrainer(Trainer[PPOConfig, PromptSource]):
    """Trains a policy by reinforcement: GRPO and its kin, or PPO where the advantage estimator reads a critic.

    >>> PPOTrainer(GRPOConfig(model=..., data=...), cluster="local").fit().accuracy_after  # doctest: +SKIP

    Args:
        config: a :class:`GRPOConfig` or :class:`PPOConfig`.
        cluster: the name of a backend to connect to for this run, or a connected cluster, which stays open.
        backend_options: of :func:`podium.connect`, where ``cluster`` is a name: ``{"address": "auto"}`` for Ray's.
        workers: a class of your own for any role ("policy", "reference", "critic", "estimator", "generator"): it is
            given what the role's own class is given. ``Mine.bind(...)`` has all its arguments already, and gets no
            others.
        reward: a function to use in place of ``config.reward.name``.
        show: progress on the terminal.
        report: with ``show``, what the run came to, when it ends.
    """

    @property
    def recipe(self) -> str:
        return "ppo" if self.config.has_critic else self.config.algorithm.advantage.rpartition(":")[2]

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, step: int) -> Mapping[str, float]:
        """Train once. Returns the step's metrics, by their names in :mod:`podium.telemetry.metrics`."""
        stage = self.clock.stage
        with stage("prompts"):
            prompts = self.source.take(self.config.batch.prompts)
        with stage("generate"):
            batch = self.generate(prompts, step)
        with stage("score"):
            judged = self.score(batch, prompts, step)
            batch = judged.batch.with_columns({fields.REWARDS: judged.rewards_B})
        with stage("logprobs"):
            batch = self.logprobs(batch)
        with stage("values"):
            batch = self.values(batch)
        with stage("advantages"):
            batch = self.advantages(batch)
        rollout: dict[str, float] = {}

        def record() -> None:
            self.completions.write(step, judged, batch.jagged(fields.ADVANTAGES))
            rollout.update(self.describe(batch, judged))

        with stage("update"):
            updates = self.update(batch, step, meanwhile=record)
        with stage("publish"):
            self.roles.publish(step)
        with stage("record"):
            metrics = self.measure(rollout, updates)
        return metrics

    def generate(self, prompts: Prompts, step: int) -> Batch:
        """``sampling.n`` completions of each prompt, as references to what the generator keeps."""
        seeds = completion_seeds(self.config.run.seed, step, len(prompts), self.sampling.n)
        return self.generator.generate(prompts.batch(seeds), self.sampling)

    def score(self, batch: Batch, prompts: Prompts, step: int) -> Judged:
        """Grades of the completions. If the reward fails, they are written before the error ends the run."""
        ungraded = prompts.judged(batch, self.tokenizer)
        try:
            judged = prompts.graded(ungraded, self.grader)
        except RewardError:
            self.completions.write(step, ungraded, None)
            self.completions.flush()
            raise
        if self.config.run.show_samples:
            emit(CompletionsSampled(step, judged.samples(self.config.run.show_samples)))
        return judged

    def logprobs(self, batch: Batch) -> Batch:
        """Log-probabilities under the policy before its update, and under the reference."""
        inputs = _select(batch, _MODEL_INPUTS)
        pending = [self.roles.policy.logprobs.submit(inputs)] if self._needs_old_logprobs else []
        if self.roles.reference is not None:
            pending.append(self.roles.reference.logprobs.submit(inputs))
        for call in pending:
            batch = batch.merge(call.result())
        return batch

    def values(self, batch: Batch) -> Batch:
        """The critic's value before each token, if there is a critic."""
        critic = self.roles.critic
        return batch if critic is None else batch.merge(critic.values(_select(batch, _MODEL_INPUTS)))

    def advantages(self, batch: Batch) -> Batch:
        """Advantages, and with a critic returns, from rewards and the KL that counts as one."""
        needed = _ADVANTAGE_INPUTS + (_KL_INPUTS if self.config.algorithm.kl_in == "reward" else ())
        return batch.merge(self.estimator.advantages(_select(batch, needed), self.kl.coef))

    def update(self, batch: Batch, step: int, meanwhile: Callable[[], None] | None = None) -> list[Mapping[str, float]]:
        """``epochs x minibatches`` optimizer steps of the policy, and of the critic if there is one.

        ``meanwhile`` is done here while the workers are at the first of them.
        """
        updates: list[Mapping[str, float]] = []
        pending: list[Call[dict[str, float]]] = []
        for minibatch in self.minibatches(_select(batch, _MODEL_INPUTS + _UPDATE_INPUTS), step):
            updates += [call.result() for call in pending]  # after the next minibatch was made
            pending = [self.roles.policy.update.submit(minibatch)]
            if self.roles.critic is not None:
                pending.append(self.roles.critic.update.submit(minibatch))
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
        return updates + [call.result() for call in pending]

    def minibatches(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The step's rows in the order in which they train; each minibatch is weighed over the whole of it."""
        algorithm = self.config.algorithm
        size = len(batch) // algorithm.minibatches
        batch = batch.with_meta(max_new_tokens=self.sampling.max_new_tokens)
        for epoch in range(algorithm.epochs):
            order = row_order(self.config.run.seed, step, epoch, len(batch))
            for start in range(0, len(batch), size):
                yield batch if size == len(batch) else batch.take(order[start : start + size])

    def describe(self, batch: Batch, judged: Judged) -> dict[str, float]:
        """What can be said of a step's completions before they train."""
        needed = (fields.LOSS_MASK, *(_MISMATCH_INPUTS if fields.OLD_LOGPROBS in batch else ()))
        # Without old log-probabilities the update itself tells of the mismatch: no policy has moved yet.
        return {**rollout_metrics(batch, judged.correct_B), **self.estimator.describe(batch.select(*needed))}

    def measure(self, rollout: Mapping[str, float], updates: list[Mapping[str, float]]) -> dict[str, float]:
        """The step's metrics, and the next coefficient of the KL."""
        metrics = {**join_updates(updates), **rollout}
        metrics[KL_COEF] = self.kl.coef
        self.kl = self.kl.next(metrics.get(names.KL, 0.0))
        return metrics

    def stage_tokens(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Tokens that each stage of a step dealt with; "generate" counts the sampled ones."""
        stages = ["update", "step"]
        stages += ["logprobs"] if self._needs_old_logprobs or self.roles.reference is not None else []
        stages += ["values"] if self.roles.critic is not None else []
        return {
            "generate": metrics[names.LENGTH_MEAN] * self.config.rows,
            **dict.fromkeys(stages, metrics[names.TOKENS]),
        }

    @property
    def estimator(self) -> Estimator:
        """The estimator, which every run by reinforcement has."""
        assert self.roles.estimator is not None
        return self.roles.estimator

    @property
    def _needs_old_logprobs(self) -> bool:
        """With one optimizer step a batch the policy is still the one that sampled, so the update's own
        log-probabilities, detached, are the old ones: a forward pass saved. A KL in the reward needs them before."""
        return self.config.algorithm.updates > 1 or self.config.algorithm.kl_in == "reward"

    # -- the run -------------------------------------------------------------------------------------------------

    def load_data(self) -> PromptSource:
        return load_prompts(self.config.data, self.tokenizer, seed=self.config.run.seed)

    def save(self, step: int) -> None:
        self.completions.flush()
        super().save(step)

    def remember(self, step: int) -> TrainerState:
        return replace(super().remember(step), kl_coef=self.kl.coef)

    def restore(self, state: TrainerState) -> None:
        super().restore(state)
        self.kl = replace(self.kl, coef=state.kl_coef)

    def prepare(self, stack: ExitStack) -> None:
        super().prepare(stack)
        self.kl = make_kl_controller(self.config.algorithm)
        self.completions = stack.enter_context(CompletionsLog(self.session.directory.completions_writer()))


def _select(batch: Batch, columns: tuple[str, ...]) -> Batch:
    return batch.select(*(name for name in columns if name in batch))
