"""The environment ``verifiers``: tasksets of verifiers. verifiers itself is imported in a process of its own."""

from podium_verifiers.environment import Verifiers

__all__ = ["Verifiers"]
