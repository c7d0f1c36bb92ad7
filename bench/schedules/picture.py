"""The picture of the report: held-out accuracy over time and over steps, the mean of the seeds and its band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.schedules.figures import BAR, TITLES, by_arm, curve
from bench.schedules.records import Run

_COLORS: Final = {"sync_colocated": "#16835b", "sync": "#6b7280", "one_step_off": "#2563a8", "asynchronous": "#d9730d"}
_GREY, _DARK, _LINE = "#6b7280", "#22262b", "#e6e8eb"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture to ``path``; the suffix says the format. The same runs give the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    groups = by_arm(runs)
    with matplotlib.rc_context({"svg.hashsalt": "podium", "font.size": 10}):
        figure = Figure(figsize=(10, 4.4), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
        FigureCanvasAgg(figure)
        over_time, over_steps = figure.subplots(1, 2, sharey=True)
        for axes, title, axis in (
            (over_time, "over time, seconds", lambda point: point.seconds),
            (over_steps, "over steps", lambda point: point.step),
        ):
            for name, some in groups.items():
                places, means, lows, highs = zip(*curve(some, axis), strict=True)
                axes.plot(places, means, color=_COLORS[name], linewidth=2, zorder=3)
                if not math.isnan(lows[0]):
                    axes.fill_between(places, lows, highs, color=_COLORS[name], alpha=0.16, linewidth=0)
            axes.axhline(BAR, color=_DARK, linewidth=0.8, linestyle=(0, (4, 4)), zorder=2)
            axes.set_title(title, loc="left", fontsize=10, color=_GREY)
            axes.set_xlim(left=0)
            axes.grid(color=_LINE, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines["bottom"].set_color(_GREY)
            axes.spines[["top", "left", "right"]].set_visible(False)
            axes.tick_params(length=0, labelcolor=_GREY)
        over_time.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        over_time.annotate(
            f"{BAR:.0%}", (0, BAR), xytext=(4, 3), textcoords="offset points", color=_DARK, fontsize=9, zorder=4
        )
        seeds = len({run.seed for run in runs})
        figure.suptitle(
            "Held-out accuracy" if seeds == 1 else f"Held-out accuracy: mean of {seeds} seeds, 95 % band",
            **{"x": 0.012, "ha": "left", "fontsize": 12, "fontweight": "bold", "color": _DARK},
        )
        keys = [
            Line2D([], [], color=_COLORS[name], linewidth=2, label=TITLES[name].replace("`", "")) for name in groups
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, labelcolor=_DARK)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
