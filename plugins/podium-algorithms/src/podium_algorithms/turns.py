"""Turns of trajectories, which Podium itself finds."""

from podium.algorithms.turns import Turns, find_turns

__all__ = ["Turns", "find_turns"]
