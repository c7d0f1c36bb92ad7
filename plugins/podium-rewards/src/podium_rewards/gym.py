"""The scorers of reasoning-gym's own tasks, some of which give partial credit."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from podium.errors import ConfigError
from podium.extras import install_command
from podium.rewards.columns import reads
from podium.rewards.stop_texts import close_match

try:
    import reasoning_gym as gym
except ImportError as error:
    raise ConfigError(
        f"reward.name = 'reasoning_gym' needs reasoning-gym, which cannot be imported ({error}): "
        f"{install_command('tasks')} (pycosat, which it needs, is built by a C compiler)"
    ) from error

__all__ = ["reasoning_gym"]

_TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@lru_cache(maxsize=32)
def _dataset(task: str, options: str) -> Any:
    return gym.create_dataset(task, **json.loads(options))


@reads("metadata")
def reasoning_gym(completion: str, row: Mapping[str, Any], stop_text: str = "") -> float:
    """Return the task's own score for the last ``<answer>…</answer>``, or for the whole text if it has none.

    The text that ended the completion may be the closing tag.
    The row comes from ``reasoning_gym:TASK``: its "metadata" names the task, its "task_options" are the task's options.
    """
    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
        raise ValueError("the row is not of a reasoning_gym task (no metadata.source_dataset); use another reward")
    tagged = _TAGGED.findall(close_match(_TAGGED, completion, stop_text))
    answer = (tagged[-1] if tagged else completion).strip()
    options = json.dumps(row.get("task_options") or {}, sort_keys=True)
    return float(_dataset(metadata["source_dataset"], options).score_answer(answer, dict(row)))
