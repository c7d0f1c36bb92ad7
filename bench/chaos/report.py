"""What campaigns led to, as a file of figures and as the table of docs/reliability.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.chaos.faults import FAULTS
from bench.chaos.training import STALENESS

__all__ = ["MARK", "collect", "section", "summary_path", "write_found"]

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


def collect(folders: Iterable[Path]) -> dict[str, Any]:
    """The summaries in ``folders`` as one: their campaigns, and the machine of the first.

    Raises:
        FileNotFoundError: A folder has no summary, as no campaign has ended there.
    """
    found = list[dict[str, Any]]()
    for folder in folders:
        own = [summary_path(folder, schedule) for schedule in STALENESS]
        there = [path for path in own if path.exists()]
        if not there:
            raise FileNotFoundError(f"{folder} has no {own[0].name}: no campaign has ended there")
        found += [json.loads(path.read_text()) for path in there]
    campaigns = [{name: value for name, value in one.items() if name != "machine"} for one in found]
    return {"machine": found[0]["machine"], "campaigns": campaigns}


def write_found(path: Path, found: Mapping[str, Any]) -> None:
    """Write with one line for each campaign, so that a difference is read easily."""
    campaigns = ",\n".join("  " + json.dumps(one) for one in found["campaigns"])
    path.write_text(f'{{\n "machine": {json.dumps(found["machine"])},\n "campaigns": [\n{campaigns}\n ]\n}}\n')


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


def _spread(times: Sequence[float]) -> str:
    middle, slowest = times
    return f"{middle:.1f}" if f"{middle:.1f}" == f"{slowest:.1f}" else f"{middle:.1f} ({slowest:.1f})"


def _kind(campaign: Mapping[str, Any]) -> tuple[str, str]:
    """The backend of a campaign, and what its faults are faults of."""
    words = " of runs of sessions" if campaign.get("sessions") else ""
    return campaign["backend"], words + (", with times that have no imports" if campaign.get("warm") else "")


def section(found: Mapping[str, Any]) -> str:
    """The section of the page: who measured what where, a table for each backend, and what the books say."""
    machine, campaigns = found["machine"], found["campaigns"]
    where = f"{machine['cores']} cores ({machine['processor']})"
    when = f"{machine['when'][:10]} with a load of {machine['load_before']:.0f}"
    lines = [f"Measured on {where}, {when}, torch {machine['libraries']['torch']}."]
    for kind in dict.fromkeys(map(_kind, campaigns)):
        own = [one for one in campaigns if _kind(one) == kind]
        faults = sum(row["faults"] for one in own for row in one["rows"])
        lines += ["", f"On `{own[0]['backend']}`, {faults:,} faults{kind[1]}:", ""]
        lines += [f"| fault | {' | '.join(f'`{schedule}`' for schedule in STALENESS)} |"]
        lines += ["|---|" + "---|" * len(STALENESS)]
        for name in FAULTS:
            rows = {
                schedule: [
                    row for one in own if one["schedule"] == schedule for row in one["rows"] if row["fault"] == name
                ]
                for schedule in STALENESS
            }
            if any(rows.values()):
                lines.append(f"| {TITLES[name]} | {' | '.join(map(_cell, rows.values()))} |")
    prompts = sum(one["prompts"] for one in campaigns)
    wrong = [f"{one['backend']}, {one['schedule']}: {text}" for one in campaigns for text in one["wrong"]]
    lines += ["", f"The books of these {len(campaigns)} runs, with {prompts:,} prompts: "]
    lines[-1] += "0 prompts skipped, 0 trained twice, nothing wrong." if not wrong else "; ".join(wrong)
    return "\n".join(lines)
