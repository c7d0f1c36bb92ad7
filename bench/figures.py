"""Writes the tables of docs/figures.md and of the README from bench/results.json: `python -m bench.figures`.

A cell is a template, ``{noop_8_local}`` for Podium's figure or ``{noop_8_local.pipe}`` for what stands beside it, so
that no figure is typed by hand. A line whose rows the last whole run lacks is left out, and the command fails.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.report import put_section

ROOT: Final = Path(__file__).resolve().parent.parent
MARK: Final = "<!-- begin: python -m bench.figures -->"
PAGES: Final = {"docs/figures.md": ("LOCAL", "RAY"), "README.md": ("SHORT",)}

CELL: Final = re.compile(r"\{(\w+)(?:\.(\w+))?\}")

Lines = tuple[tuple[str, ...], ...]

LOCAL: Final[Lines] = (
    ("", "Podium", "raw floor", "Ray actors, torch / numpy", "others"),
    ("no-op to 8 workers", "{noop_8_local}", "pipes {noop_8_local.pipe}", "{noop_8_local.ray}", ""),
    (
        "echo of 512 MiB over 8 workers", "{echo_512MiB_8_local}", "shared memory {echo_512MiB_8_local.shm}",
        "{echo_512MiB_8_local.ray} / {echo_512MiB_8_local.ray_numpy}", "",
    ),
    (
        "echo of 16 MiB over 8 workers", "{echo_16MiB_8_local}", "shared memory {echo_16MiB_8_local.shm}",
        "{echo_16MiB_8_local.ray} / {echo_16MiB_8_local.ray_numpy}", "",
    ),
    (
        "broadcast of 128 MiB to 8 workers", "{broadcast_128MiB_8_local}",
        "shared memory {broadcast_128MiB_8_local.shm}", "{broadcast_128MiB_8_local.ray}", "",
    ),
    (
        "512 MiB by reference, and a look at it", "{hop_512MiB_local}", "shared memory {hop_512MiB_local.shm}",
        "{hop_512MiB_local.ray} / {hop_512MiB_local.ray_numpy}", "verl {hop_512MiB_local.verl_numpy} as numpy",
    ),
    (
        "512 MiB by reference, and all of it read", "{hop_touch_512MiB_local}",
        "shared memory {hop_touch_512MiB_local.shm}",
        "{hop_touch_512MiB_local.ray} / {hop_touch_512MiB_local.ray_numpy}",
        "verl {hop_touch_512MiB_local.verl_numpy} as numpy",
    ),
    (
        "verl's transfer test: 2 GiB, 8 workers", "{verl_transfer_2GiB_8_local}",
        "one copy {verl_transfer_2GiB_8_local.memcpy}, into new pages {verl_transfer_2GiB_8_local.memcpy_fresh}", "",
        "verl {verl_transfer_2GiB_8_local.verl}, {verl_transfer_2GiB_8_local.verl_numpy} as numpy",
    ),
    (
        "the same, given to the workers by the script", "{verl_transfer_given_2GiB_8_local}",
        "one copy {verl_transfer_given_2GiB_8_local.memcpy}", "",
        "verl {verl_transfer_given_2GiB_8_local.verl}, {verl_transfer_given_2GiB_8_local.verl_numpy} as numpy",
    ),
    (
        "the same, fetched by the script too", "{verl_transfer_fetched_2GiB_8_local}",
        "one copy {verl_transfer_fetched_2GiB_8_local.memcpy}", "",
        "verl {verl_transfer_fetched_2GiB_8_local.verl}, {verl_transfer_fetched_2GiB_8_local.verl_numpy} as numpy",
    ),
    (
        "weights of 135M parameters to 4 generators", "{publish_135m_4_local}",
        "four copies {publish_135m_4_local.memcpy}",
        "{publish_135m_4_local.ray} / {publish_135m_4_local.ray_numpy}", "",
    ),
    (
        "8 workers with torch, cold / warm", "{startup_8_local_cold} / {startup_8_local_warm}", "",
        "{startup_8_local_cold.ray} / {startup_8_local_warm.ray}", "",
    ),
    (
        "one of 4 ranks raises / is killed", "{exception_4_local} / {kill_4_local}", "",
        "{exception_4_local.ray} / {kill_4_local.ray}", "",
    ),
    ("one of 4 that compute is killed", "{kill_computing_4_local}", "", "{kill_computing_4_local.ray}", ""),
    ("restart of that group", "{restart_4_local}", "", "", ""),
    (
        "generation, 1M parameters, batch 128", "{generate_1m_b128}", "products {generate_1m_b128.products}", "",
        "transformers {generate_1m_b128.transformers}",
    ),
    (
        "generation, 10M parameters, batch 128", "{generate_10m_b128}", "products {generate_10m_b128.products}", "",
        "transformers {generate_10m_b128.transformers}",
    ),
    *(
        (
            f"generation, 135M parameters, {rows}", f"{{{name}}}", f"products {{{name}.products}}", "",
            f"transformers {{{name}.transformers}}, vLLM {{{name}.vllm}}",
        )
        for name, rows in (
            ("generate_135m_b1", "one row"), ("generate_135m_b4", "4 rows"), ("generate_135m_b16", "16 rows"),
            ("generate_135m_b32", "32 rows"), ("generate_135m_b128", "128 rows"),
            ("generate_135m_bf16_b128", "128 rows, bfloat16"),
        )
    ),
    (
        "GRPO step, 1M parameters, 16 prompts by 8 completions of 64 tokens", "{grpo_step_1m}",
        "products {grpo_step_1m.products}", "",
        "TRL {grpo_step_1m.trl} at its best setting, {grpo_step_1m.trl_default} by default",
    ),
    (
        "GRPO step, 10M parameters, as many", "{grpo_step_10m}", "products {grpo_step_10m.products}", "",
        "TRL {grpo_step_10m.trl} at its best setting, {grpo_step_10m.trl_default} by default",
    ),
    (
        "GRPO step, 135M parameters, 4 by 4 of 32 tokens", "{grpo_step_135m}", "products {grpo_step_135m.products}", "",
        "TRL {grpo_step_135m.trl} at its best setting, {grpo_step_135m.trl_default} by default",
    ),
    (
        "the generation within that step", "{grpo_generate_135m}", "", "",
        "TRL {grpo_generate_135m.trl} at its best setting, {grpo_generate_135m.trl_default} by default",
    ),
    (
        "from the start to the end of a first step, 135M parameters", "{first_step_135m}",
        "imports, reading and products {first_step_135m.parts}", "", "TRL {first_step_135m.trl}",
    ),
    (
        "weights of 135M parameters read from a directory", "{load_135m}", "bytes of the file {load_135m.read}", "",
        "transformers {load_135m.transformers}",
    ),
)  # fmt: skip

RAY: Final[Lines] = (
    ("on Ray", "Podium", "raw actors, torch / numpy", "verl, torch / numpy"),
    ("no-op to 8 workers", "{noop_8_ray}", "{noop_8_ray.ray}", "{noop_8_ray.verl}"),
    (
        "shard 512 MiB over 8 workers, join what they return", "{shard_concat_512MiB_8_ray}",
        "{shard_concat_512MiB_8_ray.ray} / {shard_concat_512MiB_8_ray.ray_numpy}",
        "{shard_concat_512MiB_8_ray.verl} / {shard_concat_512MiB_8_ray.verl_numpy}",
    ),
    (
        "512 MiB by reference, to read / to write", "{hop_512MiB_ray_readonly} / {hop_512MiB_ray}",
        "{hop_512MiB_ray.ray} / {hop_512MiB_ray.ray_numpy}", "numpy {hop_512MiB_ray.verl_numpy}",
    ),
    ("8 workers with torch", "{startup_8_ray}", "{startup_8_ray.ray}", "{startup_8_ray.verl}"),
    (
        "one of 4 ranks raises / is killed", "{exception_4_ray} / {kill_4_ray}",
        "{exception_4_ray.ray} / {kill_4_ray.ray}", "{exception_4_ray.verl} / {kill_4_ray.verl}",
    ),
    ("restart of that group", "{restart_4_ray}", "", ""),
)  # fmt: skip

SHORT: Final[Lines] = (
    ("", "Podium", "others"),
    ("no-op to 8 workers", "{noop_8_local}", "Ray actors {noop_8_local.ray}"),
    (
        "transfer of 2 GiB to 8 workers (verl's own test)", "{verl_transfer_2GiB_8_local}",
        "verl {verl_transfer_2GiB_8_local.verl}",
    ),
    (
        "GRPO step, 1M parameters, 16 prompts by 8 completions of 64 tokens", "{grpo_step_1m}",
        "TRL {grpo_step_1m.trl} at its best setting, {grpo_step_1m.trl_default} by default",
    ),
    (
        "GRPO step, 135M parameters, 4 prompts by 4 completions of 32 tokens", "{grpo_step_135m}",
        "TRL {grpo_step_135m.trl} at its best setting, {grpo_step_135m.trl_default} by default",
    ),
    (
        "generation, 135M parameters, one row / 32 rows", "{generate_135m_b1} / {generate_135m_b32}",
        (
            "transformers {generate_135m_b1.transformers} / {generate_135m_b32.transformers}, "
            "vLLM {generate_135m_b1.vllm} / {generate_135m_b32.vllm}"
        ),
    ),
)  # fmt: skip


def tables(rows: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """Tables in Markdown. ``rows`` are those of bench/results.json, by their names.

    A line with a row that was not measured is left out, see :func:`absent_rows`. A figure that stands beside a row and
    was not taken, because a peer was not installed, is said to be not measured.
    """
    return "\n\n".join(_table(rows, globals()[name]) for name in names)


def absent_rows(rows: Collection[str], names: Sequence[str]) -> list[str]:
    """The rows that the tables name and that were not measured."""
    cells = "".join(cell for name in names for line in globals()[name] for cell in line)
    return sorted({match[1] for match in CELL.finditer(cells)} - {*rows})


def _table(rows: Mapping[str, Mapping[str, Any]], lines: Lines) -> str:
    def fill(match: re.Match[str]) -> str:
        name, beside = match.groups()
        row = rows[name]
        if beside and beside not in row["others"]:
            return "not measured"
        return shown(row["others"][beside] if beside else row["median"], row["unit"])

    measured_lines = [line for line in lines if all(match[1] in rows for match in CELL.finditer("".join(line)))]
    head, *body = [[CELL.sub(fill, cell) for cell in line] for line in measured_lines]
    rule = f"|{'---|' * len(head)}"
    return "\n".join([_line(head), rule, *map(_line, body)])


def _line(cells: Sequence[str]) -> str:
    return f"|{''.join(f' {cell} |' if cell else ' |' for cell in cells)}"


def shown(value: float, unit: str) -> str:
    """A figure with its unit, as in "9,650 µs", "2.6 ms" and "12,900 tokens/s": two or three digits count."""
    digits = 2 if value < 10 else 3
    text = f"{float(f'{value:.{digits}g}'):,.10g}"
    return f"{text} {'µs' if unit == 'us' else unit}"


def measured() -> dict[str, dict[str, Any]]:
    """The rows of the last whole run, by their names."""
    return {row["name"]: row for row in json.loads((ROOT / "bench" / "results.json").read_text())}


def with_figures(page: str, text: str) -> str:
    """The ``text`` of a page of PAGES, with the figures of the last whole run."""
    return put_section(text, tables(measured(), PAGES[page]), MARK)


def main() -> int:
    """Write the pages. Returns 1 if a row that they name was not measured."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_figures(page, path.read_text()))
    absent = absent_rows(measured(), [name for names in PAGES.values() for name in names])
    for row in absent:
        sys.stderr.write(f"bench/results.json has no row {row}: the lines that name it are left out\n")
    return int(bool(absent))


if __name__ == "__main__":
    sys.exit(main())
