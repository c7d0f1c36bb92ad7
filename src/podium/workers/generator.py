"""The generator: completions from prompts, by an engine that reads the policy's weights or a copy of them.

Colocated with the policy and neither sharded nor adapted, the engine reads the policy's own parameters: what the update
changed in place, the next completion sees. Sharded or adapted weights are gathered into one copy, in place. Split from
the policy, the generator has a model of its own and is sent weights, also while it generates. The order of the calls is
that of :mod:`podium.workers.weight_sync`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.devices import choose_device
from podium.errors import ConfigError, DataError
from podium.rollout.engines import Engine, EngineConfig, make_engine
from podium.rollout.sampling import Completion, SamplingParams
from podium.runtime import Worker, concat, endpoint, nothing, shard
from podium.workers.config import ModelConfig
from podium.workers.models import load_model
from podium.workers.texts import decode_sampled, text_column
from podium.workers.tokenizers import load_tokenizer
from podium.workers.weight_sync.buckets import WeightReceiver
from podium.workers.weight_sync.gather import WeightInfo, copy_weights, full_weights

if TYPE_CHECKING:
    from podium.workers.policy import Policy

__all__ = ["POLICY_ROLE", "Generator"]

POLICY_ROLE = "policy"
"""The name under which a colocated policy is found."""


class Generator(Worker):
    """Draws completions.

    Args:
        model: which model; colocated with a policy its own is used and this only serves copies.
        engine: which engine and how much it may hold.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig | None = None) -> None:
        self.config = replace(model, lora=None, gradient_checkpointing=False)
        self.engine_config = engine or EngineConfig()
        self._engine: Engine | None = None
        self._receiver: WeightReceiver | None = None
        self._making = threading.Lock()
        self._synced: int | None = None

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        """``sampling.n`` completions of each prompt, those of one prompt side by side.

        Args:
            prompts: ``prompt_tokens``, ``seed`` int64 ``[B, n]`` (or ``[B]`` when n is 1) and ``group`` int64 ``[B]``.

        Returns:
            ``B * n`` rows with ``tokens``, ``loss_mask``, ``rollout_logprobs``, ``versions``, ``group``,
            ``finish_reason``, with top-k or top-p ``kept_sizes`` and ``kept_ids``, and ``text`` if
            ``prompts.meta["text"]`` asks for it; ``meta["temperature"]``.

        Raises:
            DataError: not n seeds a prompt.
        """
        engine = self._ready_engine()
        rows = [row.tolist() for row in prompts.jagged(fields.PROMPT_TOKENS).unbind()]
        seeds = prompts.dense(fields.SEED)
        if seeds.numel() != len(rows) * sampling.n:
            raise DataError(
                f"{fields.SEED} is {list(seeds.shape)}; {len(rows)} prompts with n={sampling.n} need one seed for each "
                "completion"
            )
        drawn = engine.generate(rows, sampling, seeds.flatten().tolist()) if rows else []
        group = prompts.dense(fields.GROUP).repeat_interleave(sampling.n)
        batch = _as_batch(rows, drawn, group, sampling)
        if prompts.meta.get("text"):
            batch = batch.with_columns({fields.TEXT: text_column(decode_sampled(batch, self._tokenizer))})
        return batch

    @endpoint(concurrent=True)
    def weights_version(self) -> int | None:
        """The version of the weights that were last synced; None where none were, or came only in part."""
        return self._synced

    @endpoint()
    def refresh(self, version: int) -> int:
        """Read the colocated policy's weights as they are now; all ranks call, since shards are gathered from all.

        Returns:
            The version that is here afterwards. A later one than asked for stays, and so does the same.

        Raises:
            ConfigError: there is no policy in this worker process.
        """
        policy = self._policy()
        if policy is None:
            raise ConfigError(
                "generator.refresh() reads a colocated policy, and none is in this worker process; send its weights by "
                "a podium.workers.StreamedSync"
            )
        if self._synced is not None and self._synced >= version:
            return self._synced
        engine = self._ready_engine()
        if policy.adapted:
            with engine.gate.changing(version):
                for name, tensor in full_weights(policy.model):
                    engine.load(name, 0, tensor)
                engine.loaded()
        else:
            engine.refresh(version)
        self._synced = version
        return version

    # -- a streamed weight sync: see podium.workers.weight_sync; these endpoints run beside generate ---------------

    @endpoint(collect=nothing(), concurrent=True)
    def prepare_weight_sync(self, weights: Sequence[WeightInfo], bucket_bytes: int) -> None:
        """Expect all of ``weights`` in buckets of ``bucket_bytes``: see :meth:`WeightReceiver.prepare`.

        Raises:
            ConfigError: the weights do not fit this generator's model, or the generator reads a colocated policy's
                parameters, which nobody overwrites.
        """
        if self._policy() is not None:
            raise ConfigError("this generator reads a colocated policy: call refresh(version), weights are not sent")
        self._ready_receiver().prepare(weights, bucket_bytes)

    @endpoint(concurrent=True, readonly=True)
    def receive_weights(
        self, version: int, index: int, tensors: Sequence[Tensor | None], sums: Sequence[int] | None = None
    ) -> list[str]:
        """Copy a bucket into this generator's own model, in place: see :meth:`WeightReceiver.receive`. From the first
        bucket to ``finish_weight_sync`` or ``abort_weight_sync`` no token is drawn."""
        self._synced = None
        return self._ready_receiver().receive(version, index, tensors, sums)

    @endpoint(collect=nothing(), concurrent=True)
    def finish_weight_sync(self, version: int) -> None:
        """Draw from the weights of ``version``.

        Raises:
            DataError: some have not arrived; names them.
        """
        self._ready_receiver().finish(version)
        self._synced = version

    @endpoint(collect=nothing(), concurrent=True)
    def abort_weight_sync(self, reason: str) -> None:
        """End a sync that failed. Calls that wait for its end get an error, and nothing is drawn before the next sync
        has finished."""
        self._ready_receiver().abort(reason)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.tokenizer_source)

    def _policy(self) -> Policy | None:
        return self.ctx.colocated.get(POLICY_ROLE)

    def _ready_receiver(self) -> WeightReceiver:
        engine = self._ready_engine()
        with self._making:
            if self._receiver is None:
                self._receiver = WeightReceiver(engine)
            return self._receiver

    def _ready_engine(self) -> Engine:
        """The engine, made at first use, when colocated workers and collectives are there."""
        with self._making:
            if self._engine is None:
                self._engine = self._make_engine()
            return self._engine

    def _make_engine(self) -> Engine:
        policy = self._policy()
        if policy is None:
            model = load_model(self.config, choose_device(self.ctx.devices)).requires_grad_(False)
        elif policy.adapted:
            model = load_model(self.config, policy.device).requires_grad_(False)
            copy_weights(full_weights(policy.model), model)
        else:
            model = policy.model
        engine = make_engine(self.engine_config, model)
        if policy is not None:
            engine.refresh(0)  # fills the copy of a sharded model
        return engine


