"""What settings of other projects are called in Podium, so that a key of theirs is answered with Podium's.

The answers are data: ``migration.yaml``, which is read when a key is unknown.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

__all__ = ["Equivalent", "find_equivalent", "read_equivalents"]


class Equivalent(NamedTuple):
    """The answer to a setting of another project.

    Attributes:
        key: The key that means the same. It is empty where no single key does.
        remark: A sentence on what differs. It is empty where nothing does.
        otherwise: The key in a configuration that lacks ``key``, such as that of supervised fine-tuning.
        missing: Whether Podium lacks what the setting does. ``key`` is empty then.
    """

    key: str = ""
    remark: str = ""
    otherwise: str = ""
    missing: bool = False


@cache
def read_equivalents() -> Mapping[str, Equivalent]:
    """Return the answers by the settings, each of which is a name or the end of a dotted path."""
    answers = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        name: Equivalent(answer) if isinstance(answer, str) else Equivalent(**answer)
        for name, answer in answers.items()
    }


def find_equivalent(path: str) -> Equivalent | None:
    """Return the answer to an unknown dotted ``path``: that of its longest known end. None where no end is known.

    >>> find_equivalent("actor_rollout_ref.rollout.n")
    Equivalent(key='sampling.n', remark='', otherwise='', missing=False)
    """
    names, answers = path.split("."), read_equivalents()
    ends = (".".join(names[start:]) for start in range(len(names)))
    return next((answers[end] for end in ends if end in answers), None)
