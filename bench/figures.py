"""Writes the tables of docs/figures.md and of the README from bench/results.json: `python -m bench.figures`.

A cell is a template, ``{noop_8_local}`` for Podium's figure or ``{noop_8_local.pipe}`` for what stands beside it, so
that no figure is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.report import put_section

ROOT: Final = Path(__file__).resolve().parent.parent
MARK: Final = "<!-- begin: python -m bench.figures -->"
PAGES: Final = {"docs/figures.md": ("LOCAL", "RAY"), "README.md": ("SHORT",)}

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
        "weights of 0.5 GB to 4 generators", "{publish_512MB_4_local}", "four copies {publish_512MB_4_local.memcpy}",
        "{publish_512MB_4_local.ray} / {publish_512MB_4_local.ray_numpy}", "",
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
    (
        "generation, 100M parameters, batch 128, bfloat16", "{generate_100m_bf16_b128}",
        "products {generate_100m_bf16_b128.products}", "", "transformers {generate_100m_bf16_b128.transformers}",
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
        "GRPO step, 100M parameters, 4 by 4 of 32 tokens", "{grpo_step_100m}", "products {grpo_step_100m.products}", "",
        "TRL {grpo_step_100m.trl} at its best setting, {grpo_step_100m.trl_default} by default",
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
        "8 workers with torch, cold / warm", "{startup_8_local_cold} / {startup_8_local_warm}",
        "Ray actors {startup_8_local_cold.ray} / {startup_8_local_warm.ray}",
    ),
    ("one of 4 ranks is killed, to the error", "{kill_4_local}", "Ray actors {kill_4_local.ray}"),
    (
        "GRPO step, 1M parameters, 16 prompts by 8 completions of 64 tokens", "{grpo_step_1m}",
        "TRL {grpo_step_1m.trl} at its best setting, {grpo_step_1m.trl_default} by default",
    ),
)  # fmt: skip


def tables(rows: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> str:
    """Tables in Markdown. ``rows`` are those of bench/results.json, by their names.

    Raises:
        KeyError: A table names a figure that ``rows`` lack.
    """
    return "\n\n".join(_table(rows, globals()[name]) for name in names)


def _table(rows: Mapping[str, Mapping[str, Any]], lines: Lines) -> str:
    def fill(match: re.Match[str]) -> str:
        name, _, beside = match[1].partition(".")
        row = rows[name]
        return shown(row["others"][beside] if beside else row["median"], row["unit"])

    head, *body = [[re.sub(r"\{([\w.]+)\}", fill, cell) for cell in line] for line in lines]
    rule = f"|{'---|' * len(head)}"
    return "\n".join([_line(head), rule, *map(_line, body)])


def _line(cells: Sequence[str]) -> str:
    return f"|{''.join(f' {cell} |' if cell else ' |' for cell in cells)}"


def shown(value: float, unit: str) -> str:
    """A figure with its unit, as in "9,650 µs", "2.6 ms" and "12,900 tokens/s": two or three digits count."""
    digits = 2 if value < 10 else 3
    text = f"{float(f'{value:.{digits}g}'):,.10g}"
    return f"{text} {'µs' if unit == 'us' else unit}"


def with_figures(page: str, text: str) -> str:
    """The ``text`` of a page of PAGES, with the figures of the last whole run."""
    rows = {row["name"]: row for row in json.loads((ROOT / "bench" / "results.json").read_text())}
    return put_section(text, tables(rows, PAGES[page]), MARK)


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_figures(page, path.read_text()))


if __name__ == "__main__":
    main()
