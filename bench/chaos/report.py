"""What campaigns led to, as a file of figures and as the table of docs/reliability.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.chaos.faults import FAULTS
from bench.chaos.training import STALENESS

__all__ = ["MARK", "collect", "merge", "section", "summary_path", "write_campaigns"]

MARK: Final = "<!-- begin: python -m bench.chaos --report -->"
TITLES: Final = {
    "controller": "SIGKILL of the script",
    "save": "SIGKILL of the script during a save",
    "stop": "SIGTERM of the script",
    "policy": "SIGKILL of the policy",
    "generator": "SIGKILL of the generator",
    "rollout": "SIGKILL of the rollout worker",
    "fork_server": "SIGKILL of the fork server",
    "pause": "SIGSTOP of a worker for 0.7 s",
    "slow": "a process runs a tenth of the time for 1.5 s",
    "half_closed": "a socket to a worker closes, in one direction or both",
    "clock": "the clock jumps by hours, twice",
    "policy_raises": "the policy raises",
    "generator_raises": "the generator raises",
    "memory": "a worker may take no more memory, and needs it",
    "files_end": "no file may grow",
    "disk_full": "the disk is full",
    "dispatcher": "SIGKILL of the process that hands out items to grade",
    "grading": "SIGKILL of the process that grades",
    "policy, fork_server": "SIGKILL of the policy; of the fork server when that is noticed",
    "policy, loading fork_server": "SIGKILL of the policy; of the fork server when the workers start again",
    "policy, starting policy": "SIGKILL of the policy; of the one that starts in its place",
    "policy, starting generator": "SIGKILL of the policy; of the generator that starts again",
    "policy, restored policy": "SIGKILL of the policy; again when it has loaded the checkpoint",
    "policy, restored generator": "SIGKILL of the policy; of the generator before it gets the weights",
    "policy, dispatcher": "SIGKILL of the policy; of the process that hands out items to grade",
    "generator, starting generator": "SIGKILL of the generator; of the one that starts in its place",
    "generator, policy": "SIGKILL of the generator; of the policy while the generator starts again",
    "fork_server, fork_server": "SIGKILL of the fork server; of the next one",
    "rollout, starting rollout": "SIGKILL of the rollout worker; of the one that starts in its place",
    "rollout, generator": "SIGKILL of the rollout worker; of a generator when that is noticed",
}
OUTCOMES: Final = ("survived", "restarted", "surfaced", "missed", "wrong")


def summary_path(folder: Path, schedule: str) -> Path:
    """The file in a campaign's folder that holds the summary of one schedule."""
    return folder / f"{schedule}.summary.json"