def _as_batch(
    prompts: Sequence[Sequence[int]], drawn: Sequence[Completion], group: Tensor, sampling: SamplingParams
) -> Batch:
    heads = [torch.tensor(row, dtype=torch.int64) for row in prompts for _ in range(sampling.n)]
    tokens = Jagged.from_rows([torch.cat([head, c.token_ids]) for head, c in zip(heads, drawn, strict=True)])
    runs = torch.tensor([(len(head), len(c)) for head, c in zip(heads, drawn, strict=True)], dtype=torch.int64)
    sampled = torch.tensor([False, True]).repeat(len(drawn)).repeat_interleave(runs.flatten())
    logprobs = torch.zeros(len(sampled))
    versions = torch.zeros(len(sampled), dtype=torch.int64)
    if drawn:
        logprobs[sampled] = torch.cat([c.logprobs for c in drawn]).float()
        versions[sampled] = torch.cat([c.versions for c in drawn])
    batch = Batch(
        {
            fields.TOKENS: tokens,
            fields.LOSS_MASK: tokens.like(sampled),
            fields.ROLLOUT_LOGPROBS: tokens.like(logprobs),
            fields.VERSIONS: tokens.like(versions),
            fields.GROUP: group,
            fields.FINISH_REASON: [c.finish_reason for c in drawn],
        },
        {"temperature": sampling.temperature},
    )
    if not sampling.filtered:
        return batch
    kept = [c.kept for c in drawn if c.kept is not None]
    sizes = torch.zeros(len(sampled), dtype=torch.int64)
    if kept:
        sizes[sampled] = torch.cat([one.offsets.diff() for one in kept])
    ids = Jagged.from_rows([one.ids for one in kept])
    return batch.with_columns({fields.KEPT_SIZES: tokens.like(sizes), fields.KEPT_IDS: ids})
