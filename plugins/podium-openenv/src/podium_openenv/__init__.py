"""The environment ``openenv``: environments behind a server of OpenEnv."""

from podium_openenv.environment import OpenEnv

__all__ = ["OpenEnv"]
