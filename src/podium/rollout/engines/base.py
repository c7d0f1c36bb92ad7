"""The contract of a generation engine.

    any thread     submit(request) ─┐   abort(id) ─┐           generate_later: in a thread that ends with its requests
                                    v              v
    one thread     poll or generate: take in ── drop ── advance ── advance ── ... ── events go to whom they belong to
    at a time                                              │
                                                     gate: a forward pass, or a batch
                                                           │
    any thread     refresh(version)          gate closed ── copy ── gate open

The thread that calls ``poll`` or ``generate`` does the work of the engine. It calls ``advance`` until an event is there
for it. Another thread that calls ``poll`` or ``generate`` meanwhile waits until the first one has delivered its events,
or takes over when the first one has all of its own. ``submit`` and ``abort`` do not wait for a forward pass; a running
``advance`` sees them when it next calls ``interrupted``. An engine has no thread to shut down.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from podium.errors import ConfigError, GenerationError
from podium.exceptions import describe_error
from podium.rollout.engines.gate import WeightGate, WeightHolder
from podium.rollout.engines.journal import REPORT_EVERY_S, Drawn, Journal, Rows
from podium.rollout.engines.requests import (
    Aborted,
    Event,
    Failed,
    Finished,
    PromptTokens,
    Request,
    RequestId,
    RequestQueue,
    RowOfBatch,
    SessionRoom,
    Tokens,
)
from podium.rollout.engines.stops import Decode, Watch, cut_completion
from podium.rollout.sampling import Completion, SamplingParams
from podium.telemetry.progress import TOKENS, Counting

if TYPE_CHECKING:
    from podium.rollout.engines.config import EngineConfig


class Engine(WeightHolder):
    """Draws completions from a language model, and takes new weights in place.

    A completion depends on its prompt, its sampling parameters, its seed and the weights. It does not depend on the
    other requests, their order, or the number of ranks. New weights may arrive while requests are in flight. ``gate``
    is closed while they arrive, so no token is drawn from a mixture of versions. Each token carries the version of the
    weights that drew it. An engine's docstring says whether new weights come in between two tokens or between two
    batches, and what depends on floating-point rounding.

    A subclass has a constructor with the parameters ``config`` and ``model``. It implements ``supports``, ``advance``,
    ``drop`` if it holds requests between two calls of ``advance``, and the methods for new weights. An engine that
    computes with a ``torch`` model inherits the latter from :class:`~podium.rollout.engines.model.ModelEngine`.

    Args:
        config: The engine's name, options and limits of memory.
        model: The model whose weights it draws from.
        refusal: Why nothing can be drawn before the first ``refresh``; "" if the engine has its weights already.

    Attributes:
        waiting: The requests that ``advance`` has not begun, in a ``podium.rollout.engines.RequestQueue``. Only
            ``advance`` takes requests from the queue.
        vocabulary: Number of tokens that the model knows. The constructor of a subclass sets it.
        positions: The longest sequence that the model takes, or None for any. The constructor of a subclass sets it.
        prefilled_tokens: Number of prompt tokens that went through the model so far, where the engine counts them.
        count: Counts the tokens that are drawn, for a run's bar. ``advance`` adds to ``count.done``; it need not.
        prompt_tokens: What became of the prompts' tokens so far, where the engine counts it.
        decode: The text of token ids, which requests with ``RequestParams.stop`` need. Who makes the engine sets it.
        text_ids: The ids that are drawn, as :meth:`restrict` was given them; None where all of the vocabulary are.
    """

    auto_rank: ClassVar[int] = 0
    """``engine.name=auto`` takes the engine of the highest rank that supports the model; none of rank 0."""
    options: ClassVar[type | None] = None
    """The class, under ``@section("engine.options")``, of options that the engine reads by ``config.read_options``."""
    constrains: ClassVar[bool] = False
    """Whether the engine draws by ``Request.constraint`` and ``RequestParams.min_p``. Other engines refuse these."""
    records: ClassVar[frozenset[str]] = frozenset()
    """Those of the fields record_top and record_experts of ``RequestParams`` that it serves. It refuses the others."""

    waiting: RequestQueue
    vocabulary: int
    positions: int | None = None
    prefilled_tokens: int = 0
    prompt_tokens: PromptTokens | None = None
    text_ids: tuple[int, tuple[int, ...]] | None = None
    decode: Decode | None = None

    def __init__(self, config: EngineConfig, model: nn.Module, refusal: str = "") -> None:
        self.config = config
        self.gate = WeightGate(refusal)
        self.waiting = RequestQueue()
        self._changed = threading.Condition()  # guards what follows
        self._driving = False
        self._arrived: list[Request] = []
        self._aborted: set[RequestId] = set()
        self._ended_sessions: set[str] = set()
        self._events: list[Event] = []
        self._in_flight: dict[RequestId, list[Event]] = {}  # where the events of each request go
        self._journals: dict[RequestId, tuple[Journal, int, int]] = {}  # journal, seed, and tokens drawn elsewhere
        self._watches: dict[RequestId, tuple[Watch, Request]] = {}  # of the requests that texts end
        self._stopped: set[RequestId] = set()  # those whose text has come, which the engine still draws
        self._reported_s = 0.0
        self.count = Counting(TOKENS)
        self._later: dict[RequestId, tuple[Rows, Future[list[Completion]]]] = {}  # what the thread draws
        self._later_box: list[Event] = []
        self._later_runs = False

    @classmethod
    @abstractmethod
    def supports(cls, model: nn.Module) -> str | None:
        """Return why the engine cannot run ``model``, or None if it can."""

    @classmethod
    def model_device(cls, config: EngineConfig, device: torch.device) -> torch.device:
        """Return the device of the model with which the engine is made, in a process that owns ``device``."""
        return device

    @property
    def version(self) -> int:
        """Version of the weights that the next token is drawn from; 0 before the first ``refresh``."""
        return self.gate.version

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        with self._changed:
            return not self._in_flight and not self._driving

    @property
    def session_room(self) -> SessionRoom | None:
        """How much of open sessions the engine remembers between their turns; None where nothing limits it, or nobody
        knows. Any thread may ask."""
        return None

    def restrict(self, limit: int, holes: Sequence[int] = ()) -> None:
        """Draw only ids below ``limit`` that are not among ``holes``, because others stand for no text.

        Distributions, their log-probabilities and kept sets are then those over these ids. Nothing may be in flight. An
        engine reads ``text_ids`` when it draws. Requests of an engine that draws other ids nevertheless fail.
        """
        self.text_ids = limit, tuple(holes)

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Give the engine requests. Any thread may call this at any time. Requests of one call begin together.

        Raises:
            ConfigError: A prompt is empty, has an id outside the vocabulary, or is with ``max_new_tokens`` longer than
                the model's positions; or a request of that id is in flight. Other requests go on.
        """
        for request in requests:
            self.check_request(request)
        self._enqueue(requests, self._events)

    def abort(self, id: RequestId) -> None:
        """End a request, if it is in flight, with the event ``Aborted``. Any thread may call this at any time."""
        with self._changed:
            self._watches.pop(id, None)
            box = self._in_flight.pop(id, None)
            if box is not None:
                self._aborted.add(id)
                box.append(Aborted(id))
                self._changed.notify_all()
                if not self._in_flight:
                    self.count.close()
                if not self._driving:
                    self._take_in()

    def end_session(self, name: str) -> None:
        """Take note that no further request of a session comes. Any thread may call this at any time."""
        with self._changed:
            self._ended_sessions.add(name)

    def poll(self, timeout_s: float | None = None) -> list[Event]:
        """Do work in this thread until there are events of submitted requests, and return them.

        Args:
            timeout_s: Return after about this many seconds also without an event, at the earliest after one call of
                ``advance``. Requests that come meanwhile are served. Without it, an empty list means that no request
                is in flight.
        """
        return self._drive(self._events, None if timeout_s is None else time.monotonic() + timeout_s)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        journal: Journal | None = None,
        begun: Mapping[int, Drawn] | None = None,
    ) -> list[Completion]:
        """Draw ``params.n`` completions for each of P prompts, one seed a completion, while other requests go on.

        Args:
            prompts: P sequences of token ids, none of them empty; lengths may differ.
            params: How to draw.
            seeds: ``P * params.n`` signed integers of 64 bits, prompt-major like the result.
            journal: The journal to which drawn tokens are written about once a second, so that another engine can
                continue.
            begun: By seed, the tokens that another engine had drawn. Their completions are continued. The next tokens
                are those that the first engine would have drawn, but for rounding.

        Returns:
            ``P * params.n`` completions: those of the first prompt, then those of the second, and so on.

        Raises:
            ConfigError: An empty prompt, an id outside the vocabulary, a wrong number of seeds, or a prompt that with
                ``max_new_tokens`` is longer than the model's positions.
            GenerationError: The model's logits are not finite, or there are no whole weights to draw from.
        """
        box: list[Event] = []
        rows = self._rows(prompts, params, seeds, journal, begun)
        self._enqueue(rows.missing(), box, rows)
        try:
            while not rows.done:
                for event in self._drive(box, None):
                    rows.take(event)
        finally:
            self._finish(rows)
        return [rows.completions[row] for row in rows.seeds]

    def generate_later(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        journal: Journal | None = None,
        begun: Mapping[int, Drawn] | None = None,
    ) -> Future[list[Completion]]:
        """Do :meth:`generate` in a thread that all such calls share. The future raises what the call raises.

        ``cancel()`` of the future ends the requests.
        """
        future: Future[list[Completion]] = Future()
        rows = self._rows(prompts, params, seeds, journal, begun)
        with self._changed:
            self._later |= dict.fromkeys(rows.seeds, (rows, future))
            self._enqueue(rows.missing(), self._later_box, rows)
            if not self._later_runs:
                self._later_runs = True
                threading.Thread(target=self._draw_later, name="podium-draw", daemon=True).start()
        future.add_done_callback(lambda future: self._finish(rows) if future.cancelled() else None)
        if rows.done:
            self._settle(rows, future)
        return future

    def _draw_later(self) -> None:
        """The thread of ``generate_later``. It ends when nothing is in flight."""
        while True:
            for event in self._drive(self._later_box, None):
                with self._changed:
                    rows, future = self._later.pop(event.id, (None, None))
                if rows is None or future is None:
                    continue
                try:
                    rows.take(event)
                except Exception as error:  # noqa: BLE001 - whatever it is belongs to who waits
                    self._settle(rows, future, error)
                if rows.done:
                    self._settle(rows, future)
            with self._changed:
                if not self._later:
                    self._later_runs = False
                    return

    def _settle(self, rows: Rows, drawn: Future[list[Completion]], error: Exception | None = None) -> None:
        self._finish(rows)
        if drawn.done() or not drawn.set_running_or_notify_cancel():
            return
        if error is None:
            drawn.set_result([rows.completions[row] for row in rows.seeds])
        else:
            drawn.set_exception(error)

    def _rows(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        journal: Journal | None,
        begun: Mapping[int, Drawn] | None,
    ) -> Rows:
        """Check what is asked for."""
        count = len(prompts) * params.n
        if len(seeds) != count:
            raise ConfigError(
                f"{len(prompts)} prompts with n={params.n} need {count} seeds, one a completion; got {len(seeds)}"
            )
        for index, prompt in enumerate(prompts):
            self.check(f"prompt {index}", prompt, params)
        rows = Rows(prompts, params, seeds, journal, begun or {}, self._make_cut(params))
        if journal is not None:
            self._journals |= {row: (journal, seed, len(rows.heads.get(row, ()))) for row, seed in rows.seeds.items()}
        return rows

    def _finish(self, rows: Rows) -> None:
        """End what is in flight of ``rows``."""
        rows.count.close()
        for row, seed in rows.seeds.items():
            if row not in rows.completions:
                self.abort(row)
            self._later.pop(row, None)
            if journal := self._journals.pop(row, None):
                journal[0].finished([seed])
                journal[0].flush()

    def _report(self) -> None:
        """Write what is drawn into the journals. Only the thread that calls ``advance`` may do this."""
        self._reported_s = time.monotonic()
        journals = self._journals.copy()
        for id, draft in self.drawn():
            if entry := journals.get(id):
                journal, seed, at = entry
                journal.add(seed, draft, at)
        for journal in {journal.path: journal for journal, *_ in journals.values()}.values():
            journal.flush()

    def _enqueue(self, requests: Sequence[Request], box: list[Event], rows: Rows | None = None) -> None:
        with self._changed:
            was_idle = not self._in_flight
            for request in requests:
                if request.id in self._in_flight or request.id in self._aborted:
                    raise ConfigError(f"{request} is in flight already; give each request an id of its own")
                self._in_flight[request.id] = box
            self._arrived += [self._watch(request, rows) for request in requests]
            if was_idle and self._in_flight:
                self.count.open()
            if rows is not None:
                rows.count.open(len(rows.completions))
            self._changed.notify_all()

    def _drive(self, box: list[Event], deadline: float | None) -> list[Event]:
        """Empty ``box`` once an event is in it, at the deadline, or if nothing is in flight."""
        with self._changed:
            while not box:
                if not self._driving and self._take_in():
                    self._driving = True
                    self._changed.release()
                    events: list[Event] = []
                    try:
                        events = self._advance(deadline)
                    finally:
                        self._changed.acquire()
                        self._driving = False
                        self._deliver(events)
                elif self._driving or deadline is not None:
                    self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                else:
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    break
            if not self._in_flight:
                self.count.close()
            events = box.copy()
            box.clear()
            return events

    def _take_in(self) -> bool:
        """Hand the engine what came since the last time. Return whether it has anything to do."""
        if self._aborted:
            self._arrived = [request for request in self._arrived if request.id not in self._aborted]
            self.waiting.drop(self._aborted)
            self.drop(self._aborted)
            self._aborted = set()
        if self._ended_sessions:
            self.forget_sessions(self._ended_sessions)
            self._ended_sessions = set()
        self.waiting.push(self._arrived)
        self._arrived = []
        return bool(self._in_flight)

    def _deliver(self, events: Sequence[Event]) -> None:
        if self.text_ids is not None:
            events = [self._refuse_other_ids(event, *self.text_ids) for event in events]
        for event in events:
            box = self._in_flight.get(event.id)
            if box is not None:  # else it was aborted meanwhile
                box.append(event)
                if not isinstance(event, Tokens):
                    del self._in_flight[event.id]
        self._aborted |= self._stopped
        self._stopped = set()
        if self._aborted:
            self._take_in()
        self._changed.notify_all()

    def _refuse_other_ids(self, event: Event, limit: int, holes: Sequence[int]) -> Event:
        """The event, or the failure of a request that has ids without text."""
        if not isinstance(event, Finished):
            return event
        ids = event.completion.token_ids
        wrong = ids[(ids >= limit) | torch.isin(ids, torch.tensor(holes, dtype=ids.dtype))]
        if not len(wrong):
            return event
        reason = (
            f"{type(self).__name__} drew the token {int(wrong[0])}, which stands for no text: draw from the "
            "logits that podium.rollout.engines.draw.leave_out(logits, self.text_ids) returns"
        )
        return Failed(event.id, GenerationError(reason))

    @torch.no_grad()
    def _advance(self, deadline: float | None) -> list[Event]:
        def interrupt() -> bool:
            came = bool(self._arrived) or bool(self._aborted)
            return came or (deadline is not None and time.monotonic() >= deadline) or self._report_is_due()

        try:
            events = self._end_at_stops(self.advance(interrupt))
            if self._report_is_due():
                self._report()
            return events
        except BaseException as error:
            ended = GenerationError(f"generation ended by {describe_error(error)}")
            failure = error if isinstance(error, Exception) else ended
            with self._changed:
                begun = self._in_flight.keys() - {request.id for request in self._arrived}
                for id in begun:
                    self._watches.pop(id, None)
                    self._in_flight.pop(id).append(Failed(id, failure))
                self._aborted |= begun
            if failure is not error:
                raise
            return []

    def _make_cut(self, params: SamplingParams) -> Callable[[Completion], Completion] | None:
        stops, decode = getattr(params, "stop", ()), self.decode
        return partial(cut_completion, stops=stops, decode=decode) if stops and decode is not None else None

    def _watch(self, request: Request, rows: Rows | None) -> Request:
        """Look at the tokens of a request that texts end. Returns the request, whose tokens the engine reports."""
        stops = getattr(request.params, "stop", ())
        if not stops or self.decode is None:
            return request
        head = rows.heads.get(request.id) if rows is not None else None
        begun = () if head is None else head.token_ids
        watch = Watch(stops, self.decode, begun, 1) if request.stream else Watch(stops, self.decode, begun)
        self._watches[request.id] = watch, request
        return replace(request, stream=True)

    def _end_at_stops(self, events: Sequence[Event]) -> list[Event]:
        """Finish requests whose text has come. What the engine drew after it is left out."""
        if not self._watches:
            return [*events]
        passed: list[Event] = []
        ended: dict[RequestId, Request] = {}
        for event in events:
            watch, request = self._watches.get(event.id, (None, None))
            if watch is None or request is None:
                passed.append(event)
            elif isinstance(event, Tokens):
                was_over = watch.is_over
                if watch.add(event.token_ids) and request.constraint is None:  # whose masks come with the end
                    ended[event.id] = request
                if request.stream and not was_over:
                    passed.append(event.without_last(watch.count_beyond() if watch.is_over else 0))
            else:
                passed.append(self._cut(event, request))
                self._watches.pop(event.id, None)
                ended.pop(event.id, None)
        for id, draft in self.drawn() if ended else ():
            if id in ended and len(draft):
                passed.append(self._cut(Finished(id, draft.completion("stop")), ended[id]))
                self._watches.pop(id, None)
                self._stopped.add(id)
        return passed

    def _cut(self, event: Event, request: Request) -> Event:
        """The end of a request, cut at its text. ``generate`` does that itself, which may continue a completion."""
        if not isinstance(event, Finished) or isinstance(request.id, RowOfBatch):
            return event
        cut = self._make_cut(request.params)
        return event if cut is None else Finished(event.id, cut(event.completion))

    def _report_is_due(self) -> bool:
        return bool(self._journals) and time.monotonic() - self._reported_s >= REPORT_EVERY_S

    def check_request(self, request: Request) -> None:
        """Raise ConfigError for a request that cannot be drawn."""
        self.check(f"the prompt of {request}", request.prompt, request.params)
        if not self.constrains and (request.constraint is not None or request.params.min_p):
            raise ConfigError(
                f"{type(self).__name__} does not record the tokens that a grammar, logit_bias or min_p leaves to draw "
                "from, so that no distribution could be trained; use engine.name native or transformers"
            )

    def check(self, subject: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise ConfigError, naming ``subject``, for a prompt that cannot be continued. Subclasses may add checks."""
        if any(isinstance(stop, str) for stop in params.stop_token_ids):
            raise ConfigError(f"{subject} has a text among stop_token_ids: an engine takes texts as RequestParams.stop")
        if getattr(params, "stop", ()) and self.decode is None:
            raise ConfigError(f"{subject} ends with texts, and {type(self).__name__} has no decode: set it")
        if missing := {name for name in ("record_top", "record_experts") if getattr(params, name)} - self.records:
            raise ConfigError(f"{subject} asks for {missing.pop()}, which {type(self).__name__} does not serve")
        if not len(prompt):
            raise ConfigError(f"{subject} is empty; give it at least one token, such as the model's BOS")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.vocabulary:
            raise ConfigError(
                f"{subject} has token {low if low < 0 else high}, outside the model's vocabulary of {self.vocabulary}; "
                "is it the model's own tokenizer?"
            )
        if self.positions is not None and len(prompt) + params.max_new_tokens > self.positions:
            raise ConfigError(
                f"{subject} has {len(prompt)} tokens, which with max_new_tokens={params.max_new_tokens} exceeds the "
                f"model's {self.positions} positions; shorten the prompt or lower sampling.max_new_tokens"
            )

    @abstractmethod
    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        """Do a piece of work for the requests in ``waiting`` and the requests that earlier calls began. Return their
        events.

        There is at least one such request. A piece of work may be one token of each request, or a whole batch. Each
        request gets one ``Finished`` or ``Failed`` (see :func:`~podium.rollout.engines.requests.conclude`), and before
        that, if it asks for them, ``Tokens``. An exception fails all requests that were begun or waited.

        A call that draws several tokens of requests that it can put aside returns as soon as it has an event. Between
        two tokens it calls ``interrupted()``, and returns when that is true: a request has arrived, one was aborted, or
        the time of ``poll`` is over.

        Gradients are switched off. Each forward pass runs in a block ``with self.gate:``, during which no new weights
        come. Inside the block, ``self.version`` is the version of the weights that the pass uses.
        """

    def drop(self, ids: Collection[RequestId]) -> None:
        """End the work on those of ``ids`` that ``advance`` has begun. The base class has reported them as aborted."""

    def forget_sessions(self, names: Collection[str]) -> None:
        """Let what is remembered of these sessions alone be the first to go when memory is short. They have ended."""

    def drawn(self) -> list[tuple[RequestId, Drawn]]:
        """Return the tokens drawn so far for the requests that ``advance`` has begun. It is called between two calls of
        ``advance``. If the engine is lost, completions that it did not report are generated again from their first
        token.
        """
        return []
