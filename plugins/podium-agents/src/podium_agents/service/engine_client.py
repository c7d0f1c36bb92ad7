"""Asks an engine in the same process from an event loop: many requests at once, by ids, with their tokens as they come.

    event loop   stream ─── submit ─┐                      ┌─▶ tokens ... ─▶ completion
    one thread                       └─▶ engine.poll ─ events ┘

The thread runs while requests are in flight. Calls of ``Engine.generate`` beside it are drawn in the same batches. What
one turn of the event loop asks for is submitted together, so that the engine begins it in one pass, and the two do not
compete for the interpreter meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor

from podium.devices import end_idle_threads
from podium.errors import ConfigError, GenerationError
from podium.rollout.engines.draw import leave_out
from podium.rollout.engines.requests import Aborted, Event, Failed, Finished, Request, RequestId, Tokens
from podium.rollout.sampling import SamplingParams
from podium_agents.service.admission import Admission
from podium_agents.service.token_source import Scored, read_sampled

if TYPE_CHECKING:
    from podium.rollout.engines import Engine
    from podium.rollout.engines.requests import PromptTokens
    from podium_agents.service.concurrency import Caller
    from podium_agents.service.constraints import Constraint
    from podium_agents.service.session_recording import Sampled

__all__ = ["EngineClient"]


_MOST_LOGITS: Final = 1 << 29  # that a text is scored by at the same time
_ROWS: Final = 512  # of them, whose log-probabilities are computed at the same time


_Events: TypeAlias = asyncio.Queue[Event]


@dataclass(frozen=True, eq=False, slots=True)
class _Id:
    """Id of a request of the service. It is equal to no other id."""

    number: int

    def __repr__(self) -> str:
        return f"{self.number} of the service"


class EngineClient:
    """Draws completions from ``engine`` for the coroutines of any event loop.

    Attributes:
        in_flight: The tokens that the requests in flight may still hold, prompts included. Callers balance their load
            by this number.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.in_flight = 0
        self.admission = Admission()
        self._numbers = itertools.count()
        self._scoring = threading.Lock()
        self._changed = threading.Condition()
        self._due: dict[asyncio.AbstractEventLoop, dict[RequestId, tuple[Request, _Events]]] = {}
        self._waiting: dict[RequestId, tuple[asyncio.AbstractEventLoop, _Events]] = {}
        self._thread: threading.Thread | None = None

    @property
    def positions(self) -> int | None:
        """As :attr:`.TokenSource.positions`."""
        return self.engine.positions

    @property
    def waiting(self) -> int:
        """The completions that the engine has not begun."""
        return len(self.engine.waiting)

    @property
    def version(self) -> int:
        """The version of the weights that the next token is drawn from."""
        return self.engine.version

    @property
    def prompt_tokens(self) -> PromptTokens | None:
        """As :attr:`.TokenSource.prompt_tokens`."""
        return self.engine.prompt_tokens

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        session: str = "",
        tokens: bool = True,
        caller: Caller | None = None,
        constraint: Constraint | None = None,
        exact: bool = True,
    ) -> AsyncGenerator[Tokens | Sampled]:
        """As :meth:`.TokenSource.stream`."""
        async with self.admission.turn(session, len(prompt), self.engine.session_room if session else None):
            drawing = self._stream(prompt, params, seed, session, tokens, caller, constraint, exact)
            async with contextlib.aclosing(drawing) as events:
                async for event in events:
                    if not isinstance(event, Tokens):
                        self.admission.note(session, len(prompt) + len(event.ids))
                    yield event

    async def _stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        session: str,
        tokens: bool,
        caller: Caller | None,
        constraint: Constraint | None,
        exact: bool,
    ) -> AsyncGenerator[Tokens | Sampled]:
        priority = self.engine.waiting.next_turn()
        if caller is not None:
            priority = priority if caller.priority is None else min(priority, caller.priority - 1)
            caller.priority = priority
        request = Request(
            id=_Id(next(self._numbers)), prompt=prompt, params=params, seed=seed, stream=tokens, priority=priority,
            constraint=constraint, session=session, exact=exact,
        )  # fmt: skip
        self.engine.check_request(request)
        events, loop = _Events(), asyncio.get_running_loop()
        size = len(prompt) + params.max_new_tokens
        with self._changed:
            due = self._due.setdefault(loop, {})
            if not due:
                loop.call_soon(self._submit, loop)
            due[request.id] = request, events
            self.in_flight += size
        try:
            while True:
                match await events.get():
                    case Tokens() as event:
                        yield event
                    case Finished(completion=drawn):
                        yield read_sampled(drawn)
                        return
                    case Failed(error=error):
                        raise error
                    case Aborted():
                        raise GenerationError(f"{request} was aborted")
        finally:
            with self._changed:
                self.in_flight -= size
                self._due.get(loop, {}).pop(request.id, None)
                if self._waiting.pop(request.id, None) is not None:
                    self.engine.abort(request.id)

    def end_session(self, name: str) -> None:
        """As :meth:`.TokenSource.end_session`."""
        self.admission.end(name)
        self.engine.end_session(name)

    def _submit(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            due = self._due.pop(loop, {})
            if not due:
                return
            self.engine.submit(*(request for request, _ in due.values()))
            self._waiting |= {id: (loop, events) for id, (_, events) in due.items()}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="podium-requests", daemon=True)
                self._thread.start()

    async def score(
        self, ids: Sequence[int], *, first: int = 1, top: int = 0, temperature: float = 1.0, session: str = ""
    ) -> Scored:
        """As :meth:`.TokenSource.score`. The engine's model reads the text in passes of its own, beside what it draws:
        one, or as many as its logits need memory for."""
        return await asyncio.to_thread(self._score, list(ids), first, top, temperature)

    def _score(self, ids: list[int], first: int, top: int, temperature: float) -> Scored:
        model = getattr(self.engine, "model", None)
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"{type(self.engine).__name__} gives no log-probabilities of texts, which top_logprobs and echo need: "
                "leave them out, or use engine.name native or transformers"
            )
        if len(ids) > 1:  # nothing is read after the last token
            self.engine.check("the text", ids[:-1], SamplingParams(max_new_tokens=1))
        device, most = next(model.parameters()).device, max(1, _MOST_LOGITS // self.engine.vocabulary)
        parts: list[tuple[Tensor, ...]] = []
        with self._scoring, self.engine.gate, torch.inference_mode():
            version = self.engine.version
            for start in range(first, len(ids), most):
                rows = slice(start - 1, min(start + most, len(ids)) - 1)
                logits = _read_logits(model, torch.tensor([ids[: rows.stop]], device=device), rows, most)
                chosen = torch.tensor(ids[start : rows.stop + 1], device=device)
                parts += [
                    _scores(logits[at : at + _ROWS] / temperature, chosen[at : at + _ROWS], top, self.engine.text_ids)
                    for at in range(0, len(chosen), _ROWS)
                ]
        columns = (torch.cat(of).tolist() for of in zip(*parts, strict=True)) if parts else ([], [], [], [], [])
        logprobs, best, values, top_ids, top_values = columns
        end_idle_threads()
        likely = [
            [(id, value) for id, value in zip(*row, strict=True) if value > -math.inf]
            for row in zip(top_ids, top_values, strict=True)
        ]
        return Scored(logprobs, best, values, likely if top else (), version)

    def _run(self) -> None:
        """Drive the engine while requests are in flight."""
        while True:
            events_by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Events, Event]]] = {}
            polled = self.engine.poll()
            with self._changed:
                for event in polled:
                    if (waiter := self._waiting.get(event.id)) is not None:
                        events_by_loop.setdefault(waiter[0], []).append((waiter[1], event))
                        if not isinstance(event, Tokens):
                            del self._waiting[event.id]
            for loop, loop_events in events_by_loop.items():
                with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                    loop.call_soon_threadsafe(_deliver, loop_events)
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return


