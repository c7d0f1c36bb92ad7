"""A model learns to answer from a corpus that it has never read, with two tools: one finds pages, one reads them.

A question asks for the color of a thing. ``search`` gives the numbers of pages that name it, and ``read`` the text of a
page. The held-out things are never seen in training. The warm-up shows how the tools are used, for things of its own,
and ends when three in four last answers are right.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from small import (
    END_OF_CALL,
    Choice,
    called,
    main,
    reinforce,
    shape,
    start_of_call,
    warm_up,
    write_rows,
    write_tokenizer,
)

import podium
from podium.models import ModelConfig
from podium.rewards import RewardConfig
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks import DataConfig
from podium.trainer import Summary
from podium_agents import Client, Toolbox, ToolError, converse, tool

COLORS = ("red", "blue", "green", "gray", "pink", "teal", "gold", "black")
THINGS = 600


def a_name(dice: random.Random) -> str:
    """Two syllables."""
    return "".join(dice.choice("bdfgklmnprst") + dice.choice("aeiou") for _ in range(2))


class Corpus:
    """Pages such as ``daku: teal``; the page of a thing has a number of three digits."""

    def __init__(self) -> None:
        dice = random.Random(7)
        names: dict[str, None] = {}
        while len(names) < THINGS:
            names[a_name(dice)] = None
        self.colors = {name: dice.choice(COLORS) for name in names}
        self.places = {name: f"{place:03d}" for place, name in enumerate(names)}
        self.pages = {self.places[name]: f"{name}: {color}" for name, color in self.colors.items()}


CORPUS = Corpus()


def search(corpus: Corpus, query: str) -> str:
    """Find the page about a thing.

    Args:
        query: Its name.
    """
    return corpus.places.get(query, "none")


def read(corpus: Corpus, page: str) -> str:
    """Read a page.

    Args:
        page: Its number.
    """
    if page not in corpus.pages:
        raise ToolError("no such page")
    return corpus.pages[page]


TOOLS = Toolbox([tool(search, given={"corpus": CORPUS}), tool(read, given={"corpus": CORPUS})])


async def play(task: dict[str, Any], client: Client) -> float:
    """The answer is right or it is not."""
    reply = await converse(client, [{"role": "user", "content": task["prompt"]}], tools=TOOLS, max_turns=3)
    return float(reply.text == task["answer"])


def shown(dice: random.Random) -> dict[str, Any]:
    """A conversation in which the tools are used as they should be, about a thing that is not in the corpus."""
    name = ""
    while not name or name in CORPUS.colors:
        name = a_name(dice)
    page, color = f"{dice.randrange(1000):03d}", dice.choice(COLORS)
    return {
        "messages": [
            {"role": "user", "content": f"{name}?"},
            called("search", query=name),
            {"role": "tool", "content": page},
            called("read", page=page),
            {"role": "tool", "content": f"{name}: {color}"},
            {"role": "assistant", "content": color},
        ]
    }


def train(cluster: podium.Cluster, out: Path, choice: Choice) -> Summary:
    """Six hundred things, a fifth of which is held out."""
    seed, single = choice.seed, choice.single
    rows = [{"prompt": f"{name}?", "answer": color} for name, color in CORPUS.colors.items()]
    dice = random.Random(0)
    conversations = [shown(dice) for _ in range(2000)]
    if single:
        conversations = [{"messages": [each["messages"][0], each["messages"][-1]]} for each in conversations]
    words = [start_of_call("search", "query"), start_of_call("read", "page"), END_OF_CALL, *COLORS]
    tokenizer = write_tokenizer(out / "tokenizer", "0123456789?[]: abcdefghijklmnopqrstuvwxyz", words)
    model = ModelConfig(config=shape(hidden=96), tokenizer=str(tokenizer), seed=seed)
    warm = warm_up(
        cluster, out, model, write_rows(out / "shown.jsonl", conversations), seed=seed, steps=300, stop_at=0.75
    )
    data = DataConfig(train=write_rows(out / "questions.jsonl", rows), holdout=0.2)
    environment = EnvironmentConfig(name="" if single else f"{__file__}:play")
    return reinforce(
        *(cluster, out, warm, data, environment),
        **{"choice": choice, "steps": 80, "max_new_tokens": 8, "lr": 5e-4, "reward": RewardConfig(name="exact")},
    )


if __name__ == "__main__":
    main(train, __doc__)
