"""Training again on completions that a run has recorded: to the last bit, by another loss, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from podium.algorithms import AdvantageInputs, AdvantageOutputs, AlgorithmConfig, Declaration, group_statistics
from podium.cli import main
from podium.errors import ConfigError
from podium.runs.ledger import read_ledger
from podium.runs.run_reader import RunRecord
from podium.telemetry import Note, metrics, subscribe
from podium.trainer import GRPOConfig, load_config
from tests.integration.training import losses, metrics_rows, tiny, train

MODEL_FILE = "model/model.safetensors"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    algorithm = {"minibatches": 2, "correction": "truncate"}
    return train(tiny(GRPOConfig, folder, run={"steps": 3}, eval={"items": 0}, algorithm=algorithm))


@Declaration(data=("source",))
def by_source(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """An estimator that reads a column of the data, which no run records."""
    raise NotImplementedError


def replay_of(run: Path, folder: Path, *words: str) -> GRPOConfig:
    options = ["--engine.name", "replay", "--engine.options", json.dumps({"run": str(run)})]
    return load_config(GRPOConfig, run / "config.yaml", ["--run.dir", str(folder), *options, *words])


def test_a_replay_has_the_same_losses_and_weights_to_the_last_bit(tmp_path: Path, recorded: Path) -> None:
    run = train(replay_of(recorded, tmp_path))
    assert losses(run) == losses(recorded)
    norms = [[row[metrics.GRAD_NORM] for row in metrics_rows(path)] for path in (run, recorded)]
    assert norms[0] == norms[1]
    assert (run / MODEL_FILE).read_bytes() == (recorded / MODEL_FILE).read_bytes()
    tables = [pq.read_table(path / "completions/step-000002.parquet").to_pydict() for path in (run, recorded)]
    assert tables[0] == tables[1]
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 12}
    again = train(replay_of(run, tmp_path / "again"))  # a replay is recorded as any run
    assert (again / MODEL_FILE).read_bytes() == (recorded / MODEL_FILE).read_bytes()


@pytest.mark.parametrize("logs", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_numbers_that_a_reward_only_logs_are_not_learned(tmp_path: Path, logs: bool) -> None:
    """GDPO learns all parts of a reward, and not a figure of log_metric, in a replay neither."""
    (tmp_path / "logging.py").write_text(
        "def vowels(completion, log_metric):\n"
        f"    if {logs}:\n        log_metric('length', len(completion))\n"
        "    return float(sum(map(ord, completion)) % 2)\n\n\n"
        "def digits(completion):\n    return {'score': float(sum(map(ord, completion)) % 3)}\n"
    )
    names = [f"{tmp_path}/logging.py:{name}" for name in ("vowels", "digits")]
    algorithm = {"advantage": "gdpo"}
    said = list[str]()
    unsubscribe = subscribe(lambda event: said.append(event.text) if isinstance(event, Note) else None)
    run = train(tiny(GRPOConfig, tmp_path, reward={"name": names}, eval={"items": 0}, algorithm=algorithm))
    unsubscribe()
    assert (
        sum("'gdpo' learns the parts digits, vowels of the reward, each with the weight 1" in text for text in said)
        == 1
    )
    assert ("reward_parts/length" in metrics_rows(run)[0]) is logs
    table = pq.read_table(run / "completions/step-000001.parquet").to_pydict()
    parts = {}
    for name in ("vowels", "digits"):
        column = torch.tensor(table[f"reward_{name}"])
        stats = group_statistics(column, torch.tensor(table["group"]))
        apart = (column - stats.mean_G[stats.index_B]) / (stats.std_G[stats.index_B] + 1e-6)
        parts[name] = torch.where(stats.flat_G[stats.index_B], 0.0, apart)
    total = parts["vowels"] + parts["digits"]
    expected = (total - total.mean()) / total.std()
    torch.testing.assert_close(torch.tensor(table["advantage"]), expected, rtol=1e-4, atol=1e-4, check_dtype=False)
    again = train(replay_of(run, tmp_path / "again"))
    assert (again / MODEL_FILE).read_bytes() == (run / MODEL_FILE).read_bytes()


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "={% for m in messages %}{{ m['content'] }}{% endfor %}",
    ],
    ids=["plain", "same", "opened"],
)
@pytest.mark.parametrize(
    "loss", [{"ppo_clip": 1.0, "cross_entropy": 0.5}, {"ppo_clip": 1.0, "reinforce": 0.5}], ids=["answers", "samples"]
)
def test_answers_are_learned_again_or_refused(tmp_path: Path, loss: dict[str, float], template: str) -> None:
    """A chat template has written the recorded prompt, and would write it again as a message."""
    (tmp_path / "chat.jinja").write_text(template)
    data = {"chat_template": str(tmp_path / "chat.jinja")} if template else {}
    sections: dict[str, Any] = {"algorithm": {"loss": loss}, "data": data, "eval": {"items": 0}}
    run = train(tiny(GRPOConfig, tmp_path, **sections))
    if template and "cross_entropy" in loss:
        with pytest.raises(ConfigError, match=r"algorithm\.loss = .*engine\.name = 'replay'.*: drop cross_entropy"):
            train(replay_of(run, tmp_path / "again"))
        return
    again = train(replay_of(run, tmp_path / "again"))
    assert (again / MODEL_FILE).read_bytes() == (run / MODEL_FILE).read_bytes()


def test_a_replay_that_was_stopped_goes_on_bit_by_bit(tmp_path: Path, recorded: Path) -> None:
    run = train(replay_of(recorded, tmp_path, "--run.steps", "1"))
    train(load_config(GRPOConfig, run / "config.yaml", ["--run.resume", str(run), "--run.steps", "3"]))
    assert (run / MODEL_FILE).read_bytes() == (recorded / MODEL_FILE).read_bytes()


def test_another_loss_trains_what_was_recorded(tmp_path: Path, recorded: Path, capsys: Any) -> None:
    """From the command line, which also says that the run is a replay, as the list of runs does."""
    words = ["--run.dir", str(tmp_path / "runs"), "--run.name", "other", "--algorithm.loss", "cispo"]
    assert main(["train", "grpo", "--replay", str(recorded), *words, "--backend", "inline"]) == 0
    assert re.search(rf"replay of +{recorded}", capsys.readouterr().out)
    run = tmp_path / "runs/other"
    assert losses(run) != losses(recorded)
    assert [row["reward/mean"] for row in metrics_rows(run)] == [row["reward/mean"] for row in metrics_rows(recorded)]
    assert main(["runs", str(run)]) == 0
    assert f"replay of {recorded}" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "runs"), str(recorded)]) == 0
    assert f"{run} (replay)" in capsys.readouterr().out
    assert RunRecord(run).replay_of == str(recorded)
    assert main(["eval", str(run), "--eval.items", "2", "--backend", "inline"]) == 0, "it samples by an engine again"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--run.steps", "4"], r"run\.steps = 4, and .* has not recorded step 4.*set run\.steps to 3"),
        (["--sampling.temperature", "0.5"], r"cannot change how that was made:\s+sampling\.temperature = 0\.5, and"),
        (["--reward.name", "exact"], r"cannot change how that was made:\s+reward\.name = 'exact'"),
        (
            ["--algorithm.advantage", "remax"],
            r"a\s+greedy\s+completion:\s+none\s+is\s+recorded",
        ),
        (["--eval.items", "4"], r"eval\.items = 4 with engine\.name = 'replay', which has no generator"),
        (["--engine.options", "{run: nowhere}"], r"nowhere"),
        (
            ["--algorithm.advantage", "tests.integration.test_replay:by_source"],
            r"reads the column .source. of the",
        ),
    ],
)
def test_what_was_not_recorded_is_refused_before_the_start(
    tmp_path: Path, recorded: Path, words: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        train(replay_of(recorded, tmp_path, *words))
    assert not (tmp_path / "run").exists() or not RunRecord(tmp_path / "run").has_results


@pytest.mark.parametrize(
    ("column", "complaint"),
    [
        ("token_logprobs", "has no column"),
        (
            "token_kept",
            r"cannot be replayed; it has tokens .*: replay a run .* sampling\.top_p 1$",
        ),
    ],
)
def test_columns_that_are_not_there_are_named(tmp_path: Path, recorded: Path, column: str, complaint: str) -> None:
    run = shutil.copytree(recorded, tmp_path / "copy")
    file = run / "completions/step-000002.parquet"
    table = pq.read_table(file)
    kept = column in table.column_names
    table = table.drop_columns([column]) if kept else table.append_column(column, table["token_versions"])
    pq.write_table(table, file)
    with pytest.raises(ConfigError, match=rf"step-000002\.parquet .*{complaint}"):
        train(replay_of(run, tmp_path))
