"""Stop texts, which a completion is graded without, put back where they close what a reward reads."""

import re


def close_match(pattern: re.Pattern[str], completion: str, stop_text: str) -> str:
    """Return a completion with the part of its stop text that closes a match of ``pattern``.

    A stop text that closes no match is left out.

    >>> close_match(re.compile("<a>.*?</a>"), "is <a>4", "</a> Next")
    'is <a>4</a>'
    """
    if not stop_text:
        return completion
    matches = pattern.finditer(completion + stop_text)
    ends = [match.end() for match in matches if match.start() < len(completion) < match.end()]
    return (completion + stop_text)[: ends[0]] if ends else completion
