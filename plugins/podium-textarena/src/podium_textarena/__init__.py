"""The environment ``textarena``: games of textarena. textarena itself is imported when a game is made."""

from podium_textarena.game import TextArena

__all__ = ["TextArena"]
