"""The rollout worker: it runs sessions of an environment, and returns their conversations as rows to train on.

    tasks ─▶ sessions, many at a time ─▶ calls of the model ─▶ the generator of these processes, or those elsewhere
                 └─▶ rows of token ids as they were sampled, with their log-probabilities and versions

Legend: S sessions, B rows; a session has at least one row for each of its agents.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from podium.data import Batch, Jagged, fields
from podium.data.masks import mask_columns
from podium.data.sampled_text import text_column
from podium.errors import ConfigError
from podium.models.config import ModelConfig
from podium.models.loading import position_limit
from podium.models.tokenizers import load_tokenizer
from podium.models.vocabulary import TextIds, find_text_ids
from podium.rollout.engines.requests import SessionRoom
from podium.rollout.engines.stops import write_completion
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium.runtime import Worker, concat, endpoint, gather, shard
from podium.telemetry import Event, Note, active, emit, subscribe
from podium.workers.siblings import find_sibling
from podium_agents.environments.client import MOST_AGENTS
from podium_agents.environments.contract import Earned
from podium_agents.environments.outside import TOKEN
from podium_agents.environments.processes import SessionProcesses
from podium_agents.environments.resolve import ResolvedEnvironment, longest_session_s, resolve_environment
from podium_agents.environments.runner import Episode, Trajectory, live
from podium_agents.service.chat_format import chat_format
from podium_agents.service.service import Service
from podium_agents.services import load_service, open_gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from transformers import PreTrainedTokenizerBase

    from podium.workers.generator import Generator
    from podium_agents.service.chat_format import ChatFormat
    from podium_agents.service.session_recording import Row
    from podium_agents.service.token_source import TokenSource
    from podium_agents.services import OfferedSessions, RemoteSource

__all__ = ["Rollout"]

_LONGEST: Final = 32768  # tokens, of a model that names no limit
_MODEL: Final = "policy"  # the name of the model for agents
_AGENTS: Final = MOST_AGENTS + 1  # of one session, with the client itself
_NOTES: Final = 100  # that wait for the controller


class Rollout(Worker):
    """Runs sessions of an environment with the generator's model.

    Args:
        model: The model. Its tokenizer and its number of positions are used.
        data: How conversations are written.
        environment: The environment, which is loaded when the worker starts.
        token: What a service elsewhere that runs the sessions sends, if one does.
    """

    def __init__(self, model: ModelConfig, data: DataConfig, environment: EnvironmentConfig, token: str = "") -> None:
        self._model, self._data, self._config = model, data, environment
        self._environment: ResolvedEnvironment = resolve_environment(environment)
        self._processes = SessionProcesses(environment) if environment.limits.processes else None
        self._room = asyncio.Semaphore(environment.limits.side_by_side)  # also of steps that are collected side by side
        ports, number = environment.limits.port_range, self.ctx.local_rank
        ports = [*ports[number:], *ports[:number]]  # the same worker takes the same port when it is restarted
        self._gateway = open_gateway(environment.limits.host, ports)
        self._offers: OfferedSessions | None = None
        if (outside := self._environment.outside) is not None:
            limits_s = environment.limits.time_limit_s, outside.open_limit_s, outside.reward_limit_s
            self._offers = self._gateway.offer(limits_s, token, names_tasks=not data.train)
        self._making = threading.Lock()
        self._remote: RemoteSource | None = None
        self._token = self._url = ""
        self._reports: dict[str, dict[str, Any]] = {}
        self._noted: deque[str] = deque(maxlen=_NOTES)
        self._stop_hearing: Callable[[], None] | None = None

    @endpoint(concurrent=True)
    def connect(
        self, urls: Sequence[str], token: str, positions: int | None = None, room: SessionRoom | None = None
    ) -> None:
        """Use the generators at ``urls`` from now on, unless these processes hold a generator.

        Args:
            urls: Their addresses, as ``Generator.serve`` returns them.
            token: The bearer token that they accept.
            positions: The most tokens of a prompt and its completion that each of them takes; None for any number.
            room: How much of open sessions each of them remembers, of which each rollout worker uses an equal part;
                None for no limit.

        Raises:
            ConfigError: No installed package speaks HTTP.
        """
        with self._making:
            if room is not None:
                room = SessionRoom(*(size // self.ctx.world_size for size in room))
            if self._remote is not None:
                self._remote.connect(urls, positions, room)
                return
            service = load_service("a request to a generator in another process")
            self._remote = service.connect_generators(urls, token)
            self._remote.connect(urls, positions, room)

    @endpoint(dispatch=shard(args=("tasks",)), collect=concat(any_rows=True), returns="ref", concurrent=True)
    async def live(self, tasks: Batch, sampling: SamplingParams) -> Batch:
        """Run a session for each task.

        Args:
            tasks: ``task``, a Python column of S rows of the data; ``seed`` int64 ``[S]``; ``group`` int64 ``[S]``; and
                ``session`` int64 ``[S]``, numbers that differ. ``meta["key"]`` names the call for :meth:`report`, and
                ``meta["training"]`` says whether it is for training, and not for an evaluation.
            sampling: How tokens are drawn; ``max_new_tokens`` is the most of one answer.

        Returns:
            B rows of the sessions that did not fail, those of one agent side by side: ``tokens``, ``loss_mask``,
            ``rollout_logprobs``, ``versions``, ``version_range``, ``turn``, ``token_rewards``, ``trajectory``,
            ``session``, ``group``, ``agent``, ``finish_reason``, ``grade`` (a Python column of
            :class:`.contract.Earned`), and ``text``, the last answer, with stop texts also ``stop_text``; with top-k or
            top-p also ``kept_sizes`` and ``kept_ids``, else ``mask_numbers`` and ``mask_bits``.
        """
        key, numbers = str(tasks.meta["key"]), tasks.dense(fields.SESSION).tolist()
        if self._stop_hearing is None and not active():
            self._stop_hearing = subscribe(self._hear)
        if self._processes is not None:
            await asyncio.to_thread(self._processes.start)
        groups, names = tasks.dense(fields.GROUP).tolist(), [f"{key}-{number}" for number in numbers]
        limits = self._config.limits
        async with self._service(sampling, key) as (service, address):
            if self._offers is not None:
                is_evaluation = not tasks.meta.get("training", True)
                self._offers.plan(names, groups, tasks.python(fields.TASK), is_evaluation=is_evaluation)
                limits = replace(limits, time_limit_s=longest_session_s(self._config))
                self._say_address(address())
            episodes = await live(
                self._environment.play if self._processes is None else self._processes.play,
                tasks.python(fields.TASK),
                tasks.dense(fields.SEED).tolist(),
                names,
                service,
                limits,
                address=address,
                key_of=self._gateway.keys.key_of,
                room=self._room,
                live_outside=None if self._offers is None else self._offers.live,
            )
            self._reports[key] = {**_report(episodes, service), "unknown": self._unknown(episodes)}
        batch = _as_batch(
            [
                (episode, trajectory, group, number * _AGENTS + index)
                for episode, group, number in zip(episodes, groups, numbers, strict=True)
                if not episode.failure
                for index, trajectory in enumerate(episode.trajectories)
            ],
            service,
            sampling,
        )
        return batch if self._text_ids is None else batch.with_meta(text_ids=self._text_ids)

    @endpoint(collect=gather(), concurrent=True)
    def report(self, key: str) -> dict[str, Any]:
        """Return the results of the sessions that the call of :meth:`live` with this key ran. A second call returns
        nothing.
        """
        return self._reports.pop(key, {})

    @endpoint(collect=gather(), concurrent=True)
    def notes(self) -> list[str]:
        """Return the notes of this process since the last call, which no listener gets. This works while an environment
        blocks all sessions.
        """
        return [self._noted.popleft() for _ in range(len(self._noted))]

    def _say_address(self, url: str) -> None:
        """Emit once where a service opens sessions."""
        if url != self._url:
            self._url = url
            emit(
                Note(
                    f"a service opens sessions by POST {url}/sessions, with the token {TOKEN} as its API key; those of "
                    'an evaluation come first, with "evaluation": true in the answer and a task of the run'
                )
            )

    def _hear(self, event: Event) -> None:
        if isinstance(event, Note):
            self._noted.append(event.text)

    def close(self) -> None:
        """End the processes of sessions."""
        if self._stop_hearing is not None:
            self._stop_hearing()
        if self._processes is not None:
            self._processes.close()
        self._gateway.close()

    def _unknown(self, episodes: Sequence[Episode]) -> int:
        """How many rows hold a character that the tokenizer does not know, in what the model has read."""
        unknown = self._encoder.unknown
        return sum(
            any(id == unknown and not sampled for id, sampled in zip(row.ids, row.sampled, strict=True))
            for episode in episodes
            for trajectory in episode.trajectories
            for row in trajectory.session.rows
            if unknown is not None
        )

    @asynccontextmanager
    async def _service(self, sampling: SamplingParams, call: str) -> AsyncIterator[tuple[Service, Any]]:
        """The service of one call, and the function that gives its address."""
        source = self._source
        limits = [most for most in (position_limit(self._model, generated=True), source.positions) if most]
        service = Service(
            source,
            self._form,
            self._tokenizer,
            model=_MODEL,
            context=min(limits, default=_LONGEST),
            stop_token_ids=sampling.stop_token_ids,
            most_tokens=1 << 62,  # sessions wait at the engine, not at its door
            rules=sampling,
            stops=getattr(sampling, "stop", ()),
        )
        remote = self._remote if source is self._remote else None
        async with remote.connected() if remote else nullcontext(), self._gateway.open(service, call) as address:
            yield service, address

    @property
    def _source(self) -> TokenSource:
        generator: Generator | None = find_sibling(self.ctx, "tokens")
        if generator is not None:
            return generator.tokens()
        if self._remote is None:
            raise ConfigError("this rollout worker has no generator: call connect(urls, token) first")
        return self._remote

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._model.tokenizer_source)

    @cached_property
    def _text_ids(self) -> TextIds | None:
        """The ids that the generators draw; None for all."""
        return find_text_ids(self._model, self._tokenizer)

    @cached_property
    def _form(self) -> ChatFormat:
        return chat_format(self._encoder, self._tokenizer)

    @cached_property
    def _encoder(self) -> ChatEncoder:
        return ChatEncoder(self._tokenizer, self._data)


def _report(episodes: Sequence[Episode], service: Service) -> dict[str, Any]:
    """Counts of one call, for metrics and notes."""
    failed = [episode for episode in episodes if episode.failure]
    spoken = [trajectory for episode in episodes for trajectory in episode.trajectories]
    return {
        "sessions": len(episodes),
        "failures": Counter(episode.failure for episode in failed),
        "details": {episode.failure: episode.details for episode in failed if episode.details},
        "context_full": sum(episode.truncated and not episode.limit for episode in episodes),
        "limits": Counter(episode.limit for episode in episodes if episode.limit),
        "turns": sum(len(trajectory.session.calls) for trajectory in spoken),
        "sampled": sum(sum(row.sampled) for trajectory in spoken for row in trajectory.session.rows),
        "splits": sum(trajectory.session.splits for trajectory in spoken),
        "unrecognized": sum(trajectory.session.unrecognized for trajectory in spoken),
        "departure": next((other.session.departure for other in spoken if other.session.departure), ""),
        "tool_calls": sum(episode.counts.get("tool_calls", 0) for episode in episodes),
        "tool_errors": sum(episode.counts.get("tool_errors", 0) for episode in episodes),
        "seconds": [round(episode.seconds, 3) for episode in episodes],
        "waits_s": [round(episode.waited_s, 3) for episode in episodes if episode.waited_s],
        "aliases": [*service.aliases],
        "overruled": {name: count for name, count in service.overruled.items() if count},
    }


def _as_batch(
    found: Sequence[tuple[Episode, Trajectory, int, int]], service: Service, sampling: SamplingParams
) -> Batch:
    """The rows of trajectories, each with its episode, its group and its number."""
    rows = [(*outcome, row) for outcome in found for row in outcome[1].session.rows]
    tokens = Jagged.from_rows([torch.tensor(row.ids) for *_, row in rows])

    def column(values: Sequence[Sequence[Any]], dtype: torch.dtype) -> Jagged:
        flat = [value for row_values in values for value in row_values]
        return tokens.like(torch.tensor(flat, dtype=dtype))

    turns = [_turns(row, trajectory.turn_rewards) for _, trajectory, _, _, row in rows]
    stops = getattr(sampling, "stop", ())
    batch = Batch(
        {
            fields.TOKENS: tokens,
            fields.LOSS_MASK: column([row.sampled for *_, row in rows], torch.bool),
            fields.ROLLOUT_LOGPROBS: column([row.logprobs for *_, row in rows], torch.float32),
            fields.VERSIONS: column([row.versions for *_, row in rows], torch.int64),
            fields.VERSION_RANGE: torch.tensor([_range(row) for *_, row in rows], dtype=torch.int64).view(-1, 2),
            fields.TURN: column([numbers for numbers, _ in turns], torch.int64),
            fields.TOKEN_REWARDS: column([rewards for _, rewards in turns], torch.float32),
            fields.TRAJECTORY: torch.tensor([number for _, _, _, number, _ in rows], dtype=torch.int64),
            fields.SESSION: torch.tensor([number // _AGENTS for _, _, _, number, _ in rows], dtype=torch.int64),
            fields.GROUP: torch.tensor([group for _, _, group, _, _ in rows], dtype=torch.int64),
            fields.AGENT: [trajectory.agent for _, trajectory, _, _, _ in rows],
            fields.FINISH_REASON: [
                "length" if episode.truncated else _last_reason(trajectory) for episode, trajectory, _, _, _ in rows
            ],
            fields.GRADE: [
                Earned(
                    trajectory.score,
                    dict(episode.parts),
                    float(sum(trajectory.turn_rewards.values())),
                    episode.truncated,
                )
                for episode, trajectory, _, _, _ in rows
            ],
            fields.TEXT: text_column([_last_text(trajectory, service.tokenizer) for _, trajectory, _, _, _ in rows]),
            **({fields.STOP_TEXT: [row.session.calls[-1].stop_text for _, row, _, _, _ in rows]} if stops else {}),
        },
        {"temperature": sampling.temperature},
    )
    if not sampling.filtered:
        return batch.with_columns(mask_columns([row.masks for *_, row in rows], tokens))
    kept = [ids for *_, row in rows for ids in row.kept]
    sizes = tokens.like(torch.tensor([len(ids) for ids in kept], dtype=torch.int64))
    kept_ids = Jagged.from_rows(
        [torch.tensor([i for ids in row.kept for i in ids], dtype=torch.int64) for *_, row in rows]
    )
    return batch.with_columns({fields.KEPT_SIZES: sizes, fields.KEPT_IDS: kept_ids})


def _turns(row: Row, rewards: Any) -> tuple[list[int], list[float]]:
    """For each token of a row, the call that sampled it, or -1; and the reward that it carries."""
    numbers, earned = [-1] * len(row.ids), [0.0] * len(row.ids)
    for turn in row.turns:
        numbers[turn.start : turn.stop] = [turn.call] * (turn.stop - turn.start)
        earned[turn.stop - 1] = float(rewards.get(turn.call, 0.0))
    return numbers, earned


def _range(row: Row) -> tuple[int, int]:
    versions = [version for version, sampled in zip(row.versions, row.sampled, strict=True) if sampled]
    return min(versions), max(versions)


def _last_reason(trajectory: Trajectory) -> str:
    """How the last answer of an agent ended, in whichever of its rows that answer is."""
    turns = (turn for row in trajectory.session.rows for turn in row.turns)
    return max(turns, key=lambda turn: turn.call).finish_reason


def _last_text(trajectory: Trajectory, tokenizer: Any) -> str:
    """What an agent said last, with its reasoning, as the text of a completion without an environment. Where it called
    tools and said no more, that is what it said beside the calls: a number in their arguments is no answer."""
    call = trajectory.session.calls[-1]
    message = call.messages[-1] if call.messages else {}
    if message.get("tool_calls"):
        return str(message.get("content") or "")
    row = trajectory.session.rows[call.row]
    turn = next(turn for turn in row.turns if turn.call == call.number)
    return write_completion(row.ids[turn.start : turn.stop], call.stop_text, tokenizer)
