"""The page of ``podium view`` in a real browser: what it shows, what it asks for, and what cannot happen."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium_view.export import export_page
from podium_view.run import Run
from podium_view.server import ViewServer
from tests.chromium import CHROMIUM, Chromium
from tests.made_runs import HOSTILE, word_tokenizer, write_evaluations, write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

NAMES = "[...document.querySelectorAll({!r})].map((one) => one.textContent)"
REBOUND = "evil.example"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    write_run(folder / "first", steps=6, prompts=3, n=4, trouble=True)
    write_run(folder / "hostile", text=HOSTILE, tokens=200, tokenizer=word_tokenizer(), seed=1)
    write_run(folder / "sessions", tokens=30, tokenizer=word_tokenizer(), sessions=True)
    write_evaluations(folder / "first", {0: ["0", "0", "0", None], 3: ["0"] * 4, 6: [HOSTILE, "1", "2", "3"]})
    write_evaluations(folder / "first", {6: ["1"]}, name="other")
    for step, rewards in {0: [None, 0.5, 0.5], 6: [0.5, None, 0.75]}.items():
        path = folder / "first" / "evaluations" / "set=unscored" / f"step-{step:06d}.parquet"
        path.parent.mkdir(exist_ok=True)
        columns = {"group": [0, 1, 2], "prompt": ["a", "b", "c"], "completion": ["d", "e", "f"], "reward": rewards}
        pq.write_table(pa.table(columns), path)
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[ViewServer]:
    with ViewServer([Run(runs / name, name) for name in ("first", "hostile", "sessions")]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium(flags=[f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"]) as browser:
        yield browser


@pytest.fixture
def page(browser: Chromium, server: ViewServer) -> Iterator[Chromium]:
    browser.requests.clear()
    browser.complaints.clear()
    browser.call("Page.navigate", url="about:blank")
    browser.open(server.url)
    yield browser
    assert browser.complaints == []
    outside = [url for url in browser.requests if not url.startswith((server.url, "data:", "about:"))]
    assert outside == []


def test_curves_of_several_runs(page: Chromium) -> None:
    titles = page.run(NAMES.format(".chart .title"))
    assert titles[:2] == ["Mean reward", "Correct completions"]
    assert "Entropy" in titles
    assert page.run("document.querySelectorAll('.chart .line').length") >= 2 * len(titles) - 2
    assert "policy/kl_coef" in page.run("document.querySelector('.constants').textContent")
    page.run("document.querySelector('.runs button').click()")  # hides the first of three runs
    assert page.run("document.querySelectorAll('.chart')[0].querySelectorAll('.line').length") == 2
    page.run("document.querySelector('.runs button').click()")


def test_a_curve_is_read_by_the_keyboard_and_opens_its_step(page: Chromium) -> None:
    page.run("document.querySelector('.plot').focus()")
    for _ in range(3):
        page.key("ArrowLeft")
    assert "at step 4" in page.run("document.querySelector('.readout').textContent")
    smooth = "document.querySelector('input[type=range]')"
    page.run(f"{smooth}.value = 90; {smooth}.dispatchEvent(new Event('input'))")
    assert page.run("document.querySelectorAll('.raw').length") > 2
    page.run("document.querySelector('.plot').focus()")
    for _ in range(3):
        page.key("ArrowLeft")
    assert re.search("at step 4 smoothed 0\\.\\d+", page.run("document.querySelector('.readout').textContent"))
    page.run("delete document.body.dataset.ready")
    page.key("Enter")
    page.wait("document.body.dataset.ready === 'completions'")
    assert page.run("location.hash") == "#completions/0/4"
    assert page.run("document.querySelector('input[type=number]').value") == "4"


def test_completions_of_a_group_with_coloured_tokens(page: Chromium, runs: Path) -> None:
    page.show("completions/0/2/1")
    rows = Run(runs / "first", "").answer("group/2/1/0")["rows"]
    shown = [text.replace("▪", "").replace("↵", "") for text in page.run(NAMES.format(".card .text"))]
    assert shown == [row["text"] for row in rows]
    for coloring in ("advantage", "mismatch", "version", "kept"):
        chosen = "[...document.querySelectorAll('select')].at(-1)"
        page.run(f"(() => {{ const s = {chosen}; s.value = '{coloring}'; s.dispatchEvent(new Event('change')); }})()")
        colors = page.run(
            "new Set([...document.querySelectorAll('.token')].map((one) => one.style.backgroundColor)).size"
        )
        assert colors > 1, coloring
        assert page.run("document.querySelectorAll('.legend .step').length") >= 2
    assert page.run(NAMES.format(".group .prompt")) == [f"Explain, in step 2, question {n}." for n in range(3)]
    page.run("document.querySelector('.card .text').focus()")
    page.key("ArrowRight")
    page.key("ArrowRight")
    facts = page.run("document.querySelector('.tokenfacts').textContent")
    assert f"token 2 of {len(rows[0]['tokens'])}" in facts
    assert all(word in facts for word in ("advantage", "mismatch", "nats", "version", "kept set"))
    page.run("document.querySelector('.groups').focus()")
    page.key("ArrowDown")
    page.wait("location.hash === '#completions/0/2/2'")
    page.wait("document.querySelector('.group.chosen').dataset.group === '2'")


def test_a_session_is_shown_turn_by_turn(page: Chromium, runs: Path) -> None:
    page.show("completions/2/2/1")
    row = Run(runs / "sessions", "").answer("group/2/1/0")["rows"][0]
    card = "document.querySelectorAll('.card')[0]"
    assert "session 2, agent critic, 2 turns" in page.run(f"{card}.querySelector('.facts').textContent")
    text = page.run(f"[...{card}.querySelectorAll('.text .token')].map((one) => one.textContent).join('')")
    assert text.replace("▪", "").replace("↵", "") == row["text"]
    first, second = page.run(f"[...{card}.querySelectorAll('.read')].map((one) => one.textContent)")
    assert first.endswith(row["turns"][0]["read"])
    assert second == row["turns"][1]["read"]
    assert page.run(f"{card}.querySelector('details').open") is False
    assert page.run(f"{card}.querySelector('.text .pill').textContent") == "turn's reward +0.5"
    page.run(f"{card}.querySelector('.text').focus()")
    for _ in range(row["turns"][0]["tokens"] + 1):
        page.key("ArrowRight")
    facts = page.run("document.querySelector('.tokenfacts').textContent")
    assert f"token {row['turns'][0]['tokens'] + 1} of {len(row['tokens'])}" in facts


def test_a_hostile_completion_is_shown_and_does_nothing(page: Chromium) -> None:
    page.show("completions/1/1/0")
    shown = page.run("document.querySelector('.detail').textContent")
    assert "<script>document.title='hacked'</script>" in shown
    assert "\\x1b" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert page.run("document.querySelectorAll('.detail script, .detail img').length") == 0
    assert "hacked" not in page.run("document.title")


def test_the_timeline_says_who_waits_for_whom(page: Chromium) -> None:
    page.show("timeline/0/0/3")
    rows = page.run("[...document.querySelectorAll('.waits tbody tr')].map((row) => row.innerText)")
    assert [row.split("\t")[0].strip() for row in rows] == ["policy 0", "policy 1", "generator 0", "generator 1"]
    assert "while generator: generate runs" in rows[0]
    assert "while policy: update runs" in rows[2]
    pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
    assert page.run(f"(() => {{ const c = document.querySelector('canvas'); return new Set({pixels}).size; }})()") > 20
    heading = page.run("document.querySelector('.waits h2').textContent")
    page.run("document.querySelector('canvas').focus()")
    page.key("+")
    assert page.run("document.querySelector('.waits h2').textContent") != heading
    facts: list[str] = []
    for name in ("n", "n", "p"):
        page.key(name)
        facts.append(page.run("document.querySelector('.tokenfacts').textContent"))
    assert facts[0] == facts[2] != facts[1]
    assert "took" in facts[0]


def test_answers_of_two_evaluations_stand_side_by_side(page: Chromium) -> None:
    page.show("evaluations/0")
    page.wait("document.querySelectorAll('.beside .card').length === 2")
    assert page.run(NAMES.format(".group .pill, .group .facts .quiet")) == [
        "✓ → ✗",
        "✗ → ✓",
        "✗ → ✓",
        "\N{EN DASH} → ✓",
    ]
    assert "10 % → 80 %" in page.run("document.querySelector('.bar').textContent")
    before, after = page.run(NAMES.format(".beside .card"))
    assert before.startswith("step 0✓ correct")
    assert "<script>document.title='hacked'</script>" in after
    assert "hacked" not in page.run("document.title")
    page.run("document.querySelector('.groups').focus()")
    for _ in range(3):
        page.key("ArrowDown")
    page.wait("document.querySelector('.beside .card').textContent.includes('did not evaluate this prompt')")
    page.show("evaluations/0/0/3/6")
    assert page.run(NAMES.format(".beside .facts b"))[::2] == ["step 3", "step 6"]
    shown = "[...document.querySelectorAll('select')].at(-1)"
    page.run(f"(() => {{ const s = {shown}; s.value = 'worse'; s.dispatchEvent(new Event('change')); }})()")
    assert page.run("document.querySelectorAll('.group').length") == 1
    page.show("evaluations/0/1")
    assert page.run("document.querySelectorAll('.group').length") == 0
    page.show("evaluations/1")
    assert "no evaluations yet" in page.run("document.querySelector('main').textContent")


def test_prompts_that_the_reward_left_out_once_are_neither_better_nor_worse(page: Chromium) -> None:
    page.show("evaluations/0/2")
    page.wait("document.querySelectorAll('.group').length === 3")
    kinds = page.run("[...[...document.querySelectorAll('select')].at(-1).options].map((one) => one.textContent)")
    assert kinds == ["all 3", "worse (0)", "better (1)", "as good (2)"]


def test_settings_in_which_runs_differ_come_first(page: Chromium) -> None:
    page.show("settings")
    assert page.run(NAMES.format(".settings h2"))[0] == "Differences"
    differing = page.run("[...document.querySelectorAll('.differences tbody tr')].map((row) => row.innerText)")
    assert differing == ["run.steps\t6\t3\t3"]
    search = "document.querySelector('input[type=search]')"
    page.run(f"{search}.value = 'copy.jsonl'; {search}.dispatchEvent(new Event('input'))")
    assert page.run(NAMES.format(".settings tbody th")) == ["data.train"]


def test_failures_lead_to_their_places(page: Chromium) -> None:
    page.show("failures/0")
    headings = page.run(NAMES.format(".failures h2"))
    assert headings[:3] == ["Lost workers (1)", "Stalls (1)", "Failed calls (1)"]
    assert "<b>number</b>" in page.run("document.querySelector('main').textContent")
    page.run("delete document.body.dataset.ready; document.querySelector('.failures a[href^=\"#timeline\"]').click()")
    page.wait("document.body.dataset.ready === 'timeline'")
    page.show("failures/1")
    assert "Nothing has failed." in page.run("document.querySelector('main').textContent")


def test_a_name_that_was_bound_anew_reads_nothing(browser: Chromium, server: ViewServer) -> None:
    browser.call("Page.navigate", url=server.url.replace("127.0.0.1", REBOUND))
    assert "answers only to 127.0.0.1" in browser.wait("document.body?.innerText")
    # Another page of the same browser, which knows even the key.
    request = f"fetch({json.dumps(server.url + 'runs')}).then((found) => found.text(), () => 'refused')"
    assert browser.run(request) == "refused"
    browser.complaints.clear()


def test_a_run_that_goes_on_is_followed(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, finished=False)
    more = write_run(tmp_path / "more", steps=5)
    command = [sys.executable, "-m", "podium", "view", str(run)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)  # else a failure below would wait for it
        assert process.stdout is not None
        browser.call("Page.navigate", url="about:blank")
        browser.open(process.stdout.readline().split()[-1])
        header = browser.run("document.querySelector('.run').textContent")
        assert "step 2" in header
        assert "unfinished" in header
        browser.wait("performance.getEntriesByType('resource').some((one) => one.name.endsWith('/state'))")
        for name in ("metrics.jsonl", "completions", "summary.json"):
            _replace(more / name, run / name)
        browser.wait("document.querySelector('.run').textContent.includes('step 5')")
        browser.wait("document.querySelector('.run .state').textContent === 'finished'")
        browser.show("completions")
        assert browser.run("document.querySelector('.stepper').textContent.includes('of 5')")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    browser.wait("document.querySelector('.notice').textContent.includes('Start it again')")
    browser.complaints.clear()


def _replace(new: Path, old: Path) -> None:
    if old.is_dir():
        shutil.rmtree(old)
    new.rename(old)


def test_an_export_opens_from_the_disk_without_any_request(browser: Chromium, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(export_page([Run(runs / name, name) for name in ("first", "hostile", "sessions")]))
    browser.call("Page.navigate", url="about:blank")
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(file.as_uri())
    assert browser.run("document.querySelectorAll('.chart').length") > 3
    pages = ("evaluations/0", "evaluations/0/1", "settings")
    for address in ("completions/0/2/1", "timeline/0/0/1", "failures/0", "completions/1/1/0", *pages):
        browser.show(address)
        assert browser.run("document.querySelector('.problem')?.textContent ?? ''") == "", address
    assert "hacked" not in browser.run("document.title")
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("data:", "about:", file.as_uri()))] == []


@pytest.mark.exhaustive
def test_a_run_of_ten_thousand_completions_opens(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, prompts=625, n=8, tokens=64)
    with ViewServer([Run(run, "run")]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        browser.call("Page.navigate", url="about:blank")
        browser.open(server.url)
        browser.show("completions/0/2/600")
        assert browser.run("document.querySelectorAll('.group').length") == 625
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("width", [*(pytest.param(width, marks=pytest.mark.exhaustive) for width in (1280, 700)), 390])
def test_nothing_is_wider_than_the_window(server: ViewServer, width: int) -> None:
    with Chromium(width=width, dark=width == 700) as browser:
        browser.open(server.url)
        for address in ("curves", "completions/0/2/1", "evaluations/0", "timeline/0/0/2", "failures/0", "settings"):
            browser.show(address)
            assert browser.run("document.documentElement.scrollWidth") <= width, address
