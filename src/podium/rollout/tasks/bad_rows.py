"""Rows of the data that cannot be used."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from podium.errors import ConfigError, DataError
from podium.telemetry import Note, emit

RowError = ConfigError | DataError
"""Why a row cannot be used: it is malformed, or a setting does not fit it."""

_LOOK_AHEAD: Final = 1000  # rows: so many are looked at before the first bad one is refused
SHOWN: Final = 3
"""Number of bad rows of which the reasons are told."""


@contextmanager
def name_place(place: str) -> Iterator[None]:
    """Put the place of a row before the text of errors of the block."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"{place}: {error}") from error.__cause__


class BadRows:
    """Counts the rows that cannot be used. They are refused, or left out and told, once all were seen.

    Args:
        policy: ``data.bad_rows``.
        noun: What is counted.
    """

    def __init__(self, policy: Literal["refuse", "drop"], noun: str = "rows") -> None:
        self._policy = policy
        self._noun = noun
        self._errors: list[RowError] = []
        self._count = 0

    def add(self, error: RowError) -> None:
        """Count a row, which ``error`` names."""
        self._count += 1
        if len(self._errors) < SHOWN:
            self._errors.append(error)

    def __len__(self) -> int:
        return self._count

    @property
    def look_ahead(self) -> float:
        """Number of rows to look at after the first bad one."""
        return _LOOK_AHEAD if self._policy == "refuse" else math.inf

    def check(self, rows: int) -> None:
        """Refuse the data if one of the ``rows`` that were looked at so far is bad, and bad rows are refused.

        Raises:
            ConfigError, DataError: The error of the first bad row, with the number of the others.
        """
        if not self._errors or self._policy == "drop":
            return
        first = self._errors[0]
        if self._count == rows:  # a setting is wrong
            raise first
        others = f"{self._count} of the first {rows:,} {self._noun} cannot be used; " if self._count > 1 else ""
        raise type(first)(f"{first} ({others}data.bad_rows = drop leaves such rows out)") from first.__cause__

    def settle(self, rows: int) -> None:
        """As :meth:`check`, of all rows, of which one has to be good. Raises ConfigError, DataError."""
        self.check(rows)
        if self._errors and self._count == rows:
            raise self._errors[0]

    def tell(self, count: int, rows: int) -> None:
        """Tell that ``count`` of all ``rows`` are left out, and why the first of them are."""
        reasons = " ".join(f"({number}) {error}" for number, error in enumerate(self._errors, start=1))
        left = "is left out" if count == 1 else "are left out, the first of them"
        emit(Note(f"{count:,} of {rows:,} {self._noun} cannot be used and {left}: {reasons}"))
