"""The page docs/gpu.md, from the plan and from the results of a run on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.runner import Planned, Prediction, judge

INTRO = """# On one GPU

<!-- `python -m bench.gpu --report` writes this page. Change bench/gpu/report.py, not the page. -->

`make gpu` tests and measures Podium on a machine with one NVIDIA GPU, in at most 21 minutes. Each stage runs in a
process of its own and has a budget of time. A stage is skipped if less time is left than its budget, and the results
say so. Predictions are written before the first stage begins, and results after each stage.

```
make gpu                                   # in .venv, on the machine with the GPU
make gpu ARGS="--only preflight rates"     # some stages
make gpu ARGS=--dry                        # all stages on a CPU with tiny shapes, in at most four minutes
python -m bench.gpu --report               # write this page from bench/gpu/results.json
```

The machine with the GPU may have no network. If its Python has torch with CUDA and transformers, `make gpu-wheels`
packs the other packages into the folder `.gpu-wheels`. Copy this folder and the checkout to the machine, and run:

```
make gpu GPU_PYTHON=python3 ARGS="--wheels .gpu-wheels --out results.json"
```

The command installs the packages for this run only. Copy `results.json` back. `python -m bench.gpu --report
results.json` then stores the results in the checkout and writes this page."""

FOUND = """## What the runs found

On 2026-11-26 an H100 was at hand for the first time, for 13 minutes in three runs, and on 2026-11-27 for 14 minutes in
five. The second time, the first run showed where the time goes, two defaults were changed, and the next runs measured
them on the same kind of machine. A GRPO step of 256 completions of 256 tokens, in seconds:

| model's shape | | before | after |
|---|---|---|---|
| Qwen2.5-0.5B | step | 6.87 | 1.64 |
| | generation (tokens/s) | 3.82 (17,150) | 0.71 (92,280) |
| | update | 3.01 | 0.90 |
| SmolLM2-135M | step | 8.32 | 1.86 |
| | generation (tokens/s) | 4.11 (15,940) | 0.86 (75,890) |
| | update | 4.17 | 0.97 |

- **Decode steps are recorded as CUDA graphs by default.** A step of 24 layers starts 570 kernels, and this machine's
  processor takes 20 to 45 µs to start one. Kernels of 256 rows took 95 of 379 ms. Tokens and log-probabilities were
  the same with graphs and without, in float32 and after weights had changed in place or moved.
- **Micro-batches have up to 16,384 tokens on an accelerator by default**, as many as a third of the memory that the
  model's state leaves has room for. With 4096 tokens an optimizer step over 64 rows of 320 tokens took 1,040 ms, of
  which kernels took 443; now it takes 385 and 355.
- **The output layer takes eight times as many tokens at once on an accelerator**, because each part adds to the whole
  gradient of the layer: 48 ms of the 443 were such additions.

In one run beside TRL, at SmolLM2-135M's shape and equal lengths, a step took 2.03 s, and TRL's 10.81 s, of which 9.51
were transformers' `generate`. TRL's micro-batches had 32 rows, because all 256 at once need more than 80 GB.

SmolLM2-135M-Instruct itself learned sums in 12 steps: the held-out reward rose from 0.179 to 0.687 within 8.0 s by all
weights, and to 0.866 within 5.8 s by adapters.

These were wrong, and are mended:

- Two ranks that share a GPU, with `parallel.strategy: fsdp2`, were ended by SIGSEGV as soon as whole weights were
  gathered from their shards: gloo's part of `full_tensor()` cannot read memory of a GPU. A plain `all_gather` can. All
  20 short trainings end now, those over two sharded ranks too.
- A process that ended before the first step ended the run by an AttributeError in place of being started again.
- `examples/quickstart.py` ended by an error after its training where matplotlib is not installed. The stage `learns`,
  which showed it, was not run again; `real` was.
- Three tests expected completions that a CPU draws.
- Stages took 20 s each to start, because torch and transformers were imported anew from a slow disk. They are forks of
  one process now. Budgets that proved too short were raised; `graphs` was stopped after its comparisons, and `decode`
  has its figures.
- After a policy's process was killed, 264 MiB of the device stayed taken beside a generator that had read its weights,
  where the stage `ipc` allowed 256. Ten syncs took no further memory. The stage allows 512 now; what holds the memory
  was not found."""

NEVER = """## Results

