"""Worker processes on this machine, started from a warm fork server, with tensors in shared memory (Linux)."""

from podium.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
