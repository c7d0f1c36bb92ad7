"""One training step of GRPO, PPO and similar algorithms.

    collect   take prompts ─▶ generate, or live in an environment ─▶ grade                   generator or rollout,
                                                                                             grader
    learn     log-probabilities ─▶ values ─▶ advantages ─▶ update ─▶ sync weights            policy, reference, teacher,
                                                                                             critic, estimator
Each stage is a call to workers, and a method that a subclass may replace. A schedule says when each half runs
(podium.trainer.schedules).

Tensors with a value for each token stay with the workers that made them. The batch in this process holds references to
them, lengths and rewards of rows, and lists.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.algorithms import ADVANTAGES, Declaration, KLController
from podium.algorithms.entropy import EntropyController
from podium.data import Batch, fields
from podium.errors import NoRowsError, PodiumError, RewardError
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import PromptStream
from podium.runs.checkpoint_folders import TrainerState
from podium.runs.config import PPOConfig
from podium.runtime import Call, Handle
from podium.spelling import write_count
from podium.telemetry import CompletionsSampled, Note, emit, metrics as names
from podium.telemetry.progress import Counting
from podium.trainer import step_columns as columns
from podium.trainer.baselines import add_baselines, be_greedy
from podium.trainer.completion_files import CompletionsLog, write_completions
from podium.trainer.completions import ScoredBatch, version_range
from podium.trainer.curriculum import PassRates, shares_of
from podium.trainer.generators import Generators, parts_of
from podium.trainer.group_filter import fill_step
from podium.trainer.prompts import Prompt, completion_seeds, prompt_batch, row_order
from podium.trainer.replay import Replay
from podium.trainer.run_setup import Run
from podium.trainer.sessions import Sessions
from podium.trainer.step_watch import StepWatch
from podium.trainer.trainer import Trainer
from podium.trainer.training_prompts import check_training, load_training
from podium.trainer.updates import MISMATCH, Answers, join_updates, submit_update
from podium.workers import Estimator, FollowingReference, Reference, Teacher
from podium.workers.learner import list_own_columns
from podium.workers.policy import ENTROPY_COEF, HEAD_ALONE

F = TypeVar("F", bound=Callable[..., Any])

KL_COEF: Final = "policy/kl_coef"

_IN_PARTS: Final = "podium_in_parts"


def in_parts(stage: F) -> F:
    """Declare that a subclass's ``score`` takes a few prompts of a step at a time, or that its ``draw`` returns in
    parts what its ``generate`` returns at once. A stage without this decorator gets the whole step.

    If the schedule declares ``side_by_side``, the completions of a prompt are then graded while others are being
    sampled.
    """
    setattr(stage, _IN_PARTS, True)
    return stage


class PPOTrainer(Trainer[PPOConfig, Prompt, ScoredBatch]):
    """Trains a policy by reinforcement learning: GRPO and similar algorithms, or PPO if the advantage estimator reads a
    critic.

    >>> PPOTrainer(GRPOConfig(model=..., data=...), cluster="local").fit().after["reward_mean"]  # doctest: +SKIP

    Args:
        config: A :class:`GRPOConfig` or :class:`PPOConfig`.
        cluster: The name of a backend to connect to for this run, or a connected cluster, which stays open.
        backend_options: Options of :func:`podium.connect` if ``cluster`` is a name, such as ``{"address": "auto"}``.
        workers: Classes that replace those of roles ("policy", "reference", "teacher", "critic", "reward", "estimator",
            "generator"). A class gets the arguments of the class that it replaces. ``Mine.bind(...)`` gets only its own
            arguments.
        reward: A function, or a list of functions and of names, to use in place of ``config.reward.name``.
        data: Rows to use in place of ``config.data.train``: a ``datasets.Dataset``, an ``IterableDataset``, a list of
            mappings, or several by split, as in a ``DatasetDict``. They are written to files below ``run.dir``.
        show: Whether the terminal shows progress.
        report: Whether, with ``show``, a summary of the run is printed when it ends.
    """

    replay: Replay | None = None
    answers: Answers | None = None

    @property
    def recipe(self) -> str:
        return "ppo" if self.config.has_critic else self.config.algorithm.advantage.rpartition(":")[2]

    # -- the two halves of a step ----------------------------------------------------------------------------------

    def collect(self, step: int) -> ScoredBatch:
        """Take prompts, draw completions and grade them. Only the generator and the grader take part. A filter of
        ``batch.prompts`` drops prompts without a signal, and others are drawn in their place."""
        if self.replay is not None:
            return self.collect_recorded(self.replay, step)
        choice, prompts = self.config.prompt_choice, list[Prompt]()
        self._examples_of[step], self._sampled[step] = [], 0

        def draw(count: int) -> ScoredBatch | None:
            self._drawn[step] = len(prompts)  # of earlier draws
            with self.clock.stage("prompts", step, "collect"):
                prompts.extend(self.take(step, count))
            scored = self.collect_draw(prompts[:], step)
            if scored is not None and self.rates.used:
                self.rates.add(step, shares_of(scored, self._examples_of[step]))
            return scored

        scored = draw(choice.count)
        assert scored is not None  # the first draw raises an error instead
        self.watch.check_left_out(scored, self.run.grader.name, self.run.roles.policy.group.world_size)
        if choice.filter != "none":
            least = self.run.roles.policy.group.world_size
            scored, dropped = fill_step(scored, draw, choice, least, self.config.algorithm)
            if dropped:
                self.ledger.move(step, "dropped", dropped, reason=choice.reason)
        self.ledger.drop_others(step, {*scored.groups}, "a stage returned no completion of it")
        del self._drawn[step], self._examples_of[step]
        sampled, sessions = self._sampled.pop(step), self.run.sessions
        figures = {names.SAMPLED: float(sampled)} if sessions is None else sessions.describe(step)
        scored = replace(scored, figures={**scored.figures, **figures})
        if self.config.run.show_samples:
            samples = scored.with_rewards(scored.batch).samples(self.config.run.show_samples)
            emit(CompletionsSampled(step, samples))
        return scored

    def pass_over(self, step: int, number: int, index: int) -> str | None:
        if self.replay is not None:
            return None
        reason = self.rates.find_reason(step, number, index)
        if reason is None:
            self._examples_of[step].append(index)
        return reason

    def collect_recorded(self, replay: Replay, step: int) -> ScoredBatch:
        """Read the completions that another run recorded of ``step``, with their rewards."""
        prompts = self.take(step, len(replay.groups[step]))
        with self.clock.stage("replay", step, "collect"):
            scored = replay.read(step, prompts)
            self.enter_drawn(step, range(len(prompts)), scored.versions())
            self._enter_graded(scored, range(len(prompts)))
        return scored.with_data(self._declared.data)

    def collect_draw(self, prompts: Sequence[Prompt], step: int) -> ScoredBatch | None:
        """Draw and grade completions of the last of the step's ``prompts``: those that no earlier draw had. None means
        that all sessions of a further draw failed."""
        stage, start = partial(self.clock.stage, step=step, half="collect"), self._drawn.get(step, 0)
        if self.run.sessions is not None:
            return self.collect_sessions(self.run.sessions, prompts, step)
        if self.run.declared.side_by_side and not self._whole_stages:
            return self.collect_parts(prompts, step)
        with stage("generate"), self.at_work(step, *self._generators_here):
            batch = self.generate(prompts[start:], step)
            self._count_drawn(batch, prompts, step)
        with stage("score"), self._keep_if_not_graded([batch], prompts, step):
            return self.add_baselines(self.score(batch, prompts, step), prompts, step)

    def collect_parts(self, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        """Draw and grade the completions in parts of a few prompts. A part is graded while others are drawn."""
        stage = partial(self.clock.stage, step=step, half="collect")
        new = prompts[self._drawn.get(step, 0) :]
        rows, batches = len(new) * self.run.data.sampling.n, list[Batch]()
        graded: list[Future[ScoredBatch]] = []
        with self._keep_if_not_graded(batches, prompts, step):
            with stage("generate"), Counting("completions", rows, whole=True) as count:
                for part in as_completed(self.draw(new, step)):
                    batches.append(part.result())
                    self._count_drawn(batches[-1], prompts, step)
                    count.done += len(batches[-1])
                    graded.append(self._graders.submit(self.score, batches[-1], prompts, step))
                    for over in graded:
                        if over.done():
                            over.result()  # after an error of the reward, the rest is not waited for
            with stage("score"):
                for over in as_completed(graded):
                    over.result()  # the first error of any part
                parts = [part.result() for part in graded]
        return self.add_baselines(ScoredBatch.join(sorted(parts, key=ScoredBatch.first_group)), prompts, step)

    def add_baselines(self, scored: ScoredBatch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        """Draw a greedy completion of each of a draw's prompts, and add its reward to the prompt's rows, if the
        advantage estimator needs it. A prompt without one is dropped."""
        if not self._declared.needs_greedy:
            return scored
        with self.clock.stage("baseline", step, "collect"), self.at_work(step, *self._generators_here):
            joined = self._prompt_batch(prompts[self._drawn.get(step, 0) :], step)
            joined = joined.with_columns({fields.SEED: joined.dense(fields.SEED)[:, :1]})
            batch = self.drawing.generate(joined, be_greedy(self.run.data.sampling))
            greedy = self._select_ungraded(batch, prompts, step)
            greedy = greedy.graded(self.run.grader, reward_model=self.run.roles.reward)
        scored, missing = add_baselines(scored, greedy, self.run.roles.policy.group.world_size)
        if missing:
            self.ledger.move(step, "dropped", missing, reason="the reward scored no greedy completion")
        return scored

    @property
    def _generators_here(self) -> Sequence[str]:
        """The generator's role, where it shares the policy's processes."""
        return [] if self.run.roles.generators_are_apart else ["generator"]

    def collect_sessions(self, sessions: Sessions, prompts: Sequence[Prompt], step: int) -> ScoredBatch | None:
        """Run ``sampling.n`` sessions for each prompt's task. A prompt is dropped if all of its sessions failed."""
        stage, start = partial(self.clock.stage, step=step, half="collect"), self._drawn.get(step, 0)
        new = prompts[start:]
        with stage("rollout"), self.at_work(step, "rollout"):
            try:
                batch = sessions.live(new, self._seeds(len(new), step), self.run.data.sampling, step)
            except NoRowsError:
                if not start:
                    raise
                self.ledger.move(step, "dropped", range(start, len(prompts)), reason="every session failed")
                return None
        if start:
            batch = batch.with_columns({fields.GROUP: batch.dense(fields.GROUP) + start})
        elif len(batch) < (ranks := self.run.roles.policy.group.world_size):
            raise PodiumError(
                f"step {step}: the sessions gave {write_count(len(batch), 'row')}, and the policy trains on "
                f"{write_count(ranks, 'rank')}"
            )
        scored = self._select_ungraded(batch, prompts, step)
        places = sorted({*scored.groups})
        with stage("score"), self._keep_if_not_graded([batch], prompts, step):
            self.enter_drawn(step, places, scored.versions())
            scored = sessions.grade(scored, self.run.grader, self.config.reward, self.run.roles.reward)
            trained = {names.SESSIONS_TRAINED: float(len(scored.firsts)), names.SESSIONS_ROWS: float(len(scored.batch))}
            scored = replace(scored, figures=trained)
            self._enter_graded(scored, places)
        if gone := sorted({*range(start, len(prompts))} - {*places}):
            self.ledger.move(step, "dropped", gone, reason="every session failed")
        return scored.with_data(self._declared.data)

    def learn(self, scored: ScoredBatch) -> Mapping[str, float]:
        """Train on the completions of a step, and send the new weights to the generator.

        Returns:
            The step's metrics, by their names in :mod:`podium.telemetry.metrics`.
        """
        step, batch = scored.step, scored.batch
        has_accuracy = self.knows_accuracy(step)
        if not self.state.metric and self.state.last is not None:  # all scores were 0, and the next evaluation decides
            has_accuracy = has_accuracy or False
        scored = scored.with_verdicts(has_accuracy)
        self.watch.check_graded(scored)
        stage = partial(self.clock.stage, step=step, half="learn")
        if self.run.declared.staleness == 0:  # the generators sample nothing while the policy learns
            self.rest(*self.run.roles.generators)
        with stage("logprobs"):
            batch = self.logprobs(batch)
        self.rest(self.run.roles.reference, self.run.roles.teacher)
        with stage("values"):
            batch = self.values(batch)
        with stage("advantages"):
            batch = self.advantages(batch)
        scored = scored.with_rewards(batch)
        figures, answered = dict[str, float](), {} if self.answers is None else {"prompts": scored.prompts}

        def record() -> None:
            figures.update(self.describe(scored, batch))

        with nullcontext() if self.run.generators is None else self.run.generators.changing:
            with stage("update"):
                updates = self.update(batch, step, meanwhile=record, **answered)
            self.follow(step)
            self.keep(scored, batch)
            self.rest(self.run.roles.critic)
            self.rest(self.run.roles.policy, weights=False)
            with stage("publish"):
                self.publish(step)
            self.rest(self.run.roles.policy)
        with stage("record"):
            metrics = self.measure(figures, updates)
            self.watch.check_mismatch(metrics, step)
            self.watch.check_signal(metrics, step)
            return metrics

    def keep(self, scored: ScoredBatch, batch: Batch) -> None:
        """Start to write the step's completions with the figures of their tokens."""
        scores = None
        single = self.config.algorithm.updates == 1  # else the policy had moved before its last update
        if single and fields.OLD_LOGPROBS not in batch and hasattr(self.run.roles.policy, "update_logprobs"):
            scores = self.run.roles.policy.update_logprobs.submit(columns.select(batch, columns.ROW_INPUTS))
        self.completions.write(scored, columns.select(batch, columns.KEPT), scores)

    def rest(self, *roles: Handle[Any] | None, **how: bool) -> None:
        """Let roles leave their devices until they are needed, if ``parallel.offload`` says so."""
        if self.config.parallel.offload != "none":
            for call in [role.rest.submit(**how) for role in roles if role is not None]:
                call.result()

    def follow(self, step: int) -> None:
        """Let the reference follow the policy, if ``algorithm.options.reference_refresh`` says so at this step."""
        options, reference = self.config.algorithm.reference, self.run.roles.reference
        if options.reference_refresh and reference is not None and step % options.reference_refresh == 0:
            cast("Handle[FollowingReference]", reference).follow(options.reference_mix)

    def publish(self, step: int) -> None:
        """Send the policy's new weights to the generator, if there is one, as version ``step``."""
        if self.run.generators is not None:
            self.run.generators.sync_weights(step)

    # -- the stages of collect -------------------------------------------------------------------------------------

    @in_parts
    def generate(self, prompts: Sequence[Prompt], step: int) -> Batch:
        """Draw ``sampling.n`` completions of each prompt. The tensors of the batch are references."""
        return self.drawing.generate(self._prompt_batch(prompts, step), self._recorded_sampling, step)

    def draw(self, prompts: Sequence[Prompt], step: int) -> list[Future[Batch]]:
        """As ``generate``, in parts of a few prompts. A part is returned as soon as its last completion ends."""
        joined = self._prompt_batch(prompts, step)
        size, _ = parts_of(self.config.engine.max_sequences, self.run.data.sampling.n)
        parts = [joined.slice(start, min(start + size, len(joined))) for start in range(0, len(joined), size)]
        return self.drawing.draw(step, parts, self._recorded_sampling)

    @property
    def _recorded_sampling(self) -> SamplingParams:
        """The sampling parameters, with what the algorithm needs to be recorded."""
        sampling, recording = self.run.data.sampling, self.config.algorithm.record_params
        return sampling.to_request(**recording) if recording else sampling

    def _prompt_batch(self, prompts: Sequence[Prompt], step: int) -> Batch:
        """The batch of a draw for a generator. Groups are numbered through all draws of the step."""
        batch = prompt_batch(prompts, self._seeds(len(prompts), step))
        return batch.with_columns({fields.GROUP: batch.dense(fields.GROUP) + self._drawn.get(step, 0)})

    def _seeds(self, prompts: int, step: int) -> Tensor:
        """The seeds of a draw. Those of further draws go on where the earlier ones ended."""
        start = self._drawn.get(step, 0)
        return completion_seeds(self.config.run.seed, step, start + prompts, self.run.data.sampling.n)[start:]

    @in_parts
    def score(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        """Grade all completions of a step, or those of some prompts. ``prompts`` are all prompts of the step."""
        ungraded = self._select_ungraded(batch, prompts, step)
        places = sorted({*ungraded.groups})
        self.enter_drawn(step, places, ungraded.versions())
        scored = ungraded.graded(self.run.grader, self._declared.data, self.run.roles.reward)
        self._enter_graded(scored, places)
        return scored

    def _count_drawn(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> None:
        """Count the tokens that were sampled in these rows: all tokens but those of the prompts."""
        groups = batch.fetch(fields.GROUP).dense(fields.GROUP).tolist()
        read = sum(len(prompts[group].token_ids) * rows for group, rows in Counter(groups).items())
        self._sampled[step] += int(batch.jagged(fields.TOKENS).lengths.sum()) - read

    def _enter_graded(self, scored: ScoredBatch, places: Sequence[int]) -> None:
        """Enter the prompts at ``places`` as graded, and as dropped those of which the reward scored no completion."""
        self.ledger.move(scored.step, "graded", places)
        if gone := sorted({*places} - {*scored.groups}):
            self.ledger.move(scored.step, "dropped", gone, reason="the reward scored no completion")

    def _select_ungraded(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        # of a generator or a stage of the user's own
        if fields.VERSION_RANGE not in batch and fields.VERSIONS in batch:
            batch = batch.with_columns({fields.VERSION_RANGE: version_range(batch)})
        rows = [name for name in (fields.GROUP, fields.VERSION_RANGE) if name in batch]
        batch, data, cap = batch.fetch(*rows), self.run.data, self.run.data.sampling.max_new_tokens
        return ScoredBatch(
            step=step, steps_before=step - 1, batch=batch, prompts=prompts, tokenizer=data.tokenizer, max_new_tokens=cap
        )

    @contextmanager
    def _keep_if_not_graded(self, drawn: Sequence[Batch], prompts: Sequence[Prompt], step: int) -> Iterator[None]:
        """If the reward fails in the block, write the completions before the error ends the run."""
        try:
            yield
        except RewardError:
            write_completions(self.completions.folder, self._select_ungraded(Batch.concat(drawn), prompts, step), None)
            raise

    # -- the stages of learn ---------------------------------------------------------------------------------------

    def logprobs(self, batch: Batch) -> Batch:
        """Add log-probabilities under the policy before its update, under the reference and under the teacher."""
        inputs = columns.select(batch, columns.MODEL_INPUTS)
        extras = {argument: True for argument, name in columns.EXTRAS.items() if name in self._declared.columns}
        pending = [self.run.roles.policy.logprobs.submit(inputs, **extras)] if self._needs_old_logprobs else []
        pending += [model.logprobs.submit(inputs) for model in self._frozen]
        for call in pending:
            batch = batch.merge(call.result())
        return batch

    def values(self, batch: Batch) -> Batch:
        """Add the critic's value before each token, and after the last one of completions that were cut off.

        A session has ended for good, whatever the reason, so there is no value after it.
        """
        critic = self.run.roles.policy if self.config.algorithm.has_value_head else self.run.roles.critic
        ended = () if self.run.sessions is not None else (fields.FINISH_REASON,)
        if critic is None:
            return batch
        return batch.merge(critic.values(columns.select(batch, columns.VALUE_INPUTS + ended)))

    def advantages(self, batch: Batch) -> Batch:
        """Add advantages from the rewards, which may include a KL penalty. With a critic, add returns too."""
        needed = (*columns.ADVANTAGE_INPUTS, *self._declared.columns)
        needed += columns.KL_INPUTS if self.config.algorithm.kl_in == "reward" else ()
        needed += tuple(name for name in batch if name.startswith((fields.PART, fields.DATA)))
        return batch.merge(self.estimator.advantages(columns.select(batch, needed), self.kl.coef))

    def update(
        self,
        batch: Batch,
        step: int,
        meanwhile: Callable[[], None] | None = None,
        prompts: Sequence[Prompt] = (),
    ) -> list[Mapping[str, float]]:
        """Take ``epochs x minibatches`` optimizer steps of the policy, and of the critic if there is one.

        The policy takes none while the critic warms up, and no further ones after a minibatch of which the policy is
        further from the one that sampled it than ``algorithm.epochs.max_kl``. Its value head, if any, takes all.
        ``meanwhile`` is called in this process while the workers take the first of them. ``prompts`` are the step's.
        """
        updates: list[Mapping[str, float]] = []
        pending: list[Call[dict[str, float]]] = []
        algorithm, policy, critic = self.config.algorithm, self.run.roles.policy, self.run.roles.critic
        trains, bound = step > algorithm.critic.critic_warmup, algorithm.epoch_choice.max_kl or math.inf
        own_columns = tuple(list_own_columns(batch))
        inputs = columns.select(batch, columns.MODEL_INPUTS + columns.UPDATE_INPUTS + own_columns)
        if self._needs_old_logprobs and not algorithm.compared_policy and fields.OLD_LOGPROBS in inputs:
            inputs = inputs.drop(fields.OLD_LOGPROBS)  # which dropout would make others than those of the update
        with Counting("optimizer steps", algorithm.updates) as count:
            for minibatch in self.minibatches(inputs, step):
                done = [call.result() for call in pending]  # after the next minibatch was made
                updates += done
                count.done += bool(pending)
                trains = trains and all(update.get(names.APPROX_KL, 0.0) <= bound for update in done)
                pending = submit_update(policy, minibatch, self.answers, prompts, updates) if trains else []
                if critic is not None:
                    pending.append(critic.update.submit(minibatch))
                elif not trains and algorithm.has_value_head:
                    pending.append(policy.update.submit(minibatch.with_meta(**{HEAD_ALONE: True})))
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
            return updates + [call.result() for call in pending]

    def minibatches(self, batch: Batch, step: int) -> Iterator[Batch]:
        """Cut the step's rows into minibatches, in training order. Token weights are computed over a whole
        minibatch."""
        algorithm, rows = self.config.algorithm, len(batch)
        # sessions of an environment may give few rows
        parts = min(algorithm.minibatches, max(1, rows // self.run.roles.policy.group.world_size))
        ends = [rows * part // parts for part in range(parts + 1)]
        batch = batch.with_meta(max_new_tokens=self.run.data.sampling.max_new_tokens)
        if self.entropy.target is not None:
            batch = batch.with_meta(**{ENTROPY_COEF: self.entropy.coef})
        for epoch in range(algorithm.epoch_choice.count):
            order = row_order(self.config.run.seed, step, epoch, rows)
            for start, end in pairwise(ends):
                yield batch if parts == 1 else batch.take(order[start:end])

    def describe(self, scored: ScoredBatch, batch: Batch) -> dict[str, float]:
        """Return metrics of a step's completions. ``batch`` has their columns from before the update."""
        needed = (*columns.FIGURE_INPUTS, *(columns.MISMATCH_INPUTS if fields.OLD_LOGPROBS in batch else ()))
        needed += columns.list_compared(batch, self._declared)
        # Without old log-probabilities the update itself reports the mismatch, since no policy has moved yet.
        return {**scored.figures, **scored.metrics(), **self.estimator.describe(columns.select(batch, needed))}

    def measure(self, figures: Mapping[str, float], updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the step's metrics, and update the coefficients of the KL and of the entropy bonus."""
        # Without old log-probabilities each optimizer step compares the generator with the policy as it is by then.
        by_first = () if names.MISMATCH_MEAN in figures else MISMATCH
        metrics = {**join_updates(updates, by_first=by_first), **figures}
        if self.config.algorithm.needs_reference:
            metrics[KL_COEF] = self.kl.coef
        if self.config.algorithm.epoch_choice.max_kl is not None or self.config.algorithm.critic.critic_warmup:
            metrics[names.UPDATES] = float(sum(names.LOSS in update for update in updates))
        if self.entropy.target is not None:
            metrics[names.ENTROPY_COEF] = self.entropy.coef
        self.entropy = self.entropy.next(metrics.get(names.ENTROPY))
        self.kl = self.kl.next(metrics.get(names.KL))
        return metrics

    # -- the run ---------------------------------------------------------------------------------------------------

    @property
    def _whole_stages(self) -> list[str]:
        """The stages that get all completions of a step at once."""
        return [stage.__qualname__ for stage in (self.generate, self.score) if not hasattr(stage, _IN_PARTS)]

    @property
    def drawing(self) -> Generators:
        """The generators."""
        assert self.run.generators is not None
        return self.run.generators

    @property
    def estimator(self) -> Handle[Estimator]:
        """The estimator."""
        assert self.run.roles.estimator is not None
        return self.run.roles.estimator

    @property
    def _frozen(self) -> list[Handle[Reference] | Handle[Teacher]]:
        """The reference and the teacher, where they take part."""
        return [model for model in (self.run.roles.reference, self.run.roles.teacher) if model is not None]

    @property
    def keeps_apart(self) -> str:
        return self.config.keeps_apart

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether log-probabilities from before the update are computed in a stage of their own.

        With one optimizer step a batch, the update's own log-probabilities, detached, are the old ones. That saves a
        forward pass, and so does a loss whose ratio is to the generator. A KL in the reward needs them earlier, and an
        advantage may, too; the update then still takes its own.
        """
        declared = {fields.OLD_LOGPROBS, *columns.EXTRAS.values()} & set(self._declared.columns)
        algorithm = self.config.algorithm
        moves = algorithm.updates > 1 and algorithm.ratio_to == "old"
        return moves or algorithm.kl_in == "reward" or bool(declared)

    @property
    def _declared(self) -> Declaration:
        return ADVANTAGES.declaration(self.config.algorithm.advantage)

    def stage_tokens(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the number of tokens that each stage processed; "generate" and "rollout" count the sampled ones, of
        completions that are not trained too."""
        stages = ["update", "step"]
        stages += ["logprobs"] if self._needs_old_logprobs or self._frozen else []
        stages += ["values"] if self.config.has_critic else []
        drawing = "generate" if self.run.sessions is None else "rollout"
        sampled = {drawing: metrics[names.SAMPLED]} if names.SAMPLED in metrics else {}
        return {**sampled, **dict.fromkeys(stages, metrics[names.TOKENS])}

    def load_data(self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> PromptStream[Prompt]:
        self.replay = Replay(self.config, tokenizer) if self.config.replays else None
        if self.replay is None:
            stream = load_training(self.config, tokenizer, sampling.max_new_tokens, self.options.reward)
        else:
            stream = self.replay.open_stream()
        check_training(self.config, stream, tokenizer, sampling.max_new_tokens)
        self.answers = Answers.of(self.config, stream, tokenizer)
        return stream

    def prepare(self, stack: ExitStack, lasting: ExitStack, before: Run[Prompt] | None = None) -> Run[Prompt]:
        self._graders = ThreadPoolExecutor(4, thread_name_prefix="grade")
        # after the workers, whose end also ends a reward that waits for a worker
        stack.callback(self._graders.shutdown)
        run = super().prepare(stack, lasting, before)
        self.entropy = EntropyController.of(self.config.algorithm.entropy_coef)
        self.kl = KLController(coef=self.config.algorithm.kl_coef, target=self.config.algorithm.kl_target)
        self.completions = stack.enter_context(CompletionsLog(run.directory.completions))
        if run.declared.side_by_side and run.sessions is None and (stages := self._whole_stages):
            emit(
                Note(
                    f"{' and '.join(stages)} get all completions of a step together, so nothing is graded while others "
                    "are drawn: podium.trainer.ppo.in_parts declares a stage that takes a few prompts at a time"
                )
            )
        self.watch, self._drawn = StepWatch(self.config), dict[int, int]()
        self._sampled = dict[int, int]()  # tokens, by step that is collected
        self._examples_of = dict[int, list[int]]()  # by step that is collected
        lag = self.config.run.max_staleness if self.config.run.staleness is None else self.config.run.staleness
        self.rates = PassRates(self.config.prompt_choice, self.config.run.seed, lag, len(run.data.stream))
        stack.callback(self._graders.shutdown, wait=False, cancel_futures=True)
        return run

    def save(self, step: int) -> None:
        self.completions.flush()
        super().save(step)

    def remember(self, step: int) -> TrainerState:
        state = replace(super().remember(step), kl_coef=self.kl.coef, pass_rates=self.rates.state(step))
        bonus = {"coef": self.entropy.value, "counts": float(self.entropy.counts)}
        return state if self.entropy.target is None else replace(state, entropy=bonus)

    def resume(self) -> int:
        step = super().resume()
        self.rest(self.run.roles.policy)
        return step

    def restore(self, state: TrainerState, rows: Sequence[Mapping[str, Any]]) -> None:
        super().restore(state, rows)
        self.watch.go_on(row for row in rows if row["kind"] == "step")
        self.kl = self.kl.restore(state.kl_coef)
        self.rates.restore(state.pass_rates)
        if self.entropy.target is not None and state.entropy:
            self.entropy = replace(self.entropy, value=state.entropy["coef"], counts=bool(state.entropy["counts"]))
