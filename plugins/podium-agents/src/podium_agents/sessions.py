"""The sessions of a run: prompts go to the rollout workers as tasks, and come back as rows with rewards.

    prompts x n ─▶ tasks ─▶ rollout workers ─▶ rows of the sessions that did not fail ─▶ grades
                                └─▶ why the others failed, which is counted and said

Where the rollout workers have no generator in their processes, they ask those elsewhere by HTTP. A generator begins to
serve when the run starts, and again when it was restarted. One that cannot be restarted is asked no more.
"""

from __future__ import annotations

import math
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from podium.data import Batch, fields
from podium.errors import ConfigError, NoRowsError, PodiumError
from podium.rewards import Grade, Grader, RewardConfig
from podium.spelling import write_count, write_share
from podium.telemetry import Note, emit, metrics as names
from podium.telemetry.formatting import percent
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt
from podium_agents.environments.outside import is_outside
from podium_agents.environments.resolve import longest_session_s

if TYPE_CHECKING:
    from pathlib import Path

    from podium.rollout.engines.requests import SessionRoom
    from podium.rollout.sampling import SamplingParams
    from podium.runs.config import InferenceConfig
    from podium.runtime import Handle
    from podium.workers import Generator, RewardModel
    from podium_agents.environments.contract import Earned
    from podium_agents.rollout import Rollout

__all__ = ["SessionReport", "Sessions", "grade_sessions"]

_MODEL: Final = "policy"
_GRACE_S: Final = 60.0  # time for a wave of sessions to end after its time limit
_LOOK_S: Final = 5.0  # between two checks for notes of the workers
_TOTALS: Final = (
    *("sessions", "context_full", "turns", "sampled", "splits", "unrecognized", "tool_calls", "tool_errors"),
)


@dataclass(frozen=True)
class SessionReport:
    """The results of the sessions of one or several calls.

    Attributes:
        sessions: Number of sessions.
        failures: Number of failed sessions, by reason.
        details: By reason, the traceback of one of the failures, or other details.
        figures: Metrics of these sessions, by name.
    """

    sessions: int
    failures: Counter[str]
    details: Mapping[str, str]
    figures: Mapping[str, float]


