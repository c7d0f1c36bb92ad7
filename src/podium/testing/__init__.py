"""The public contract suite: a backend's author imports it and names the backend."""

from podium.testing.contract import BackendContract
from podium.testing.target import Target, need

__all__ = ["BackendContract", "Target", "need"]
