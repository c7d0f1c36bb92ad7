"""Learning curves of Podium's runs, in characters and as pictures, and the command ``podium runs compare``.

The module is the entry point of the group ``podium.curves``, and implements :class:`podium.runs.curves.CurveDrawer`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from podium.installed import has_library
from podium.runs.curves import CurveText
from podium_curves.drawing import build_curve, describe_curve, draw_curve, plot_curve

__all__ = ["draw", "plot"]

for _library in ("matplotlib", "plotext"):
    if not has_library(_library):
        raise ModuleNotFoundError(f"No module named {_library!r}", name=_library)


def plot(rows: Sequence[Mapping[str, Any]], title: str) -> bytes | None:
    """Return the learning curve in the rows of a run as a PNG of 1600 x 900 pixels; None if there is none."""
    if (curve := build_curve(rows)) is None:
        return None
    picture = io.BytesIO()
    plot_curve(curve, picture, title)
    return picture.getvalue()


def draw(rows: Sequence[Mapping[str, Any]], width: int) -> CurveText | None:
    """Return the learning curve in the rows of a run in characters; None if there is none, or a single step."""
    curve = build_curve(rows)
    if curve is None or len(curve.steps) < 2:
        return None
    return CurveText(curve.metric, describe_curve(curve), draw_curve(curve, width), curve.remark)
