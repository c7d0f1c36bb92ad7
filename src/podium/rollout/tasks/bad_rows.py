"""Rows of the data that cannot be used."""

from typing import Final

from podium.errors import ConfigError, DataError

__all__ = ["LOOK_AHEAD", "BadRows", "RowError"]

RowError = ConfigError | DataError
"""Why a row cannot be used: it is malformed, or a setting does not fit it."""

LOOK_AHEAD: Final = 1000  # rows: so many are looked at before the first bad one is refused
_SHOWN: Final = 3


class BadRows:
    """Counts the rows that cannot be used, and refuses the data, or reports what is left out, once all were seen."""

    def __init__(self) -> None:
        self._errors: list[RowError] = []
        self._count = 0

    def add(self, error: RowError) -> None:
        """Count a row, which ``error`` names."""
        self._count += 1
        if len(self._errors) < _SHOWN:
            self._errors.append(error)

    def __len__(self) -> int:
        return self._count

    def settle(self, rows: int) -> None:
        """Refuse the data because of their bad rows, if there are any.

        Args:
            rows: Number of rows that were looked at, good and bad.

        Raises:
            ConfigError, DataError: The error of the first bad row, with the number of the others.
        """
        if not self._errors:
            return
        first = self._errors[0]
        if self._count in (1, rows):
            raise first
        raise type(first)(f"{first} ({self._count} of the first {rows:,} rows cannot be used)") from first.__cause__
