"""The backend ``monarch``: one Monarch proc a rank, on this machine. Needs ``pip install 'podium[monarch]'``."""

from podium.backends.monarch.backend import MonarchBackend

__all__ = ["MonarchBackend"]
