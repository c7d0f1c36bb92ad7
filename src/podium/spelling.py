"""Typing errors: names that differ by a letter or two, and characters that are no text."""

import re
from collections.abc import Iterable

_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")


def is_text(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has no half of a surrogate pair.

    Python reads each byte of a file's name that is not UTF-8 as such a half.

    >>> is_text("caf\u00e9"), is_text(bytes([0xE9]).decode("utf-8", "surrogateescape"))
    (True, False)
    """
    return _HALF_OF_PAIR.search(text) is None


def nearest_spellings(name: str, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that ``name`` may be a typing error of, the nearest first.

    A typing error is a letter that is wrong, missing or too much, or two that are exchanged: one of these in a name of
    up to four letters, and two in a longer one.

    >>> nearest_spellings("optmi", ["optim", "option"])
    ['optim']
    """
    distances = {other: _count_edits(name.lower(), other.lower()) for other in names}
    near = [other for other, edits in distances.items() if edits <= (1 if min(len(name), len(other)) <= 4 else 2)]
    return sorted(near, key=distances.__getitem__)


def _count_edits(first: str, second: str) -> int:
    """The optimal string alignment distance: insertions, deletions, substitutions and exchanges of neighbors."""
    if abs(len(first) - len(second)) > 2:
        return 3
    before, current = list[int](), list(range(len(second) + 1))
    for row, letter in enumerate(first, 1):
        before, previous, current = current, before, [row]
        for column, other in enumerate(second, 1):
            edits = min(current[-1] + 1, before[column] + 1, before[column - 1] + (letter != other))
            if row > 1 and column > 1 and letter == second[column - 2] and first[row - 2] == other:
                edits = min(edits, previous[column - 2] + 1)
            current.append(edits)
    return current[-1]
