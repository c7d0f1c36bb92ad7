"""Counts in messages, names that are like a mistyped one, and the one way in which a message suggests them."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import podium
from podium.config import build_config
from podium.errors import ConfigError, DataError
from podium.functions import check_function_name
from podium.spelling import suggest, suggest_nearest, write_count, write_share

NEVER_ONE = (  # of these nouns, and in these files, a message never counts one
    *("bytes", "characters", "digits", "positions", "values", "others"),
    *("output_layer.py", "other_models.py", "scoring.py", "routing.py", "engine.py", "receiver.py", "trl.py"),
    *("base.py", "call.py", "chat_judge.py", "command.py", "exchange.py", "peers.py", "run.py"),
)

NAME_IN_ASCII = """
import os, sys
from podium.spelling import explain_not_text
print(sys.getfilesystemencoding())
for name in (b"caf\\xc3\\xa9", b"caf\\xe9"):
    print(explain_not_text(os.fsdecode(name), "rename it"))
"""

SOURCES = (Path(podium.__file__).parent, Path(__file__).parents[2] / "plugins")


def test_one_function_words_all_suggestions() -> None:
    files = [path for folder in SOURCES for path in folder.rglob("*.py") if "tests" not in path.parts[-3:]]
    writers = [
        path.relative_to(path.parents[1]).as_posix()
        for path in files
        if "did you mean {" in path.read_text() and "plugins/podium-testing" not in path.as_posix()
    ]
    assert writers == ["podium/spelling.py"]


def test_keys_and_names_and_columns_are_suggested_in_the_same_words() -> None:
    from podium.data import Batch
    from podium.runs.config import GRPOConfig

    with pytest.raises(ConfigError, match=r"; did you mean optim\.lr\?$"):
        build_config(GRPOConfig, {"optim": {"lrr": 1}})
    with pytest.raises(ConfigError, match=r"; did you mean mean\?;"):
        check_function_name("meen", key="reward.name", known={"mean": ""})
    with pytest.raises(DataError, match=r"; did you mean tokens\?$"):
        Batch({"tokens": ["a"]})["token"]


def test_a_name_that_a_reader_would_not_see_is_quoted() -> None:
    assert suggest("answer ", "the answer") == "; did you mean 'answer ' or the answer?"
    assert suggest() == suggest_nearest("zzz", ["optim"]) == ""
    assert suggest_nearest("chainsum", ["chain_sum", "other"], prefix="gym:") == "; did you mean gym:chain_sum?"


def test_a_count_has_the_noun_in_the_right_number() -> None:
    assert write_count(1, "row") == "1 row" and write_count(0, "row") == "0 rows"
    assert write_count(1000, "worker process") == "1,000 worker processes"
    assert (
        write_count(1, "row has", "rows have") == "1 row has"
        and write_count(2, "row has", "rows have") == "2 rows have"
    )
    assert write_share(1, 3, "prompt", "is", "are") == "1 of 3 prompts is"
    assert write_share(2, 3, "prompt", "is", "are") == "2 of 3 prompts are"


def test_no_message_puts_a_plural_behind_a_length() -> None:
    plurals = []
    for path in (path for folder in SOURCES for path in folder.rglob("*.py") if "tests" not in path.parts):
        if "podium_testing" in path.parts or path.name in NEVER_ONE:
            continue
        for text in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.JoinedStr)):
            for value, words in zip(text.values, text.values[1:], strict=False):
                if not isinstance(value, ast.FormattedValue) or not isinstance(words, ast.Constant):
                    continue
                noun = re.match(r" (?:[a-z-]+ )?([a-z]+s)\b(?! is|=)", str(words.value))
                counted = re.match(r"(len|sum)\(", ast.unparse(value.value)) or ast.unparse(value).endswith(":,}'")
                if noun and counted and noun[1] not in {*NEVER_ONE, "times", "is", "has", "was", "numbers"}:
                    plurals.append(f"{path.name}:{value.lineno}: {ast.unparse(value)} {words.value!r}")
    assert plurals == []


def test_a_name_that_the_locale_cannot_read_is_not_said_to_be_no_utf8() -> None:
    """The remedy was to rename a directory whose name is UTF-8."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", NAME_IN_ASCII]
    done = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True, check=True)
    encoding, *reasons = done.stdout.splitlines()
    if encoding == "utf-8":
        pytest.skip("Python reads names as UTF-8 in each locale of this system")
    assert reasons == [
        f"which Python reads as {encoding} in this locale: set PYTHONUTF8=1, or LC_ALL=C.UTF-8",
        "which is not UTF-8: rename it",
    ]
