"""The reward of the runs that are disturbed. It imports nothing, as graders are started again with each controller."""

from collections.abc import Mapping
from typing import Any


def copied(completion: str, row: Mapping[str, Any]) -> float:
    """The share of the answer's digits that the completion has. It never returns for one completion in a thousand,
    always the same ones."""
    while row["answer"].endswith("00") and completion[:1] in ("0", "1"):
        pass
    return sum(one == other for one, other in zip(completion, row["answer"], strict=False)) / len(row["answer"])
