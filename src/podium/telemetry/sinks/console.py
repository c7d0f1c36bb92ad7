"""The terminal shows one progress bar at the bottom and a row for each step above it, and nothing runs into either.

Where stdout is no terminal (a file, a pipe, CI) the rows are plain lines and there is no bar.
"""

from __future__ import annotations

import errno
import io
import os
import pdb
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from podium.errors import PodiumError
from podium.spelling import write_count
from podium.telemetry import events, metrics
from podium.telemetry.bus import emit
from podium.telemetry.events import CompletionsSampled, Count, EvalFinished, Event, PhaseStarted, StepFinished, Waiting
from podium.telemetry.formatting import clock_duration, compact, duration, percent, plain, visible
from podium.telemetry.held_out import ACCURACY, CUT_OFF, LENGTH, SOURCES, Metric
from podium.telemetry.progress import describe_counts
from podium.telemetry.sinks.base import Sink
from podium.telemetry.sinks.logs import LogRouter
from podium.telemetry.sinks.notebook import CellOutput, notebook_console

_STEP_WIDTH: Final = 7
_GAP: Final = 2
_ROWS_PER_HEADER: Final = 25
_SAMPLE_CHARACTERS: Final = 600
_CLEAN_LINE: Final = b"\r\x1b[2K\x1b[?25h"
_ECHO_WIDTH: Final = 8  # of several ^C
_FIRST_LINE_S: Final = 30.0
_ESTIMATED_STEPS: Final = 50
_FIELD_WIDTH: Final = 10  # of the names beside a sample's texts
_QUIET: Final = (metrics.REWARD_PART_PREFIX, SOURCES, LENGTH, CUT_OFF)  # figures that metrics.jsonl alone has


@dataclass(frozen=True, kw_only=True)
class Column:
    """``metric`` under ``header``, right-aligned in ``width`` characters.

    Columns of the highest ``rank`` are left out first where space is short. ``unless`` names a metric beside which this
    one is not shown: a GRPO step's loss, once there is a reward.
    """

    header: str
    metric: str
    write: Callable[[float], str]
    rank: int
    width: int = 7
    unless: str = ""

    def cell(self, values: Mapping[str, float]) -> str:
        """The metric with its gap, as text; a dash if ``values`` lack it."""
        text = self.write(float(values[self.metric])) if self.metric in values else "-"
        return text.rjust(self.width + _GAP)


STEP_COLUMNS: Final[tuple[Column, ...]] = (
    Column(header="loss", metric=metrics.LOSS, write=plain, rank=0, unless=metrics.REWARD_MEAN),
    Column(header="reward", metric=metrics.REWARD_MEAN, write=plain, rank=0),
    Column(header="accuracy", metric=metrics.ACCURACY, write=percent, rank=0, width=8),
    Column(header="KL", metric=metrics.KL, write=plain, rank=3),
    Column(header="entropy", metric=metrics.ENTROPY, write=plain, rank=2),
    Column(header="flat", metric=metrics.FLAT_GROUPS, write=percent, rank=2, width=6),
    Column(header="clipped", metric=metrics.CLIP_FRACTION, write=percent, rank=5),
    Column(header="mismatch", metric=metrics.MISMATCH_MEAN, write=plain, rank=3, width=8),
    Column(header="grad", metric=metrics.GRAD_NORM, write=plain, rank=4),
    Column(header="value", metric=metrics.VALUE_LOSS, write=plain, rank=5),
    Column(header="length", metric=metrics.LENGTH_MEAN, write=plain, rank=4, width=6),
    Column(header="cut off", metric=metrics.TRUNCATED, write=percent, rank=2),
    Column(header="tok/s", metric=metrics.TOKENS_PER_S, write=compact, rank=1, width=6),
    Column(header="time", metric=metrics.STEP_S, write=duration, rank=1, width=6),
)


def fitting(seen: Collection[str], width: int) -> tuple[Column, ...]:
    """Those of the columns whose metric was seen that fit in ``width`` characters, beside the number of the step.

    The least important are left out first. Columns of rank 0 stay however narrow the terminal is.
    """
    present = [column for column in STEP_COLUMNS if column.metric in seen and column.unless not in seen]
    while _STEP_WIDTH + sum(column.width + _GAP for column in present) > width:
        worst = max(reversed(present), key=lambda column: column.rank, default=None)  # the rightmost of equals
        if worst is None or worst.rank == 0:
            break
        present.remove(worst)
    return tuple(present)


