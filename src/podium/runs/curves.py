"""Learning curves, which installed packages draw: entry points of the group ``podium.curves``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from podium.errors import ConfigError
from podium.extras import explain_packages, repair_command
from podium.functions import explain_raised
from podium.installed import list_entry_points

if TYPE_CHECKING:
    from rich.text import Text

_GROUP: Final = "podium.curves"


_BRAILLE: Final = range(0x2801, 0x2900)  # without the blank one
_ASCII: Final = str.maketrans("┌┐└┘├┤┬┴┼─│●\u2800", "+++++++++-|o ") | dict.fromkeys(_BRAILLE, "*")


class CurveText(NamedTuple):
    """A learning curve in characters.

    Attributes:
        metric: The name of the metric that it shows.
        heading: The metric as people read it, and what the marks are.
        drawing: The curve.
        remark: What the curve leaves out, such as "not finite at 2 steps".
    """

    metric: str
    heading: Text
    drawing: Text
    remark: str = ""

    def in_ascii(self) -> CurveText:
        """Return the curve for a stdout whose encoding has ASCII alone. A cell with a dot becomes a star."""
        from rich.text import Text

        heading, drawing = (Text(text.plain.translate(_ASCII)) for text in (self.heading, self.drawing))
        return self._replace(heading=heading, drawing=drawing)


class CurveDrawer(Protocol):
    """What an entry point of the group ``podium.curves`` is: a module or an object with these functions. Both take the
    rows of metrics.jsonl, and return None where they have no curve."""

    def plot(self, rows: Sequence[Mapping[str, Any]], title: str) -> bytes | None:
        """Return the learning curve as a PNG."""
        ...

    def draw(self, rows: Sequence[Mapping[str, Any]], width: int) -> CurveText | None:
        """Return the learning curve in lines of ``width`` characters; None for a single step, too."""
        ...


def load_drawer() -> tuple[CurveDrawer | None, str]:
    """Return what draws learning curves, and ""; or None and the reason, as the end of a sentence."""
    entry = min(list_entry_points(group=_GROUP), key=lambda entry: entry.value, default=None)
    if entry is None:
        return None, f", because no installed package draws it; {explain_packages(_GROUP, 'png')}"
    try:
        with explain_raised(f"{entry.value} cannot be loaded"):
            return entry.load(), ""
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ImportError) and (command := repair_command(entry, cause)):
            return None, f" without {cause.name}: {command}"
        return None, f": {error}"