**Nothing has been measured on a GPU yet.** A dry run on a CPU shows that the code of each stage runs. Code that needs
CUDA has never run: CUDA IPC, NCCL, CUDA graphs, the flash kernel of packed rows, and the release of a GPU's memory. The
predictions below come from arithmetic and from two rates that other programs reached on an H100. They do not come from
measurements of Podium."""


_NOT_RUN = ("planned", "skipped")


def read_results(path: Path) -> dict[str, Any]:
    """Read the results of a run on a GPU.

    Raises:
        SystemExit: They are those of a dry run.
    """
    book: dict[str, Any] = json.loads(path.read_text())
    if book["dry"]:
        raise SystemExit(f"{path} has the results of a dry run, which has no figures of a GPU")
    return book


def merge_results(books: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one book of several runs, from the oldest to the newest: of each stage the newest result that passed, or
    else the newest that was run. Each stage says at which commit."""
    merged: dict[str, dict[str, Any]] = {}
    for book in books:
        for stage in book["stages"]:
            stage = {"commit": book["commit"], **stage}
            before = merged.setdefault(stage["name"], stage)
            if stage["status"] == "passed" or (stage["status"] not in _NOT_RUN and before["status"] != "passed"):
                merged[stage["name"]] = stage
    commits = list(dict.fromkeys(commit for book in books for commit in str(book["commit"]).split(", ")))
    return {**books[0], "commit": ", ".join(commits), "stages": list(merged.values())}


def page(stages: Sequence[Planned], book: Mapping[str, Any] | None) -> str:
    """The whole page: how to run, what became of each stage, and the plan."""
    lines = [INTRO, "", *([NEVER] if book is None else [*results(book), "", FOUND]), "", *plan(stages)]
    return "\n".join(lines).rstrip() + "\n"


def plan(stages: Sequence[Planned]) -> Iterator[str]:
    """The stages with their budgets and predictions."""
    total = sum(stage.budget_s for stage in stages)
    yield "## The stages"
    yield ""
    yield f"The budgets add up to {total:.0f} s."
    yield ""
    yield "| stage | what it shows | budget, s |"
    yield "|---|---|---|"
    for stage in stages:
        yield f"| {stage.name} | {stage.what} | {stage.budget_s:.0f} |"
    yield from ("", "## What was predicted", "")
    yield "No prediction is changed after a figure is known."
    yield from ("", "| stage | figure | predicted | from what |", "|---|---|---|---|")
    for stage in stages:
        for one in stage.predictions:
            yield f"| {stage.name} | `{one.figure}` | {_span(one)} | {one.why} |"


def results(book: Mapping[str, Any]) -> Iterator[str]:
    """What the run found, stage by stage."""
    facts = next((one.get("facts", {}) for one in book["stages"] if one["name"] == "preflight"), {})
    yield "## Results"
    yield ""
    yield f"Taken {book['began']} at commit {book['commit']}, on {facts.get('device', 'a device that was not asked')}."
    yield ""
    yield "| stage | outcome | seconds | commit | message |"
    yield "|---|---|---|---|---|"
    for one in book["stages"]:
        message = _cell(one.get("message", ""))
        commit = one.get("commit", book["commit"])
        yield f"| {one['name']} | {one['status']} | {one.get('seconds', '')} | {commit} | {message} |"
    for one in book["stages"]:
        rows = [*_rows(one)]
        if rows:
            yield from ("", f"### {one['name']}", "", f"{one['what'][0].upper()}{one['what'][1:]}.", "")
            yield from ("| figure | found | unit | predicted |", "|---|---|---|---|", *rows)


def _rows(stage: Mapping[str, Any]) -> Iterator[str]:
    known = {one["figure"]: Prediction(**one) for one in stage.get("predictions", ())}
    figures: Mapping[str, Any] = stage.get("figures", {})
    for name, found in figures.items():
        said = ""
        if name in known:
            said = f"{_span(known[name])}: {judge(known[name], found['value'])}"
        yield f"| `{name}` | {found['value']:,g} | {_cell(found['unit'])} | {said} |"
    for name, one in known.items():
        if name not in figures:
            yield f"| `{name}` | not measured | {one.unit} | {_span(one)} |"
    for name, text in stage.get("facts", {}).items():
        yield f"| {_cell(name)} | {_cell(str(text))} | | |"
    for name, reason in stage.get("skipped", {}).items():
        yield f"| `{name}` | skipped: {_cell(reason)} | | |"


def _span(one: Prediction) -> str:
    return f"{one.low:,g} to {one.high:,g} {one.unit}".rstrip()


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