def collect(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The campaigns that have ended in ``folders``.

    Raises:
        FileNotFoundError: A folder has no summary, as no campaign has ended there.
    """
    campaigns = list[dict[str, Any]]()
    for folder in folders:
        paths = [summary_path(folder, schedule) for schedule in STALENESS]
        summaries = [path for path in paths if path.exists()]
        if not summaries:
            raise FileNotFoundError(f"{folder} has no {paths[0].name}: no campaign has ended there")
        campaigns += [json.loads(path.read_text()) for path in summaries]
    return campaigns


def merge(before: Iterable[dict[str, Any]], campaigns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ``before`` of other kinds, schedules or dates than the ``campaigns``, and these."""
    new = {(_kind(campaign), campaign["schedule"]) for campaign in campaigns}
    return [campaign for campaign in before if (_kind(campaign), campaign["schedule"]) not in new] + [*campaigns]


def write_campaigns(path: Path, campaigns: Sequence[Mapping[str, Any]]) -> None:
    """Write with one line for each campaign, so that a difference is read easily."""
    path.write_text("[\n" + ",\n".join(f" {json.dumps(campaign)}" for campaign in campaigns) + "\n]\n")


def _cell(rows: Sequence[Mapping[str, Any]]) -> str:
    """How often each outcome came, and the median and the slowest time of each: "50 survived, 1.2 (2.0)"."""
    words: list[str] = []
    for outcome in OUTCOMES:
        for row in rows:
            if not (times := row["outcomes"].get(outcome)):
                continue
            count, recovery, error = times["count"], times["recovery_s"], times["error_s"]
            if outcome in ("missed", "wrong"):
                words.append(f"{count} {outcome}")
                continue
            after = f" after {_spread(error)}" if outcome == "surfaced" else ""
            words.append(f"{count} {outcome}{after}, {_spread(recovery)}")
    return "; ".join(words) or "-"


def _counts(campaigns: Sequence[Mapping[str, Any]]) -> str:
    """Of a kind of faults in a schedule, the fewest and the most that met somebody to harm."""
    harmed = Counter[tuple[str, str]]()
    names = {row["fault"] for campaign in campaigns for row in campaign["rows"]}
    for campaign in campaigns:
        for name in names:
            harmed[name, campaign["schedule"]] += 0
        for row in campaign["rows"]:
            missed = row["outcomes"].get("missed", {"count": 0})["count"]
            harmed[row["fault"], campaign["schedule"]] += row["faults"] - missed
    fewest, most = min(harmed.values(), default=0), max(harmed.values(), default=0)
    return (
        f", {fewest} of each in each schedule" if fewest == most else f", {fewest} to {most} of each in each schedule"
    )


def _spread(times: Sequence[float]) -> str:
    middle, slowest = times
    return f"{middle:.1f}" if f"{middle:.1f}" == f"{slowest:.1f}" else f"{middle:.1f} ({slowest:.1f})"


def _kind(campaign: Mapping[str, Any]) -> tuple[str, str, str]:
    """The backend of a campaign, what its faults are faults of, and when and where it ran."""
    words = " of runs of sessions" if campaign.get("sessions") else ""
    words += ", with fork servers that are forks" if campaign.get("warm") else ""
    machine = campaign["machine"]
    where = f"{machine['when'][:10]} on {machine['cores']} cores ({machine['processor']})"
    return campaign["backend"], words, f"{where}, torch {machine['libraries']['torch']}"


def section(campaigns: Sequence[Mapping[str, Any]]) -> str:
    """The section of the page: a table for each kind of campaigns, and what the books say."""
    lines: list[str] = []
    for kind in dict.fromkeys(map(_kind, campaigns)):
        same = [campaign for campaign in campaigns if _kind(campaign) == kind]
        faults = sum(row["faults"] for campaign in same for row in campaign["rows"])
        loads = sorted(campaign["machine"]["load_before"] for campaign in same)
        load = f"{loads[0]:.0f}" if f"{loads[0]:.0f}" == f"{loads[-1]:.0f}" else f"{loads[0]:.0f} to {loads[-1]:.0f}"
        backend, words, where = kind
        lines += [
            f"On `{backend}`, {faults:,} faults{words}{_counts(same)}. Measured on {where}, with a load of {load}:"
        ]
        lines += [""]
        lines += [f"| fault | {' | '.join(f'`{schedule}`' for schedule in STALENESS)} |"]
        lines += ["|---|" + "---|" * len(STALENESS)]
        for name in FAULTS:
            cells = [
                [
                    row
                    for campaign in same
                    if campaign["schedule"] == schedule
                    for row in campaign["rows"]
                    if row["fault"] == name
                ]
                for schedule in STALENESS
            ]
            if any(cells):
                lines.append(f"| {TITLES[name]} | {' | '.join(map(_cell, cells))} |")
        lines.append("")
    prompts = sum(campaign["prompts"] for campaign in campaigns)
    wrong = [f"{one['backend']}, {one['schedule']}: {text}" for one in campaigns for text in one["wrong"]]
    runs = sum(campaign.get("runs", 1) for campaign in campaigns)
    lines.append(f"The books of these {runs} runs, with {prompts:,} prompts: ")
    lines[-1] += "0 prompts skipped, 0 trained twice, nothing wrong." if not wrong else "; ".join(wrong)
    return "\n".join(lines)