def restore_terminal() -> None:
    """Remove the bar and show the cursor, in a process that ends without closing its sinks."""
    if os.isatty(1):
        os.write(1, _CLEAN_LINE)


def terminal() -> Console:
    """The console of rich on stdout. There is one for all who write there, since two would draw over each other. In a
    notebook each call returns a console of its own, which prints into an output of the cell that runs.

    Characters that stdout cannot encode are spelled out, and nothing is raised.

    Raises:
        PodiumError: There is no stdout, or it is lost.
    """
    if reason := "stdout is closed" if sys.stdout is None else lost_output():
        raise PodiumError(f"{reason}: direct it to /dev/null, or to a file that has room")
    if (console := notebook_console()) is not None:
        return console
    stdout: Any = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # a live display puts its proxy there
    if stdout not in _CONSOLES:
        if isinstance(stdout, io.TextIOWrapper) and "utf" not in stdout.encoding.lower():
            stdout.reconfigure(errors="backslashreplace")
        _CONSOLES[stdout] = _Terminal(highlight=False)
    return _CONSOLES[stdout]


def lost_output() -> str:
    """Say why stdout cannot be written any more; "" while it can."""
    return "".join(_LOST[:1])


def lose_output(console: Console, error: OSError) -> None:
    """Write nothing any more on the file of ``console``, which has refused what was written. Tell so if it is a closed
    pipe or a full disk. A terminal that is gone has sent SIGHUP, which says all.

    Raises:
        OSError: ``error``, if it is another one.
    """
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO):
        raise error
    with suppress(OSError, ValueError):  # or Python fails at its end, when it writes what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), console.file.fileno())
    if error.errno != errno.EIO:
        _LOST.append(f"stdout cannot be written any more ({os.strerror(error.errno)})")
        emit(events.OutputLost(lost_output()))


class _Terminal(Console):
    """A console that raises where a pipe is closed. Rich's own would end the thread that writes, without a word."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None


_CONSOLES: Final[weakref.WeakKeyDictionary[TextIO, Console]] = weakref.WeakKeyDictionary()
_LOST: Final[list[str]] = []


class _Bar(Progress):
    """Ends before the end of the line, where the terminal echoes the ``^C`` of a key. In the last column it would wrap,
    and the bar would stay above it."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield _Narrow(self.make_tasks_table(self.tasks))


@dataclass(frozen=True)
class _Narrow:
    """The bar's line."""

    line: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.line, options.update_width(max(1, options.max_width - _ECHO_WIDTH)))