class Sessions:
    """The rollout workers, as one.

    Args:
        workers: Their handle.
        generators: Handles of the generators; () if the workers have a generator in their processes.
        config: The configuration of the run.
        sampling: Sampling parameters of training, with stop tokens.
        logs: The directory of the workers' logs, if they have any.
        drawing: Handles of all generators that draw for the sessions, whose counts of prompt tokens are reported.
    """

    def __init__(
        self,
        workers: Handle[Rollout],
        generators: Sequence[Handle[Generator]],
        config: InferenceConfig,
        sampling: SamplingParams,
        logs: Path | None = None,
        drawing: Sequence[Handle[Generator]] = (),
    ) -> None:
        self._logs, self._drawing = logs, tuple(drawing)
        self._counted: Mapping[str, float] = {}
        self._reports: dict[int, list[Mapping[str, Any]]] = {}  # by step, of all draws that are not described yet
        self._prompt_tokens: dict[int, Counter[str]] = {}  # likewise
        self._workers, self._generators, self._config, self._sampling = workers, tuple(generators), config, sampling
        self._token = secrets.token_urlsafe(32)
        self._urls: dict[int, list[str]] = {}
        self._positions: dict[int, list[int | None]] = {}
        self._said: set[str] = set()
        self._calls = self._in_progress = 0
        self._counting = threading.Lock()
        self._longest_s = longest_session_s(config.environment)
        for number in range(len(self._generators)):
            self.serve(number, connect=False)
        self._connect()

    def serve(self, number: int, *, connect: bool = True) -> None:
        """Let a new or restarted generator answer requests."""
        handle = self._generators[number]
        self._urls[number] = handle.serve(self._config.data, self._sampling, model=_MODEL, token=self._token)
        self._positions[number] = handle.positions()
        if connect:
            self._connect()

    def leave_out(self, number: int) -> None:
        """Send no more requests to a generator that was left out of the run."""
        self._urls[number], self._positions[number] = [], []
        self._connect()

    def _connect(self) -> None:
        if self._generators:
            urls = [url for generator_urls in self._urls.values() for url in generator_urls]
            limits = [most for positions in self._positions.values() for most in positions if most]
            self._workers.connect(urls, self._token, min(limits, default=None), _least_room(self._list_rooms()))

    def live(
        self,
        prompts: Sequence[Prompt],
        seeds: torch.Tensor,
        sampling: SamplingParams,
        step: int,
        *,
        training: bool = True,
    ) -> Batch:
        """As :meth:`podium.trainer.sessions.Sessions.live`."""
        if is_outside(self._config.environment) and training and not self._config.data.train:
            self._check_outside(len(prompts))
        self._calls += 1
        key, n = f"{step}-{self._calls}", seeds.shape[1]
        tasks = Batch(
            {
                fields.TASK: [dict(prompt.example.row) for prompt in prompts for _ in range(n)],
                fields.SEED: seeds.flatten(),
                fields.GROUP: torch.arange(len(prompts)).repeat_interleave(n),
                fields.SESSION: torch.arange(len(prompts) * n),
            },
            {"key": key, "training": training},
        )
        with self.count_sessions(len(tasks)) as deadline_s:
            living = self._workers.live.within(timeout_s=deadline_s).submit(tasks, sampling)
            while not living.wait(_LOOK_S):
                with suppress(PodiumError):  # which the call itself raises
                    self._say_notes()
            batch = living.result()
        self._say_notes()
        reports = [report for report in self._workers.report(key) if report]
        if training:
            self._say_overruled({name for report in reports for name in report["overruled"]})
            self._say_aliases(sorted({name for report in reports for name in report["aliases"]}))
        self._say_departure(next((report["departure"] for report in reports if report["departure"]), ""))
        self._say_unknown(sum(report["unknown"] for report in reports), len(batch))
        report = _join_reports(reports, self._config.environment.limits.budget)
        prompt_tokens = self._count_prompt_tokens()
        if training:
            self._reports.setdefault(step, []).extend(reports)
            self._prompt_tokens.setdefault(step, Counter()).update(prompt_tokens)
        evaluation = f"evaluation after step {step}" if step else "evaluation"
        self._report_failures(report, f"step {step}" if training else evaluation, len(batch))
        self._note_unused_reward(batch.python(fields.GRADE))
        small = (fields.GROUP, fields.VERSION_RANGE, fields.TRAJECTORY, fields.SESSION)
        return batch.fetch(*small)

    def describe(self, step: int) -> Mapping[str, float]:
        """As :meth:`podium.trainer.sessions.Sessions.describe`."""
        if (reports := self._reports.pop(step, None)) is None:
            return {}
        joined = _join_reports(reports, self._config.environment.limits.budget)
        return {**joined.figures, **self._prompt_tokens.pop(step)}

    def grade(
        self, scored: ScoredBatch, grader: Grader, reward: RewardConfig, reward_model: Handle[RewardModel] | None = None
    ) -> ScoredBatch:
        """As :func:`grade_sessions`."""
        return grade_sessions(scored, grader, reward, reward_model)

    def _check_outside(self, groups: int) -> None:
        """Check that a service elsewhere can name the tasks of these sessions. Raises ConfigError if it cannot."""
        name, workers = f"environment.name = {self._config.environment.name!r}", self._workers.group.world_size
        if groups % workers:
            raise ConfigError(
                f"{name}: a service opens all sessions of a group at one rollout worker, and batch.prompts = {groups} "
                f"is not a multiple of the {workers} rollout workers: change it, or set data.train to the tasks"
            )

    @contextmanager
    def count_sessions(self, sessions: int) -> Iterator[float]:
        """Count sessions while they run, and yield the deadline of their call in seconds. Sessions for which the
        workers have no room wait for earlier ones, also of other calls. The deadline has the time limit once for each
        such wave."""
        limits = self._config.environment.limits
        own_sessions = math.ceil(sessions / self._workers.group.world_size)  # of the rank that has the most sessions
        at_once = min(limits.side_by_side, self._count_fitting())
        with self._counting:
            self._in_progress += own_sessions
            waves = math.ceil(self._in_progress / at_once)
        try:
            yield waves * max(self._config.run.timeout_s, self._longest_s + _GRACE_S)
        finally:
            with self._counting:
                self._in_progress -= own_sessions

    def _list_rooms(self) -> list[SessionRoom]:
        """How much of open sessions the generators remember, those without a limit left out."""
        try:
            rooms = [room for handle in self._drawing for room in handle.session_room()]
        except PodiumError:  # a lost generator, which its own calls report
            return []
        return [room for room in rooms if room is not None]

    def _count_fitting(self) -> int:
        """How many sessions of a rollout worker need not wait for memory, however long they become."""
        rooms = self._list_rooms()
        if not rooms:
            return sys.maxsize
        limits = [most for positions in self._positions.values() for most in positions if most]
        longest = min(limits, default=None)
        fitting = [room.sessions + (room.tokens // longest if longest else 0) for room in rooms]
        return max(1, sum(fitting) // self._workers.group.world_size)

    def _count_prompt_tokens(self) -> Mapping[str, float]:
        """Return what became of the prompts' tokens since the last call; nothing if a generator does not say it."""
        try:
            counts = [count for handle in self._drawing for count in handle.count_prompt_tokens()]
        except PodiumError:  # a lost generator, which its own calls report
            return {}
        known_counts = [count for count in counts if count is not None]
        if not known_counts or len(known_counts) < len(counts):
            return {}
        total = {
            names.SESSIONS_READ: float(sum(count.read for count in known_counts)),
            names.SESSIONS_REUSED: float(sum(count.reused for count in known_counts)),
            names.SESSIONS_EVICTED: float(sum(count.evicted for count in known_counts)),
        }
        with self._counting:
            before, self._counted = self._counted, total
        return {name: max(0.0, value - before.get(name, 0.0)) for name, value in total.items()}

    def _say_notes(self) -> None:
        """Emit the notes of the workers, each text once."""
        for text in dict.fromkeys(text for noted in self._workers.notes() for text in noted):
            if text not in self._said:
                self._said.add(text)
                emit(Note(text))

    def _say_overruled(self, asked: set[str]) -> None:
        if asked - self._said:
            self._said |= asked
            emit(
                Note(
                    f"the environment's agent asks for its own {', '.join(sorted(asked))}; training draws by the run's "
                    "sampling.*, because all tokens of a step must come from one distribution"
                )
            )

    def _say_aliases(self, aliases: Sequence[str]) -> None:
        if aliases and "aliases" not in self._said:
            self._said.add("aliases")
            named = ", ".join(repr(name[:80]) for name in aliases[:3])
            emit(Note(f"the environment's agent asks for the model {named}: every name is the policy in training"))

    def _say_departure(self, departure: str) -> None:
        if departure and "departure" not in self._said:
            self._said.add("departure")
            emit(
                Note(
                    "an agent sends back a history that is not what its session has recorded, so its call begins a new "
                    f"row and the model reads all of it again (sessions/unrecognized): {departure}. Send messages back "
                    "as they were, unless this edit is meant"
                )
            )

    def _say_unknown(self, rows: int, total: int) -> None:
        if rows and "unknown" not in self._said:
            self._said.add("unknown")
            emit(
                Note(
                    f"{write_share(rows, total, 'row', 'holds', 'hold')} characters that the tokenizer does not know, "
                    "in what the environment or the chat template says: the model sees its unknown token in their place"
                )
            )

    def _note_unused_reward(self, grades: Sequence[Earned]) -> None:
        """Emit a note, once, that the chosen reward has scored nothing."""
        reward, plain = self._config.reward, RewardConfig()
        chosen = [name for name in ("name", "path") if getattr(reward, name) != getattr(plain, name)]
        ended = [earned for earned in grades if not earned.full]
        if chosen and ended and "reward" not in self._said and all(earned.score is not None for earned in ended):
            self._said.add("reward")
            what = " and ".join(f"reward.{name} = {getattr(reward, name)!r}" for name in chosen)
            emit(
                Note(
                    f"{what} has scored nothing yet: each of the first {write_count(len(ended), 'session')} of "
                    f"environment.name = {self._config.environment.name!r} returned a score, and the reward scores "
                    "only sessions that return None"
                )
            )

    def _report_failures(self, report: SessionReport, when: str, rows: int) -> None:
        """Emit why sessions failed: each reason with its count, and with its traceback if it is new."""
        failed = sum(report.failures.values())
        common = [reason for reason, _ in report.failures.most_common(3)]
        reasons = "; ".join(f"{reason} ({report.failures[reason]})" for reason in common)
        sentences = [self._describe_reason(reason, report.details.get(reason, "")) for reason in common]
        text = "\n".join([reasons, *filter(None, sentences)])
        if not rows:
            raise NoRowsError(f"{when}: {self._explain_no_rows(report.sessions, failed)}{text}".rstrip())
        if failed:
            emit(
                Note(
                    f"{when}: {failed} of {write_count(report.sessions, 'session')} failed and "
                    f"{'is' if failed == 1 else 'are'} not trained ({percent(failed / report.sessions)}): {text}"
                )
            )

    def _explain_no_rows(self, sessions: int, failed: int) -> str:
        """Return why there are no rows: all sessions failed, or the others have never asked the model."""
        name, plural = f"environment.name = {self._config.environment.name!r}", sessions != 1
        if failed == sessions:
            return f"{f'all {sessions} sessions' if plural else 'the only session'} of {name} failed: "
        others = f"; {failed} of {sessions} failed: " if failed else ""
        log = f"; {self._logs} has the output of sessions" if self._logs else ""
        return (
            f"no session of {name} asked the model, and only the model's answers are trained: a session asks it by "
            f"`await client.chat(...)`, or by requests to client.base_url{log}{others}"
        )

    def _describe_reason(self, reason: str, details: str) -> str:
        """Return the traceback of a failure, unless a traceback of the same statements was shown before."""
        statements = [line for line in details.splitlines() if line.startswith("  File ")]
        key = "\n".join(statements) or reason
        new = key not in self._said
        self._said.add(key)
        return details.rstrip() if new else ""


def _least_room(rooms: Sequence[SessionRoom]) -> SessionRoom | None:
    return min(rooms, key=lambda room: room.tokens, default=None)


def _join_reports(reports: Sequence[Mapping[str, Any]], limits: Mapping[str, int]) -> SessionReport:
    failures: Counter[str] = Counter()
    for report in reports:
        failures.update(report["failures"])
    total = {name: sum(report[name] for report in reports) for name in _TOTALS}
    seconds = [second for report in reports for second in report["seconds"]]
    waits_s = [second for report in reports for second in report["waits_s"]]
    count = max(1, total["sessions"])
    figures = {
        names.SESSIONS_FAILED: sum(failures.values()) / count,
        names.SESSIONS_FULL: total["context_full"] / count,
        **{names.SESSIONS_LIMITS[name]: sum(report["limits"][name] for report in reports) / count for name in limits},
        names.SESSIONS_SPLITS: float(total["splits"]),
        names.SESSIONS_UNRECOGNIZED: float(total["unrecognized"]),
        names.SESSIONS_TURNS: total["turns"] / count,
        names.SESSIONS_TOOL_CALLS: total["tool_calls"] / count,
        names.SESSIONS_TOOL_ERRORS: total["tool_errors"] / max(1, total["tool_calls"]),
        names.SESSIONS_WAITED: float(len(waits_s)),
        names.SESSIONS_WAIT_S_MEAN: sum(waits_s) / count,
        names.SESSIONS_WAIT_S_MAX: max(waits_s, default=0.0),
        names.SESSION_S_MEDIAN: median(seconds) if seconds else 0.0,
        names.SESSION_S_MAX: max(seconds, default=0.0),
        names.SAMPLED: float(total["sampled"]),
    }
    details = {reason: detail for report in reports for reason, detail in report["details"].items()}
    return SessionReport(total["sessions"], failures, details, figures)


def _find_last_answers(scored: ScoredBatch, firsts: Sequence[int], grader: Grader) -> list[int]:
    """Return the row of each trajectory that has its last answer, if the reward reads tokens, and else its first row:
    the text of the last answer is in each of them."""
    if fields.TURN not in scored.batch or {"completion_ids", "prompt_ids"}.isdisjoint(grader.extras):
        return [*firsts]
    numbers = scored.batch.dense(fields.TRAJECTORY).tolist()
    turns = [int(row.max()) for row in scored.batch.select(fields.TURN).fetch().jagged(fields.TURN).unbind()]
    lasts: dict[int, int] = {}
    for row, number in enumerate(numbers):
        if turns[row] > turns[lasts.setdefault(number, row)]:
            lasts[number] = row
    return [lasts[numbers[first]] for first in firsts]


def grade_sessions(
    scored: ScoredBatch, grader: Grader, reward: RewardConfig, reward_model: Handle[RewardModel] | None = None
) -> ScoredBatch:
    """Return ``scored`` with the grades of the environment, or with the reward's grades for rows that have none.

    A session is graded once, by the last answer of its first agent without a score, and the others without one share
    this grade. The rows of a trajectory have one grade, whose score includes the rewards of turns; the column
    ``rewards`` does not, because these stand in ``token_rewards``. A session that filled the context is not correct,
    and a rule gives its score.
    A score to which both the reward and turns contribute is the sum of several rewards, and so no verdict by itself.
    Trajectories that the reward leaves out are ``left_out``.

    If there is a ``reward_model``, the reward finds in the row its score of the task's prompt and the last answer.

    Raises:
        RewardError: The reward failed.
    """
    numbers = scored.batch.dense(fields.TRAJECTORY).tolist()
    earned_by_row: list[Earned] = scored.batch.python(fields.GRADE)
    missing = [row for row in scored.firsts if earned_by_row[row].score is None]
    sessions = scored.batch.dense(fields.SESSION).tolist() if fields.SESSION in scored.batch else numbers
    answer_grades: dict[int, Grade] = {}
    if missing:
        graded = [*{sessions[row]: row for row in reversed(missing)}.values()][::-1]  # the first of each session
        answers = scored.with_rows(_find_last_answers(scored, graded, grader)).grades_of(grader, reward_model)
        by_session = dict(zip([sessions[row] for row in graded], answers, strict=True))
        answer_grades = {numbers[row]: by_session[sessions[row]] for row in missing}
    row_grades = [
        answer_grades.get(number)
        or Grade(score=earned.score or 0.0, ruled=(earned.score or 0.0) if earned.full else None)
        for number, earned in zip(numbers, earned_by_row, strict=True)
    ]
    grades: list[Grade] = []
    for number, grade, earned in zip(numbers, row_grades, earned_by_row, strict=True):
        score = grade.score + earned.of_turns
        parts = {**earned.parts, **grade.parts}
        is_sum = number in answer_grades and (grader.is_sum or bool(earned.of_turns))
        correct = reward.is_correct(score, is_sum=is_sum)
        grades.append(replace(grade, score=score, parts=parts, correct=False if correct and earned.full else correct))
    return scored.with_grades(grades, torch.tensor([grade.score for grade in row_grades], dtype=torch.float32))