def _deliver(found: Sequence[tuple[_Events, Event]]) -> None:
    for events, event in found:
        events.put_nowait(event)


def _read_logits(model: torch.nn.Module, ids_1L: Tensor, rows: slice, most: int) -> Tensor:
    """Return the logits after some of the tokens, the last of them included. Raises ConfigError if all logits are more
    than ``most`` rows, and the model cannot compute a part of them."""
    partial = "logits_to_keep" in inspect.signature(model.forward).parameters
    if not partial and ids_1L.shape[1] > most:
        raise ConfigError(
            f"the log-probabilities of {ids_1L.shape[1]} tokens are too many for one request; {most} are the limit"
        )
    options = {"logits_to_keep": rows.stop - rows.start} if partial else {}
    logits: Tensor = model(input_ids=ids_1L, use_cache=False, **options).logits[0]
    return logits[-(rows.stop - rows.start) :]


def _scores(
    logits: Tensor, chosen: Tensor, top: int, text_ids: tuple[int, tuple[int, ...]] | None
) -> tuple[Tensor, ...]:
    logprobs = logits.float().log_softmax(-1)
    best, chosen_logprobs = logprobs.max(-1), logprobs.gather(-1, chosen[:, None])[:, 0]
    drawable = leave_out(logprobs, text_ids)  # which overwrites those of holes
    most = drawable.topk(min(top, drawable.shape[-1]), -1)
    return chosen_logprobs, best.indices, best.values, most.indices, most.values