class ConsoleSink(Sink):
    """Shows a run to the person who started it.

    While the sink is attached, log records and warnings are shown through the same console (`LogRouter`), and
    ``breakpoint()`` removes the bar before the debugger starts. The next step shows the bar again.

    Args:
        console: Console of rich, for tests and notebooks. None means the terminal.
        row_every_s: The least time between two rows. The first and the last step of a phase are always shown, and
            metrics.jsonl has all steps.
        log: Function that receives each line that is shown, as plain text, except for notes and log records.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        row_every_s: float = 1.0,
        log: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self.console = console or terminal()
        self._log = log
        self._cell = self.console.file if isinstance(self.console.file, CellOutput) else None
        self._dot = "-" if self.console.options.ascii_only else "·"
        self._live = (self.console.is_terminal and not self.console.is_dumb_terminal) or self._cell is not None
        self._row_every_s = row_every_s
        self._router = LogRouter(self.console if self._live else None)
        self._progress: Progress | None = None
        self._phase = PhaseStarted("", 0)
        self._seen: set[str] = set()
        self._columns: tuple[Column, ...] = ()
        self._rows_since_header = 0
        self._last_row_s = -float("inf")
        self._held_out: dict[tuple[str, str, str], float] = {}  # by phase, evaluation set and figure
        self._judged = ("", "", "")  # the key of the figure that judges the run
        self._workers: Counter[str] = Counter()
        self._waiting = ""
        self._made = 0  # workers, of those that the run waits for
        self._read: dict[int, tuple[int, int]] = {}  # by rank, tensors that the worker that is being made has read
        self._counts = self._left = ""  # how far the stage is, and when the last step ends
        self._longest_s, self._next_line_s = 0.0, _FIRST_LINE_S
        self._ended_s: deque[float] = deque(maxlen=_ESTIMATED_STEPS)  # when the latest steps ended
        self._breakpointhook: Callable[..., Any] | None = None

    def attach(self) -> ConsoleSink:
        with self._lock:
            if self._breakpointhook is None and not self._closed:
                self._router.install()
                self._breakpointhook, sys.breakpointhook = sys.breakpointhook, self._breakpoint
            return super().attach()

    def finish(self) -> None:
        self._stop_bar()
        self._router.remove()
        if self._breakpointhook is not None:
            sys.breakpointhook = self._breakpointhook

    def handle(self, event: Event) -> None:
        try:
            self._show(event)
        except OSError as error:
            lose_output(self.console, error)

    def _show(self, event: Event) -> None:
        match event:
            case StepFinished(step=step, metrics=values):
                self._step(step, values)
            case PhaseStarted():
                self._start_phase(event)
            case events.PhaseFinished():
                self._stop_bar()
            case Waiting():
                self._wait(event)
            case EvalFinished(others=others):
                for evaluation in (event, *others):
                    self._evaluation(evaluation, Metric(event.metric))
                self._judged = self._phase.name, event.name, event.metric
            case CompletionsSampled():
                self._samples(event)
            case events.WorkerStarted(role=role):
                self._workers[role] += 1
            case _:
                self._remark(event)

    def _remark(self, event: Event) -> None:
        match event:
            case events.Progressing() | events.CallFinished(method="construct", ok=True) if self._waiting:
                self._load(event)
            case events.Progressing(counts=counts):
                self._show_counts(counts)
            case events.WorkerLost(role=role, rank=rank, node=node, cause=cause):
                self._say(Text(f"lost  {role} rank {rank} on {node}: {cause}", "bold red"))
            case events.Stalled(role=role, method=method, waiting_for=ranks, seconds=seconds, report=report):
                who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
                waiting_text = visible(report) or f"waiting  {seconds:.0f} s for {who} of {role}.{method}"
                self._say(Text(waiting_text, "yellow"))
            case events.CheckpointSaved(step=step, path=path):
                self._say(Text(f"{step:>{_STEP_WIDTH}}  checkpoint  {path}", "dim"))
            case events.Note(text=text):
                self._say(Text(visible(text)), logged=False)
            case _:
                pass

    def flush(self) -> None:
        super().flush()
        if self._cell is not None:
            self._cell.show_below(self._progress and self._progress.get_renderable(), self.console)

    # Phases and the bar

    def _start_phase(self, phase: PhaseStarted) -> None:
        self._stop_bar()
        self._phase = phase
        self._seen.clear()
        self._ended_s.clear()
        self._counts = self._left = ""
        self._columns = ()
        self._last_row_s = -float("inf")
        if self._workers:
            counts = ", ".join(f"{n} {role}" for role, n in self._workers.items())
            self._say(Text(f"workers  {counts}", "dim"))
            self._workers.clear()
        resumed = f", from step {phase.first_step}" if phase.first_step > 1 else ""
        self._rule(Text.assemble((phase.name, "bold"), f"  {write_count(phase.total_steps, 'step')}{resumed}"))
        self._start_bar(phase.first_step - 1)

    def _start_bar(self, completed: int) -> None:
        if not self._live or not self._phase.total_steps:
            return
        progress = _Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None, style="grey23", complete_style="cyan", finished_style="green"),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[state]}"),
            console=self.console,
            transient=True,
            expand=True,
            refresh_per_second=4,
        )
        total = self._phase.total_steps
        progress.add_task(self._phase.name, total=total, completed=completed, state=self._state)
        self._show_bar(progress)

    @property
    def _state(self) -> str:
        """What the bar says beside the number of the step."""
        value, metric = self._held_out.get(self._judged), Metric(self._judged[-1])
        is_current = self._judged[0] == self._phase.name
        judged = f"held-out {metric.title} {metric.write(value)}" if is_current and value is not None else ""
        return "".join(f"{self._dot} {part} " for part in (self._left, self._counts, judged) if part).rstrip()

    def _show_counts(self, counts: Sequence[Count]) -> None:
        """Show how far a stage is that takes long: in the bar, and else on a line after 30 s, 60 s, 120 s, …"""
        self._counts = describe_counts(counts, f" {self._dot} ")
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], state=self._state)
        longest_s = max((count.seconds for count in counts if count.stage), default=0.0)
        if longest_s < self._longest_s:  # another stage
            self._next_line_s = _FIRST_LINE_S
        self._longest_s = longest_s
        if longest_s >= self._next_line_s and not self._live:
            self._next_line_s = 2 * longest_s
            self._say(Text(f"{'':>{_STEP_WIDTH}}  {self._counts}", "dim"))

    def _estimate(self, step: int, values: Mapping[str, float]) -> None:
        """Estimate when the last step ends, from the times of the latest steps and what lies between them."""
        self._ended_s.append(self.emitted_ns / 1e9)
        before = len(self._ended_s) - 1
        step_s = (self._ended_s[-1] - self._ended_s[0]) / before if before else values.get(metrics.STEP_S, 0.0)
        left_s = step_s * (self._phase.total_steps - step)
        self._left = f"{clock_duration(left_s)} left" if left_s >= 1 else ""
        if left_s >= 60:
            end, now = time.localtime(time.time() + left_s), time.localtime()
            self._left += time.strftime(", until %H:%M" if end[:3] == now[:3] else ", until %b %d %H:%M", end)

    def _show_bar(self, progress: Progress) -> None:
        self._progress = progress
        if self._cell is None:  # a notebook's output is updated by `flush`
            progress.start()

    def _wait(self, event: Waiting) -> None:
        """Show what the run waits for before its first step: a bar or a spinner on a terminal, else one line."""
        if event.what != self._waiting:
            self._stop_bar()
            self._waiting, self._made = event.what, event.completed
            if self._log is not None:
                self._log(event.what)
            if not self._live:
                self.console.print(Text(event.what), soft_wrap=True)
            else:
                counted = (
                    BarColumn(bar_width=30, style="grey23", complete_style="cyan"),
                    TextColumn("[dim]{task.fields[state]}"),
                )
                progress = _Bar(
                    SpinnerColumn(style="cyan"),
                    TextColumn("[dim]{task.description}", markup=True),
                    *(counted if event.total else ()),
                    TimeElapsedColumn(),
                    console=self.console,
                    transient=True,
                    refresh_per_second=8,
                )
                progress.add_task(escape(visible(event.what)), total=event.total or None, state="")
                self._show_bar(progress)
        if self._progress is not None:
            state = f"{event.completed}/{event.total}"
            self._progress.update(self._progress.task_ids[0], completed=event.completed, state=state)

    def _load(self, event: events.Progressing | events.CallFinished) -> None:
        """Show how many workers are made, and how many tensors those have read that are being made."""
        if isinstance(event, events.Progressing):
            self._read = {count.rank: (count.done, count.total) for count in event.counts if count.unit == "tensors"}
        else:
            self._read.pop(event.rank, None)
            self._made += 1
        if not self._waiting or self._progress is None:
            return
        (task,) = self._progress.tasks
        done, total = (sum(counts) for counts in zip(*self._read.values(), strict=True)) if self._read else (0, 0)
        parts = self._made + sum(read / of for read, of in self._read.values() if of)
        tensors = (
            f"  {done:,} of {write_count(total, 'tensor')}"
            if done < total
            else f"  {write_count(total, 'tensor')} read, preparing"
        )
        tensors *= total > 0  # what follows the last tensor, such as a first forward pass, may take longer
        state = f"{self._made}/{write_count(task.total, 'worker')}{tensors}" if task.total else ""
        self._progress.update(task.id, completed=parts, state=state)

    def _stop_bar(self) -> None:
        self._waiting = ""
        self._read.clear()
        if self._progress is not None and self._cell is None:
            self._progress.stop()
        self._progress = None

    def _breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.flush()
            self._stop_bar()
        hook = self._breakpointhook or sys.__breakpointhook__
        if hook is sys.__breakpointhook__ and os.environ.get("PYTHONBREAKPOINT") in (None, "", "pdb.set_trace"):
            # The standard hook would stop in its caller, which is this method.
            return pdb.Pdb().set_trace(sys._getframe(1))
        return hook(*args, **kwargs)

    # Rows

    def _step(self, step: int, values: Mapping[str, float]) -> None:
        self._estimate(step, values)
        if self._progress is None:
            self._start_bar(step - 1)  # a breakpoint took it away
        self._counts = ""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, state=self._state)
        now = self.emitted_ns / 1e9
        if now - self._last_row_s < self._row_every_s and step != self._phase.total_steps:
            return
        self._last_row_s = now
        if not self._seen.issuperset(values):
            self._seen.update(values)
            width = self.console.width if self._live else 10_000  # a file has room for every column
            columns = fitting(self._seen, width)
            self._rows_since_header = self._rows_since_header if columns == self._columns else 0
            self._columns = columns
        if self._rows_since_header % _ROWS_PER_HEADER == 0:
            headers = "".join(column.header.rjust(column.width + _GAP) for column in self._columns)
            self._say(Text("step".rjust(_STEP_WIDTH) + headers, "dim"))
        self._rows_since_header += 1
        row = Text(f"{step:>{_STEP_WIDTH}}")
        for column in self._columns:
            row.append(column.cell(values), "cyan" if column.metric in (metrics.REWARD_MEAN, metrics.ACCURACY) else "")
        self._say(row)
        if len(self._ended_s) == 1 and "until" in self._left and not self._live:
            self._say(Text(f"{step:>{_STEP_WIDTH}}  about {self._left}", "dim"))

    def _evaluation(self, event: EvalFinished, judge: Metric) -> None:
        """Show the figures of an evaluation, that of the metric ``judge`` first, and how that has changed."""
        row = Text(f"{event.step:>{_STEP_WIDTH}}  ")
        row.append(visible(event.name) or "held-out", "bold")
        for name in sorted(event.figures, key=lambda name: name != judge.name):
            metric, value = Metric(name), event.figures[name]
            if name.startswith(_QUIET) and metric != judge:
                continue
            key = self._phase.name, event.name, name
            before = self._held_out.get(key)
            self._held_out[key] = value
            if metric != judge:
                row.append(f"  {metric.title} {metric.write(value)}", "dim")
                continue
            row.append(f"  {metric.title} ").append(metric.write(value), "bold green")
            scored = event.items if event.scored is None else event.scored
            row.append(f" {'of' if name == ACCURACY else 'over'} {scored}")
            if before is not None:
                better = metric.rank(value) - metric.rank(before)
                style = "green" if better > 0 else "red" if better < 0 else "dim"
                row.append(f"  {metric.write_change(value - before)}", style)
        self._say(row)

    def _samples(self, event: CompletionsSampled) -> None:
        for number, sample in enumerate(event.samples, 1):
            self._rule(Text(f"step {event.step} {self._dot} sample {number} of {len(event.samples)}", "dim"))
            self._field("prompt", sample.prompt, "dim")
            self._field("completion", sample.completion, "")
            if sample.expected is not None:
                self._field("expected", sample.expected, "dim")
            details = [
                f"{name} {value!r}" if isinstance(value, str) else f"{name} {plain(value)}"
                for name, value in sample.details.items()
            ]
            self._field("reward", "  ".join([plain(sample.reward), *details]), "cyan")
        self._rows_since_header, self._last_row_s = 0, -float("inf")  # the row of these samples follows, with headers

    def _field(self, name: str, text: str, style: str) -> None:
        """A text beside its name. On a terminal it is wrapped under itself; in a file its lines stay whole."""
        shown = Text(visible(text, _SAMPLE_CHARACTERS).strip("\n"), style)
        room = self.console.width - _FIELD_WIDTH - _GAP
        lines = shown.wrap(self.console, room) if self._live and room > _GAP else shown.split("\n", allow_blank=True)
        for number, line in enumerate(lines):
            self._say(Text.assemble(((name if number == 0 else "").rjust(_FIELD_WIDTH) + " " * _GAP, "dim"), line))

    def _rule(self, title: Text) -> None:
        if self._log is not None:
            self._log(title.plain)
        self.console.print(Rule(title, align="left", style="dim", characters="─" if self._live else "-"))

    def _say(self, text: Text, *, logged: bool = True) -> None:
        if self._log is not None and logged:
            self._log(text.plain)
        # soft_wrap: a line longer than the terminal is the terminal's to wrap, and a file's to keep whole.
        self.console.print(text, soft_wrap=True, highlight=False)
