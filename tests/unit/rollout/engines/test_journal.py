"""The journal of completions in flight, and engines that go on where another one was lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from podium.rollout.engines import EngineConfig, Event, journal as journals, make_engine
from podium.rollout.engines.journal import Drawn, Journal, read_journal, read_journals
from podium.rollout.sampling import SamplingParams
from podium_testing.engines import cut

from .conftest import MakeModel


def drawn(first: int, last: int, kept: bool = False) -> Drawn:
    tokens = list(range(first, last))
    return Drawn(
        tokens, [-token / 4 for token in tokens], [3] * len(tokens), [[t, 0] for t in tokens] if kept else None
    )


def test_what_is_added_is_read_and_nothing_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    journal.add(5, drawn(0, 3))
    journal.add(6, drawn(0, 2, kept=True))
    journal.add(5, drawn(0, 7))
    journal.add(5, drawn(4, 7), at=4)
    journal.add(5, drawn(4, 9), at=4)
    journal.add(7, drawn(4, 9), at=4)  # its first tokens are missing, so it does not count
    journal.flush()
    assert read_journal(journal.path) == {5: drawn(0, 9), 6: drawn(0, 2, kept=True)}


def test_a_completion_that_begins_anew_is_not_mixed_with_the_one_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    journal.add(5, drawn(0, 9))
    journal.begin(5)
    journal.add(5, drawn(20, 23))
    journal.begin(6, drawn(3, 5))
    journal.add(6, drawn(5, 8), at=2)
    journal.flush()
    assert read_journal(journal.path) == {5: drawn(20, 23), 6: drawn(3, 8)}


def test_the_ranks_of_a_group_have_a_file_each(tmp_path: Path) -> None:
    for seed, name in enumerate(("a.jsonl", "a.jsonl.1", "a.jsonl.12", "b.jsonl")):
        journal = Journal(tmp_path / name)
        journal.add(seed, drawn(0, 3))
        journal.flush()
    assert {*read_journals(str(tmp_path / "a.jsonl"))} == {0, 1, 2}


def test_half_a_line_and_foreign_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    journal = Journal(path)
    journal.add(5, drawn(0, 3))
    journal.flush()
    whole = path.read_bytes()
    for more in (whole[:20], b"[1]\n", b'{"seed": 5, "at": 3, "ids": [1, 2], "logprobs": [], "versions": []}\n'):
        path.write_bytes(whole + more)
        assert read_journal(path) == {5: drawn(0, 3)}
    assert read_journal(tmp_path / "none") == {}


def test_a_long_file_loses_what_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_MOST_BYTES", 100)
    monkeypatch.setattr(journals, "_KEEP_S", 0.0)
    journal = Journal(tmp_path / "a.jsonl")
    for seed in (1, 2):
        journal.add(seed, drawn(0, 9))
    journal.finished([1])
    journal.flush()
    journal.add(2, drawn(0, 12))
    journal.flush()
    assert read_journal(journal.path) == {2: drawn(0, 12)}


def test_a_disk_that_refuses_ends_the_journal_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "none" / "a.jsonl")
    for _ in range(2):
        journal.add(1, drawn(0, 3))
        journal.flush()
    (record,) = caplog.records
    assert "if a worker is lost, its completions are generated again from the start" in record.message


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["native", "transformers"])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"temperature": 0.0}], ids=str)
def test_another_engine_draws_the_same_next_tokens(
    name: str, sampling: dict[str, float], make_model: MakeModel, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_new_tokens=10, stop_token_ids=(1, 2, 3), **sampling)  # pyright: ignore[reportArgumentType]
    first = make_engine(EngineConfig(name=name), make_model("qwen3"))
    whole = [Drawn.of(one) for one in first.generate(prompts, params, range(10))]
    begun = {seed: cut(one, seed) for seed, one in enumerate(whole) if seed}
    second = make_engine(EngineConfig(name=name), make_model("qwen3"))
    for one, expected in zip(second.generate(prompts, params, range(10), begun=begun), whole, strict=True):
        mine = Drawn.of(one)
        assert (mine.token_ids, mine.kept) == (expected.token_ids, expected.kept)
        assert mine.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_what_was_drawn_for_another_prompt_is_not_continued(tmp_path: Path, make_model: MakeModel) -> None:
    params = SamplingParams(max_new_tokens=6)
    engine = make_engine(EngineConfig(name="native"), make_model("qwen3"))
    first, second = Journal(tmp_path / "a.jsonl"), Journal(tmp_path / "b.jsonl")
    engine.generate([[3, 4, 5]], params, [7], first)
    begun = read_journal(first.path)
    expected = Drawn.of(engine.generate([[6, 4]], params, [7])[0])
    assert expected != begun[7]
    assert Drawn.of(engine.generate([[6, 4]], params, [7], second, begun)[0]) == expected
    assert Drawn.of(engine.generate([[3, 4, 5]], params, [7], second, begun)[0]) == begun[7]


def test_what_another_engine_had_drawn_is_in_the_next_journal_at_once(tmp_path: Path, make_model: MakeModel) -> None:
    params = SamplingParams(max_new_tokens=9)
    engine = make_engine(EngineConfig(name="native"), make_model("qwen3"))
    begun = {7: cut(Drawn.of(engine.generate([[3, 4, 5]], params, [7])[0]), 4)}
    journal = Journal(tmp_path / "a.jsonl")
    seen: list[int] = []
    advance = engine.advance

    def advance_seen(interrupted: Callable[[], bool]) -> list[Event]:
        seen.append(len(read_journal(journal.path)[7]))
        return advance(interrupted)

    engine.advance = advance_seen
    engine.generate([[3, 4, 5]], params, [7], journal, begun)
    assert seen[0] == 4


def test_two_ranks_shorten_their_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_MOST_BYTES", 100)
    made: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda own, to: made.append(own.name) or replace(own, to))
    for name in ("a.jsonl", "a.jsonl.1", "a.jsonl.2"):
        journal = Journal(tmp_path / name)
        journal.add(1, drawn(0, 40))
        journal.flush()
    assert len(made) == len({*made}) == 3


def test_a_journal_that_the_disk_refuses_keeps_nothing_in_memory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "none" / "a.jsonl")
    for seed in range(9):
        journal.begin(seed)
        journal.add(seed, drawn(0, 3))
        journal.flush()
        journal.finished([seed])
    assert not any(vars(journal)[name] for name in ("_lengths", "_prompt_sums", "_done", "_lines"))


def test_the_native_engine_writes_while_it_draws(
    tmp_path: Path, make_model: MakeModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.rollout.engines.base.REPORT_EVERY_S", 0.0)
    engine = make_engine(EngineConfig(name="native"), make_model("qwen3"))
    path, params = tmp_path / "a.jsonl", SamplingParams(max_new_tokens=40)
    journal = Journal(path)
    seen: list[int] = []

    def look() -> None:
        while not stop.wait(0.001):
            seen.append(sum(map(len, read_journal(path).values())))

    stop = threading.Event()
    looking = threading.Thread(target=look)
    looking.start()
    whole = engine.generate(prompts, params, range(10), journal)
    stop.set()
    looking.join()
    assert len({*seen}) > 5, "the file grows while completions are drawn"
    assert {seed: len(one) for seed, one in read_journal(path).items()} == dict.fromkeys(range(10), 40)
    assert read_journal(path) == {seed: Drawn.of(one) for seed, one in enumerate(whole)}
    assert all(json.loads(line)["seed"] in range(10) for line in path.read_text().splitlines())
