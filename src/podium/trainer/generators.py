"""The generators of a run: how they sample, how they get new weights, and what happens when one is lost.

    generate   a whole batch, cut into a share for each generator              sync, one_step_off, evaluation
    draw       parts of a few prompts, each given to the generator that        asynchronous
               has the fewest; a part is over as soon as its last completion is

A generator that has processes of its own is restarted when it is lost. It gets the current weights before it draws, and
the others go on meanwhile. With ``draw`` another one continues its completions from the tokens that it had written to
its journal. With ``generate`` and ``sync`` they are drawn again from the same seeds, which gives the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Self

from podium.data import Batch, fields
from podium.errors import PlacementError, PodiumError, WorkerStartError
from podium.telemetry import Note, Recovered, emit
from podium.trainer.restart_limit import RunLost, find_lost
from podium.trainer.rollout_queue import RolloutQueue

if TYPE_CHECKING:
    from podium.rollout.sampling import SamplingParams
    from podium.runtime import Call, Handle
    from podium.trainer.restart_limit import LostWorkers
    from podium.workers import Estimator, Generator, WeightSync

_MOST_PARTS: Final = 24  # parts of one generator; each takes one of the 32 threads for concurrent calls
_MOST_KEPT: Final = 64  # parts that one call copies
_AHEAD: Final = 5  # times as many completions as a generator draws at the same time


def parts_of(max_sequences: int, n: int) -> tuple[int, int]:
    """The number of prompts in a part, and the most parts of a generator that draws ``max_sequences`` at a time.

    A part ends with its longest completion, and the others have ended long before. Therefore a generator gets several
    times as many completions as it samples at the same time (``bench/async.py`` measures the cost of fewer).
    """
    size = max(1, -(-_AHEAD * max_sequences // (_MOST_PARTS * n)))
    return size, max(2, -(-_AHEAD * max_sequences // (size * n)))


@dataclass(eq=False)
class _Part:
    """A few prompts, or a generator's share of a whole batch, whose completions are sampled by one call.

    Attributes:
        step: The step of the prompts; 0 in an evaluation, whose completions are not continued.
    """

    step: int
    prompts: Batch
    sampling: SamplingParams
    drawn: Future[Batch] = field(default_factory=Future["Batch"])
    sent_s: float = 0.0
    processes: Sequence[int] = ()  # of the generator that it was sent to
    lost: Sequence[int] = ()  # the processes whose loss is known, or which it was not sent to after all
    journal: str = ""  # of these processes


class Generators:
    """The generators, as one.

    Args:
        handles: Groups that sample independently.
        weight_sync: The transport by which they get weights.
        losses: How often a generator may be lost.
        apart: Whether their processes hold no trained role, so that they can be restarted alone.
        keeper: The handle that copies sampled tensors to other processes, so that they outlive the generator.
        capacity: The most parts that a generator samples at the same time.
        timeout_s: The deadline of a part, which includes its wait for other parts. None means the deadline of a
            generator's calls.
        journals: Directory of their journals; None if completions are not continued.

    Attributes:
        changing: A lock that is held while the policy's weights change, until the generators have the new ones.
        returned: Function that is called with the number of a generator that was restarted and has the current weights.
        left_out: Function that is called with the number of a generator that is left out of the run.
        suspect: Function that is called with "generator", a step and the places of its prompts when a generator was
            lost that drew them. It returns a sentence about those for which that was the second time. The run then goes
            on from its latest checkpoint, without these prompts.
    """

    def __init__(
        self,
        handles: Sequence[Handle[Generator]],
        weight_sync: WeightSync,
        losses: LostWorkers,
        *,
        apart: bool,
        keeper: Handle[Estimator] | None = None,
        capacity: int = 1,
        timeout_s: float | None = None,
        journals: Path | None = None,
    ) -> None:
        self.changing = threading.RLock()
        self.returned: Callable[[int], None] = lambda number: None
        self.left_out: Callable[[int], None] = lambda number: None
        self.suspect: Callable[[str, int, Sequence[int]], str] = lambda worker, step, places: ""
        self._handles, self._weight_sync, self._losses, self._apart = tuple(handles), weight_sync, losses, apart
        self._timeout_s = timeout_s
        self._journals, self._keeper = journals, keeper
        self._keepers = cycle([keeper.group.on([rank]) for rank in range(keeper.group.world_size)] if keeper else ())
        self._restarting = [threading.Lock() for _ in handles]  # taken before ``changing``
        self._restarts = [0] * len(handles)
        self._coming: set[int] = set()  # the generators that are being restarted and have no weights yet
        self._asking = [threading.Lock() for _ in handles]  # held while a call is sent, and while the set above grows
        self._version = 0
        self._syncing = False
        self._interrupted_s = 0.0  # when a sync failed, so that completions in flight may have failed too
        self._todo = SimpleQueue["Callable[[], None] | None"]()
        self._thread: threading.Thread | None = None
        self._opening = threading.Lock()  # guards the two lines above and the next one
        self._closed = False
        self._gone: set[int] = set()  # the generators that are left out of the run
        self._queue = RolloutQueue[_Part](capacity)  # what follows belongs to the thread
        for number in range(len(handles)):
            self._queue.admit(number)
        self._in_flight: set[_Part] = set()
        self._ended: list[tuple[int, _Part, Batch]] = []  # what is to be copied: its generator, part and batch
        self._away: set[int] = set()  # the generators that are being restarted, or could not be
        self._failed: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop sampling. Calls in flight fail, and a generator that is lost from now on is not restarted."""
        with self._opening:
            self._closed = True
            self._todo.put(None)
        if self._thread is not None:
            self._thread.join()

    # -- a whole batch ---------------------------------------------------------------------------------------------

    def generate(self, prompts: Batch, sampling: SamplingParams, step: int | None = None) -> Batch:
        """Draw ``sampling.n`` completions of each prompt of ``step``, or of an evaluation. The tensors of the batch are
        references.

        What a lost generator had begun for a step is continued, where there are journals.
        """
        numbers = [number for number in range(len(self._handles)) if number not in self._gone]
        cuts = [at * len(prompts) // len(numbers) for at in range(len(numbers) + 1)]
        shares = {
            number: _Part(step or 0, prompts.slice(*cuts[at : at + 2]), sampling)
            for at, number in enumerate(numbers)
            if cuts[at] < cuts[at + 1] or len(numbers) == 1
        }
        sent = {number: self._ask(number, share) for number, share in shares.items()}
        batches = [self._answer(number, shares[number], call) for number, call in sent.items()]
        return batches[0] if len(batches) == 1 else Batch.concat(batches)

    def _ask(self, number: int, share: _Part) -> Call[Batch] | PodiumError:
        """Submit a share; return the error with which that failed in place of the call."""
        try:
            return self._submit(number, share)
        except PodiumError as error:
            return error

    def _submit(self, number: int, part: _Part, timeout_s: float | None = None) -> Call[Batch]:
        """Send a part to a generator, beside other calls if there is a deadline for it. Raises PodiumError."""
        part.sent_s, part.processes = time.monotonic(), ()
        with self._collect_answer(number) as handle:
            part.lost = part.processes = handle.group.pids  # lost before it got the part, until it is sent
            journal = self._journal(number) if part.step else ""
            self._check_alive(handle)
            draw = handle.generate if timeout_s is None else handle.generate_beside.within(timeout_s=timeout_s)
            files = {"journal": journal, "begun": part.journal} if journal else {}
            call = draw.submit(part.prompts.with_meta(**files), part.sampling)
        part.journal, part.lost = journal, ()
        return call

    def _check_alive(self, handle: Handle[Generator]) -> None:
        """After a loss, ask a generator whether it lives before it gets prompts: what it never got did not end it."""
        if self._losses.any:
            handle.group.check_alive()

    @contextmanager
    def _collect_answer(self, number: int) -> Iterator[Handle[Generator]]:
        """Yield a generator whose restart cannot begin during the block.

        Raises:
            PodiumError: The generator is being restarted. A new process has the weights of the model's file, and would
                sample from them before it gets the current ones.
        """
        handle = self._handles[number]
        with self._asking[number]:
            if number in self._coming:
                raise PodiumError(f"{handle.group.name} is being restarted")
            yield handle

    def _answer(self, number: int, share: _Part, call: Call[Batch] | PodiumError) -> Batch:
        """Wait for the completions. They are sampled again after the loss of this generator, or of one that interrupted
        it."""
        while True:
            try:
                if isinstance(call, PodiumError):
                    raise call
                batch = call.result()
                return batch if self._keeper is None else self._keeper.keep(batch)
            except PodiumError as error:
                if self._is_restartable(number, share.processes):
                    if not isinstance(call, PodiumError):
                        self._check_suspects(number, [share], error)
                    number = self._restart_or_leave_out(number, error)
                elif not self._was_interrupted_after_sync(share.sent_s):
                    raise
                call = self._ask(number, share)

    def _check_suspects(self, number: int, drawn: Sequence[_Part], error: PodiumError) -> None:
        """Note that a generator was lost while it drew these parts of steps.

        Raises:
            RunLost: For some of them it was the second time.
        """
        places = [(part.step, part.prompts.dense(fields.GROUP).tolist()) for part in drawn if part.step]
        if not (sentences := "; ".join(filter(None, [self.suspect("generator", *place) for place in places]))):
            return
        what = self._losses.add(self._causes(number, error), error, self._name(number))
        raise RunLost(f"{what}; {sentences}") from error

    def _name(self, number: int) -> str:
        return self._handles[number].group.name

    def _causes(self, number: int, error: PodiumError) -> list[str]:
        """Say which processes of a generator have ended, and why."""
        name, lost = self._name(number), self._handles[number].group.lost
        causes = [f"rank {rank} of {name} ({cause})" for rank, cause in lost.items()]
        return causes or find_lost(error) or [f"{name}, which is broken"]

    def _restart_or_leave_out(self, number: int, error: PodiumError) -> int:
        """Restart a generator and return it. If it cannot be restarted, leave it out and return another one."""
        try:
            self._restart(number, error)
        except RunLost as failed:
            others = [other for other in range(len(self._handles)) if other != number and not self._is_lost(other)]
            if not others:
                raise
            self._leave_out(number, failed, len(others))
            return others[0]
        return number

    def _leave_out(self, number: int, error: RunLost, left: int) -> None:
        """Go on without a generator."""
        if number not in self._gone:
            self._gone.add(number)
            name = self._handles[number].group.name
            emit(Note(f"{name} could not be restarted; the run goes on with {left} of {len(self._handles)}: {error}"))
            self.left_out(number)

    def _journal(self, number: int) -> str:
        """Return the journal of the generator's current processes; "" if there is none."""
        name = f"generator-{number}.{self._restarts[number]}.jsonl"
        return "" if self._journals is None else str(self._journals / name)

    # -- new weights -----------------------------------------------------------------------------------------------

    def sync_weights(self, version: int) -> None:
        """Send the policy's weights as ``version``. A generator that is lost gets these weights after its restart.

        Raises:
            PodiumError: Weights could not be sent, and no generator was lost that can be restarted.
        """
        with self.changing:
            self._version = version
            while True:
                alive = [number for number in range(len(self._handles)) if not self._is_lost(number)]
                try:
                    self._syncing = True
                    self._weight_sync.sync(version, [self._handles[number] for number in alive])
                    break
                except PodiumError:
                    self._interrupted_s = time.monotonic()
                    if not self._apart or not any(map(self._is_lost, alive)):
                        raise
                finally:
                    self._syncing = False
        lost = PodiumError(f"a generator was lost before it had the weights of version {version}")
        for number in {*range(len(self._handles))} - {*alive}:
            self._todo.put(partial(self._lose, number, lost))

    def _is_interrupted(self, sent_s: float) -> bool:
        """Whether a sync that failed may have ended a call that was sent at ``sent_s``."""
        return self._apart and not self._closed and self._interrupted_s >= sent_s

    def _was_interrupted_after_sync(self, sent_s: float) -> bool:
        """As ``_is_interrupted``, once the sync in progress is over. An error that merely came during a sync which
        succeeds is the generator's own, and is raised."""
        if self._apart and (self._syncing or self._is_interrupted(sent_s)):
            with self.changing:
                pass
        return self._is_interrupted(sent_s)

    def _is_lost(self, number: int) -> bool:
        """Whether a generator is lost, or is being restarted."""
        calls = self._handles[number].group.processes.calls
        return bool(calls.lost or calls.broken) or number in self._coming

    # -- a generator that is lost ----------------------------------------------------------------------------------

    def _is_restartable(self, number: int, processes: Sequence[int]) -> bool:
        """Whether a call to ``processes`` failed because one of them was lost, and these processes hold no trained
        role."""
        was_lost = self._is_lost(number) or self._handles[number].group.pids != processes
        return self._apart and not self._closed and was_lost

    def _restart(self, number: int, error: PodiumError) -> None:
        """Restart a generator that is lost, and give it the current weights.

        If another thread is restarting it, this call waits until the generator has the weights. ``error`` is raised if
        too many generators were lost.

        Raises:
            RunLost: The generator cannot be restarted in its place. When the run is resumed, all roles are placed anew.
        """
        with self._restarting[number]:
            while self._is_lost(number):  # the generator may be lost again before it has the weights
                lost = self._restart_once(number, error)
                if lost is not None:
                    error = lost

    def _restart_once(self, number: int, error: PodiumError) -> PodiumError | None:
        """As ``_restart``, for one loss. Returns the error of the next one, if that came before the generator draws."""
        handle = self._handles[number]
        group = handle.group
        if number in self._gone:
            raise RunLost(f"{group.name} is left out") from error
        what = self._losses.add(self._causes(number, error), error, of=group.name)
        with self._asking[number]:
            self._coming.add(number)
        try:
            group.restart()
            self._restarts[number] += 1
            with self.changing:  # no update runs, so the policy's weights are those of one version
                self._weight_sync.sync(self._version, [handle])
                version = self._version
                self._coming.discard(number)  # before anybody can send the next weights
            self.returned(number)
        except (PlacementError, WorkerStartError) as failed:
            failed_before = isinstance(error, WorkerStartError)
            if not failed.lost or failed_before:  # its constructor raises, or its node is gone
                raise RunLost(f"{what}; it cannot be restarted in its place: {failed}") from error
            emit(Note(f"{what}; its replacement has ended: {failed}"))
            return failed
        except PodiumError as failed:
            if not group.lost:
                raise
            emit(Note(f"{what}; its replacement has ended: {failed}"))
            return failed
        emit(Recovered(f"{what}; it was restarted and has the weights of version {version}"))
        return None

    def revive(self) -> None:
        """Restart generators that are lost while no call of this object waits for them, because sessions ask them
        directly."""
        with self._opening:
            if self._closed:
                return
            self._begin()
        for number in range(len(self._handles)):
            if self._is_lost(number) and self._apart:
                error = PodiumError(f"{self._handles[number].group.name} was lost during sessions")
                self._todo.put(partial(self._lose, number, error))

    # -- parts of a few prompts ------------------------------------------------------------------------------------

    def draw(self, step: int, prompts: Sequence[Batch], sampling: SamplingParams) -> list[Future[Batch]]:
        """Sample the completions of each of these parts for ``step``. Parts of earlier steps come first.

        A future gets the part's batch as soon as its last completion ends. The tensors are references.

        Raises:
            PodiumError: The run has ended.
        """
        parts = [_Part(step, prompt, sampling) for prompt in prompts]
        with self._opening:
            if self._closed:
                raise PodiumError(f"the completions of step {step} were asked for when the run had ended")
            self._begin()
            self._todo.put(partial(self._add, parts))
        return [part.drawn for part in parts]

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="podium-generators", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Run the thread that alone uses the queue. After each message it sends the parts that are due."""
        while (do := self._todo.get()) is not None:
            try:
                do()
                while (due := self._queue.next()) is not None:
                    self._send(*due)
                while self._ended and (self._todo.empty() or len(self._ended) >= _MOST_KEPT):
                    self._keep()
            except Exception as error:  # noqa: BLE001 - whoever waits for completions would wait for ever
                self._fail(error)
        self._fail(PodiumError("the run ended before the completions were drawn"))

    def _add(self, parts: Sequence[_Part]) -> None:
        self._in_flight.update(parts)
        for part in parts:
            self._queue.add(part.step, part)
        if self._failed is not None:
            self._fail(self._failed)

    def _send(self, number: int, part: _Part) -> None:
        try:
            call = self._submit(number, part, self._timeout_s or self._handles[number].group.timeout_s)
        except PodiumError as error:
            self._queue.finished(number)
            self._find_failed_part(number, part, error)
            return
        call.when_done(lambda: self._todo.put(partial(self._end, number, part, call)))

    def _end(self, number: int, part: _Part, call: Call[Batch]) -> None:
        """Process the end of a call."""
        self._queue.finished(number)
        try:
            batch = call.result()
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who waits for the part
            self._find_failed_part(number, part, error)
            return
        if self._keeper is None:
            self._is_there(part, batch)
        else:
            self._ended.append((number, part, batch))

    def _keep(self) -> None:
        """Copy to other processes, in one call, what was sampled since the last copy."""
        ended, self._ended = self._ended[:_MOST_KEPT], self._ended[_MOST_KEPT:]
        joined = Batch.concat([batch for *_, batch in ended]) if len(ended) > 1 else ended[0][2]
        try:
            call = next(self._keepers).keep.submit(joined)
        except PodiumError as error:
            for number, part, _ in ended:
                self._find_failed_part(number, part, error)
            return
        call.when_done(lambda: self._todo.put(partial(self._are_kept, ended, call)))

    def _are_kept(self, ended: Sequence[tuple[int, _Part, Batch]], call: Call[Batch]) -> None:
        try:
            joined = call.result()
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who waits for the parts
            lost = [failure for failure in ended if self._is_restartable(failure[0], failure[1].processes)]
            for number, part, _ in lost or ended:
                self._find_failed_part(number, part, error)
            if lost:  # those of the other generators are there
                self._ended += [failure for failure in ended if failure not in lost]
            return
        start = 0
        for _, part, batch in ended:
            self._is_there(part, joined.slice(start, start + len(batch)) if len(ended) > 1 else joined)
            start += len(batch)

    def _is_there(self, part: _Part, drawn: Batch) -> None:
        if part in self._in_flight:
            self._in_flight.discard(part)
            if not part.drawn.done():
                part.drawn.set_result(drawn)

    def _find_failed_part(self, number: int, part: _Part, error: Exception) -> None:
        """Return a part to the queue if its generator was lost, or if the loss of another generator interrupted it."""
        again = partial(self._queue.add, part.step, part, first=True)
        if part not in self._in_flight:
            return
        if isinstance(error, PodiumError) and self._is_restartable(number, part.processes):
            lost = [other for other in self._in_flight if other.processes == part.processes != other.lost]
            for other in lost:
                other.lost = part.processes
            self._check_suspects(number, lost, error)
            self._lose(number, error)
            again()
        elif isinstance(error, PodiumError) and (self._syncing or self._is_interrupted(part.sent_s)):
            refuse = partial(self._refuse_part, part, error)

            def decide() -> None:
                self._todo.put(again if self._was_interrupted_after_sync(part.sent_s) else refuse)

            threading.Thread(target=decide, daemon=True).start()
        else:
            self._refuse_part(part, error)

    def _refuse_part(self, part: _Part, error: Exception) -> None:
        """Raise ``error`` where the part is waited for."""
        self._in_flight.discard(part)
        if not part.drawn.done():
            part.drawn.set_exception(error)

    def _lose(self, number: int, error: PodiumError) -> None:
        """Restart a generator while the others continue."""
        if number in self._away or not self._is_lost(number) or self._closed:
            return
        self._away.add(number)
        self._queue.dismiss(number)

        def restart() -> None:
            try:
                self._restart(number, error)
                self._todo.put(partial(self._return, number))
            except Exception as failed:  # noqa: BLE001 - it ends whatever waits for completions
                self._todo.put(partial(self._give_up, number, failed))

        threading.Thread(target=restart, name=f"podium-restart-{number}", daemon=True).start()

    def _return(self, number: int) -> None:
        self._away.discard(number)
        self._queue.admit(number)

    def _give_up(self, number: int, error: Exception) -> None:
        """Leave out a generator for which there is no room, if another generator is left. Otherwise fail all waiting
        parts."""
        others = (self._queue.open | self._away) - self._gone - {number}
        if others and isinstance(error, RunLost):
            self._leave_out(number, error, len(others))
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Fail all parts, and all later ones."""
        self._failed = error
        self._queue.clear()
        self._ended.clear()
        parts, self._in_flight = self._in_flight, set[_Part]()
        for part in parts:
            if not part.drawn.done():
                part.drawn.set_exception(error)
