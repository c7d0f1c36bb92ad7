"""One file with runs in it, which nothing in a run can turn against its reader."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium_view.export import export_page
from podium_view.page import page
from podium_view.run import Run
from tests.made_runs import HOSTILE, word_tokenizer, write_evaluations, write_run


def answers(html: str) -> dict[str, Any]:
    """What the file holds, read as the page reads it: up to the first end of the script element."""
    text = html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    return json.loads(gzip.decompress(base64.b64decode(json.loads(text)["answers"])))


def test_an_export_holds_the_answers_of_a_server(
    run_with_trouble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.html"
    assert main(["view", str(run_with_trouble), "--export", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.html"]
    exported, run = answers(file.read_text()), Run(run_with_trouble, "made")
    assert exported["0/steps"] == [1, 2, 3]
    for path in ("curves", "failures", "groups/2", "group/2/1/0", "slices/0/1/1", "timeline/0"):
        assert exported[f"0/{path}"] == json.loads(json.dumps(run.answer(path)))
    assert '"note": ""' in file.read_text()


def test_an_export_of_a_long_run_holds_ten_steps_and_says_so(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "long", steps=25, prompts=1), "long")
    html = export_page([run])
    steps = answers(html)["0/steps"]
    assert (len(steps), steps[0], steps[-1]) == (10, 1, 25)
    assert "the completions of 10 steps and two evaluations of each run at most" in html
    assert len(answers(html)["0/curves"]["steps"]["step"]) == 25


def test_nothing_of_a_run_is_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", text=HOSTILE, tokens=200, tokenizer=word_tokenizer())
    (run / "config.yaml").write_text(json.dumps({"data": {"train": HOSTILE}}))
    html = export_page([Run(run, "</title><script>alert(1)</script>")])
    assert html.count("<script") == 2
    assert html.count("</script") == 2
    assert "alert(1)" not in html.partition("</title>")[2]
    exported = answers(html)
    assert "<script>document" in exported["0/group/1/0/0"]["rows"][0]["text"]
    spelled = HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e").replace("\x07", r"\x07")
    assert exported["runs"][0]["data"] == spelled, "control characters are spelled out, and nothing is lost"


def test_no_two_scripts_declare_the_same_name() -> None:
    """They stand in one module, which a browser refuses whole where a name is declared twice."""
    script = page("x").partition('<script type="module">')[2].partition("</script>")[0]
    names = re.findall(r"^(?:async )?(?:function|const|class|let) (\w+)", script, re.MULTILINE)
    assert len(names) > 50
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_text_ends_the_element_that_holds_it() -> None:
    html = page("x", "</script><script>", "<!--</script>")
    assert html.count("<script") == 2
    assert "<!--" not in html


@pytest.mark.parametrize("packed", ["", "H4sI"])
def test_only_the_page_s_own_script_runs_and_nothing_is_asked_of_other_places(packed: str) -> None:
    html = page("x", packed)
    policy = re.search(r'content="(default-src [^"]*)"', html)
    assert policy is not None
    for kind, element in (("script-src", '<script type="module">'), ("style-src", "<style>")):
        text = html.partition(element)[2].partition(f"</{element[1:].split()[0].rstrip('>')}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert ("connect-src 'none'" if packed else "connect-src 'self'") in policy[1]
    outside = set(re.findall(r"https?://[^\s\"'`<)]+", html)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    assert not re.search(r"\binnerHTML\b|\bouterHTML\b|insertAdjacentHTML|document\.write|\beval\(|new Function", html)


def test_an_export_says_which_files_cannot_be_read(tmp_path: Path) -> None:
    """It left them out."""
    run = write_run(tmp_path / "run")
    write_evaluations(run, {0: ["0", "1"], 3: ["0", "1"]})
    for name in ("completions/step-000002.parquet", "evaluations/step-000003.parquet"):
        (run / name).write_bytes(b"no table")
    exported = answers(export_page([Run(run, "run")]))
    assert exported["0/steps"] == [1, 2, 3]
    for path, name in (("groups/2", "completions/step-000002"), ("evaluation/0/3", "evaluations/step-000003")):
        assert f"{name}.parquet cannot be read" in exported[f"0/{path}"]["error"]
    assert "groups" in exported["0/groups/3"]
