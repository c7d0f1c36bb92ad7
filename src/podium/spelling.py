"""Words of messages: counts of things, names that differ by a letter or two, and characters that are no text."""

import difflib
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress

_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")


def is_text(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has no half of a surrogate pair.

    Python reads each byte of a file's name that is not UTF-8 as such a half.

    >>> is_text("caf\u00e9"), is_text(bytes([0xE9]).decode("utf-8", "surrogateescape"))
    (True, False)
    """
    return _HALF_OF_PAIR.search(text) is None


def explain_not_text(text: str, remedy: str) -> str:
    """Return why :func:`is_text` is false of a file's name, and ``remedy``, or what to do where the locale keeps Python
    from reading names that are UTF-8."""
    encoding = sys.getfilesystemencoding()
    with suppress(UnicodeError):
        if encoding != "utf-8" and os.fsencode(text).decode():
            return f"which Python reads as {encoding} in this locale: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    return f"which is not UTF-8: {remedy}"


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


def write_count(count: float, singular: str, plural: str = "") -> str:
    """Return a whole number with the words for the things that it counts; ``plural`` is by default ``singular`` with
    the ending of a plural.

    >>> write_count(1, "row"), write_count(2500, "batch"), write_count(0, "row has", "rows have")
    ('1 row', '2,500 batches', '0 rows have')
    """
    ending = "es" if singular.endswith(("s", "x", "ch")) else "s"
    return f"{count:,.0f} {singular if count == 1 else plural or singular + ending}"


def write_share(part: int, total: int, noun: str, singular_verb: str, plural_verb: str) -> str:
    """Return how many of how many things do something; the noun follows ``total``, and the verb ``part``.

    >>> write_share(1, 3, "prompt", "is", "are"), write_share(0, 1, "rank", "has", "have")
    ('1 of 3 prompts is', '0 of 1 rank have')
    """
    return f"{part:,} of {write_count(total, noun)} {singular_verb if part == 1 else plural_verb}"


def suggest(*names: str) -> str:
    """Return the end of a message that suggests what was meant; "" without ``names``.

    >>> suggest("optim.lr")
    '; did you mean optim.lr?'
    """
    words = [name if name.isprintable() and name == name.strip() else repr(name) for name in names]
    return f"; did you mean {' or '.join(words)}?" if words else ""


def suggest_nearest(name: str, names: Iterable[str], *, prefix: str = "", count: int = 1, likeness: float = 0.6) -> str:
    """Return the end of a message that suggests up to ``count`` of ``names`` that are like ``name``, each behind
    ``prefix``; "" if none is.

    ``likeness`` is the least ratio of :mod:`difflib` at which a name is like another one, between 0 and 1.
    """
    near = difflib.get_close_matches(name, list(names), n=count, cutoff=likeness)
    return suggest(*(prefix + other for other in near))


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


def words_of(text: str) -> set[str]:
    """Return the words of more than three letters, in lower case and in the singular.

    >>> sorted(words_of("Number of completions"))
    ['completion', 'number']
    """
    return {word.removesuffix("s") for word in re.findall(r"[a-z]{4,}", text.lower())}
