"""Games of textarena, against a copy of the policy, a random player or a function of one's own.

podium train grpo --environment.name textarena --environment.options '{env: TicTacToe-v0, opponent: random}' ...
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from podium.errors import ConfigError, PodiumError
from podium.extras import install_command
from podium.functions import load_function
from podium_agents import Outcome, in_thread

if TYPE_CHECKING:
    from podium_agents import Client, Task

__all__ = ["TextArena"]

_GAME: Final = -1  # who speaks, where the game does
_MOVE: Final = re.compile(r"\[[^\[\]]{1,40}\]")
_TEST_SEEDS: Final = 1_000_000_007  # from here on, so that no game is in both splits


class TextArena:
    """A game with a seat for the policy. The reward is textarena's: 1 for a win, -1 for a loss, 0 for a draw.

    Args:
        env: The name of the game, as textarena has it, such as "TicTacToe-v0".
        opponent: Who has the other seats: "self" (the policy, whose seats are trained with their own rewards),
            "random" (a move among those in brackets in the last line of the game that has any, whether or not the
            rules allow it), or the name of a function ``module:function`` from what a player reads to what the player
            does. One that blocks has a thread.
        players: The number of players.
        games: The number of tasks in "train". "test" has a tenth of it. Each has a seed and a seat of its own.
        settings: Further arguments of the game.

    Raises:
        ConfigError: textarena is not installed, there is no such game, or no such opponent.
    """

    def __init__(
        self,
        env: str,
        opponent: str = "self",
        players: int = 2,
        games: int = 10_000,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.env, self.players, self.games = env, players, games
        self._settings = dict(settings or {})
        self._opponent: Callable[[str], Any] | None = None
        self._is_random = opponent == "random"
        if opponent not in ("self", "random"):
            if ":" not in opponent:
                raise ConfigError(
                    f"environment.options.opponent = {opponent!r}: expected self, random, or a function module:function"
                )
            self._opponent = load_function(opponent, key="environment.options.opponent")
        self._make()

    def _make(self) -> Any:
        try:
            import textarena  # pyright: ignore[reportMissingImports] - it is not installed where types are checked
        except ImportError as error:
            raise ConfigError(
                f"environment.name = 'textarena' needs {error.name}, which is not installed: "
                f"{install_command('textarena', package='podium-textarena')}"
            ) from None
        library: Any = textarena
        try:
            return library.make(f"{self.env.removesuffix('-raw')}-raw", **self._settings)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"environment.options.env = {self.env!r}: {error}") from None

    def tasks(self, split: Literal["train", "test"]) -> Sequence[Task]:
        """Return games by seed, in which the policy sits at each place equally often."""
        first, count = (0, self.games) if split == "train" else (_TEST_SEEDS, max(1, self.games // 10))
        return [
            {"prompt": f"{self.env}, game {seed}", "answer": None, "seed": seed, "seat": seed % self.players}
            for seed in range(first, first + count)
        ]

    async def play(self, task: Task, client: Client) -> Outcome:
        """Play one game to its end."""
        game, seat = self._make(), int(task["seat"])
        game.reset(num_players=self.players, seed=int(task["seed"]))
        conversations: dict[int, list[dict[str, Any]]] = {}
        rules: dict[int, list[str]] = {}  # what the game itself has said to each player
        clients = {seat: client}
        dice = random.Random(client.seed)  # a game seeds Python's own numbers, for all sessions of a prompt alike
        done = False
        while not done:
            player, observation = game.get_observation()
            names = game.state.role_mapping
            lines = [
                what if by == _GAME else f"[{names.get(by, f'Player {by}')}] {what}" for by, what, _ in observation
            ]
            text = "\n".join(lines)
            if player == seat or not (self._is_random or self._opponent):
                speaker = clients.setdefault(player, client.agent(f"player-{player}") if player != seat else client)
                messages = conversations.setdefault(player, [])
                messages.append({"role": "user", "content": text})
                reply = await speaker.chat(messages)
                messages.append(reply.message)
                action = reply.text
            elif self._is_random:
                await asyncio.sleep(0)  # a game that no move ends may be cancelled here
                rules.setdefault(player, []).extend(what for by, what, _ in observation if by == _GAME)
                action = _random_move("\n".join(rules[player]), dice)
            else:
                action = await self._ask_opponent(text)
            done, _ = game.step(action)
        rewards, info = game.close()
        if rewards is None:
            raise PodiumError(f"{self.env} ended without rewards")
        invalid = {player for player, facts in info.items() if facts.get("invalid_move")}
        return Outcome(
            score=float(rewards[seat]),
            parts={
                "win": float(rewards[seat] > 0),
                "invalid": float(seat in invalid),
                "opponent_invalid": float(bool(invalid - {seat})),
            },
            agents={f"player-{player}": float(rewards[player]) for player in clients if player != seat},
        )

    async def _ask_opponent(self, text: str) -> str:
        """Return what the opponent's function does."""
        assert self._opponent is not None
        if inspect.iscoroutinefunction(self._opponent):
            action: Any = await self._opponent(text)
        else:
            action = await in_thread(self._opponent, text)
            action = await action if inspect.isawaitable(action) else action
        if not isinstance(action, str):
            raise TypeError(f"environment.options.opponent returned {type(action).__name__}; expected a text")
        return action


def _random_move(text: str, dice: random.Random) -> str:
    """Return one of the moves in brackets in the last line that has any."""
    moves = [line_moves for line in text.splitlines() if (line_moves := _MOVE.findall(line))]
    return dice.choice(moves[-1]) if moves else ""
