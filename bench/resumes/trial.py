"""One case: its whole run, its ended and resumed run, and what differs between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.resumes.attempts import Outcome, start
from bench.resumes.comparison import list_differences
from bench.resumes.draws import draw_case

__all__ = ["try_case"]


def try_case(seed: int, folder: Path) -> dict[str, Any]:
    """Run the case of ``seed`` in ``folder``. The entry "differences" of what is returned is empty if all is well."""
    case = draw_case(seed, folder)
    about: dict[str, Any] = {"seed": seed, "recipe": case.recipe, "backend": case.backend, "exact": case.exact}
    if case.replays:
        about["replays"] = start(case.named("recorded"), folder).ended
        case = case.replay(folder / "runs" / "recorded")
    expected = start(case.named("whole"), folder)
    if expected.ended != "finished":
        return {**about, "ended": [expected.ended], "text": expected.text, "differences": []}
    ended, outcomes = case.named("ended"), list[Outcome]()
    for end in case.ends:
        outcomes.append(start(ended, folder, end, expected))
    outcomes.append(start(ended, folder))
    about["ended"] = [outcome.ended for outcome in outcomes]
    failed = [outcome.text for outcome in outcomes if outcome.ended in ("refused", "failed")]
    if failed or outcomes[-1].ended != "finished":
        return {**about, "differences": failed or ["the run is not finished"]}
    stopped = {outcome.steps for outcome in outcomes if outcome.ended == "stopped"}
    runs = folder / "runs"
    differences = list_differences(runs / "ended", runs / "whole", case.settings, exact=case.exact, stopped=stopped)
    return {**about, "differences": differences[:8]}
