"""The generator: completions from prompts, by an engine that holds the policy's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from podium.data import Batch, Jagged, fields
from podium.data.sampled_text import text_column
from podium.errors import DataError
from podium.rollout.engines.journal import Drawn, Journal, read_journals
from podium.rollout.engines.stops import write_completion
from podium.rollout.environments import load_sessions
from podium.rollout.sampling import Completion, SamplingParams
from podium.rollout.tasks.config import DataConfig
from podium.runtime import concat, endpoint, shard
from podium.spelling import write_count
from podium.workers.weight_sync.receiver import WeightReceiver

if TYPE_CHECKING:
    from podium.rollout.engines.requests import PromptTokens, SessionRoom


class _Asked(NamedTuple):
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    seeds: Sequence[int]
    journal: Journal | None
    begun: Mapping[int, Drawn] | None


class Generator(WeightReceiver):
    """Draws completions. :class:`WeightReceiver` describes the arguments, and how weights arrive."""

    _journal: Journal | None = None
    _tokens: Any = None

    @cached_property
    def _servers(self) -> list[Any]:
        return []

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        """Draw ``sampling.n`` completions of each prompt; those of one prompt come side by side.

        Args:
            prompts: ``prompt_tokens``, ``seed`` int64 ``[B, n]`` (or ``[B]`` when n is 1) and ``group`` int64 ``[B]``.
                ``meta["journal"]`` is a file to which drawn tokens are written, and ``meta["begun"]`` is the journal of
                a lost generator, whose completions are continued.

        Returns:
            ``B * n`` rows with ``tokens``, ``loss_mask``, ``rollout_logprobs``, ``versions``, ``group`` and
            ``finish_reason``; with top-k or top-p also ``kept_sizes`` and ``kept_ids``; with ``record_top`` also
            ``rollout_top``; with ``record_experts`` also ``experts``; and ``text`` if ``prompts.meta["text"]`` asks for
            it. ``meta["temperature"]`` is that of
            ``sampling``, and ``meta["text_ids"]``, if present, says over which ids the distributions are.

        Raises:
            DataError: There are not n seeds for each prompt.
        """
        requests = self._build_requests(prompts, sampling)
        return self._draw(prompts, sampling, self._ready_engine().generate(*requests) if requests[0] else [])

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref", concurrent=True)
    async def generate_beside(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        """Do :meth:`generate` while other calls run. The completions of all calls are drawn together.

        A ``generate`` of a subclass is called in a thread for each call, several at a time.
        """
        if next(cls for cls in type(self).__mro__ if "generate" in vars(cls)) is not Generator:
            return await asyncio.to_thread(self.generate, prompts, sampling)  # a subclass's own
        requests = self._build_requests(prompts, sampling)
        if not requests[0]:
            return self._draw(prompts, sampling, [])
        return self._draw(prompts, sampling, await asyncio.wrap_future(self._ready_engine().generate_later(*requests)))

    def tokens(self) -> Any:
        """Return what draws tokens for sessions in this process, beside all calls."""
        engine = self._ready_engine()
        if self._tokens is None or self._tokens.engine is not engine:
            self._tokens = load_sessions("a session in these processes").connect_engine(engine)
        return self._tokens

    @endpoint(concurrent=True)
    def positions(self) -> int | None:
        """Return the most tokens of a prompt and its completion that the engine of each rank takes; None for any."""
        return self._ready_engine().positions

    @endpoint(concurrent=True)
    def session_room(self) -> SessionRoom | None:
        """Return how much of open sessions the engine of each rank remembers; None for no limit."""
        return self._ready_engine().session_room

    @endpoint(concurrent=True)
    def count_prompt_tokens(self) -> PromptTokens | None:
        """Return what became of the prompts' tokens so far, of each rank; None if its engine does not count them."""
        return self._ready_engine().prompt_tokens

    @endpoint(concurrent=True)
    def serve(
        self,
        data: DataConfig,
        sampling: SamplingParams,
        *,
        model: str,
        token: str,
        host: str = "",
        port: int = 0,
    ) -> str:
        """Answer requests over HTTP beside all other calls, until the worker ends. Installed packages speak HTTP.

        Args:
            data: How conversations are written.
            sampling: Its stop tokens end an answer.
            model: The name of the model for clients.
            token: The bearer token that clients send.
            host: The address to listen at; by default that at which other workers of the cluster reach this one, which
                is the loopback where all are on one machine.
            port: The port; 0 chooses a free port.

        Returns:
            The address of each rank, such as ``http://127.0.0.1:43210``.

        Raises:
            ConfigError: No installed package speaks HTTP.
            PodiumError: The address or port cannot be used.
        """
        host = host or self.ctx.address
        server = load_sessions("a generator that answers requests").serve_engine(
            self._ready_engine(), self._tokenizer, data, sampling, model=model, token=token, host=host, port=port
        )
        self._servers.append(server)
        return server.url

    def _build_requests(self, prompts: Batch, sampling: SamplingParams) -> _Asked:
        """The arguments of the engine's ``generate``."""
        rows = [row.tolist() for row in prompts.jagged(fields.PROMPT_TOKENS).unbind()]
        seeds = prompts.dense(fields.SEED)
        if seeds.numel() != len(rows) * sampling.n:
            raise DataError(
                f"{fields.SEED} is {list(seeds.shape)}; {write_count(len(rows), 'prompt')} with n={sampling.n} need "
                "one seed for each completion"
            )
        begun = read_journals(path) if (path := prompts.meta.get("begun")) else None
        journal = self._journal_at(prompts.meta["journal"]) if prompts.meta.get("journal") else None
        return _Asked(rows, sampling, seeds.flatten().tolist(), journal, begun)

    def _draw(self, prompts: Batch, sampling: SamplingParams, drawn: Sequence[Completion]) -> Batch:
        rows = [row.tolist() for row in prompts.jagged(fields.PROMPT_TOKENS).unbind()]
        group = prompts.dense(fields.GROUP).repeat_interleave(sampling.n)
        batch = _as_batch(rows, drawn, group, sampling)
        if self._text_ids is not None:
            batch = batch.with_meta(text_ids=self._text_ids)
        if prompts.meta.get("text"):
            texts = [write_completion(c.token_ids.tolist(), c.stop, self._tokenizer) for c in drawn]
            batch = batch.with_columns({fields.TEXT: text_column(texts)})
        return batch

    def _journal_at(self, path: str) -> Journal:
        journal_path = Path(path if self.ctx.rank == 0 else f"{path}.{self.ctx.rank}")
        with self._making:
            if self._journal is None or self._journal.path != journal_path:
                self._journal = Journal(journal_path)
            return self._journal


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
            fields.VERSION_RANGE: torch.tensor([_range(c.versions) for c in drawn], dtype=torch.int64).view(-1, 2),
            fields.GROUP: group,
            fields.FINISH_REASON: [c.finish_reason for c in drawn],
        },
        {"temperature": sampling.temperature},
    )
    if getattr(sampling, "stop", ()):
        batch = batch.with_columns({fields.STOP_TEXT: [c.stop for c in drawn]})
    if width := 2 * sampling.record_top:
        top = torch.zeros(len(sampled), width)
        if drawn:
            top[sampled] = torch.cat([c.top for c in drawn if c.top is not None])
        batch = batch.with_columns({fields.ROLLOUT_TOP: tokens.like(top)})
    if sampling.record_experts:
        rows = [torch.nn.functional.pad(c.experts, (0, 0, 0, 1)) for c in drawn if c.experts is not None]
        experts = torch.cat(rows) if rows else torch.zeros(0, 0, dtype=torch.int16)
        batch = batch.with_columns({fields.EXPERTS: tokens.like(experts)})
    if not sampling.filtered:
        return batch
    kept = [c.kept for c in drawn if c.kept is not None]
    sizes = torch.zeros(len(sampled), dtype=torch.int64)
    if kept:
        sizes[sampled] = torch.cat([tokens.offsets.diff() for tokens in kept])
    ids = Jagged.from_rows([tokens.ids for tokens in kept])
    return batch.with_columns({fields.KEPT_SIZES: tokens.like(sizes), fields.KEPT_IDS: ids})


def _range(versions: Tensor) -> tuple[int, int]:
    return (int(versions.min()), int(versions.max())) if len(versions) else (0, 0)
