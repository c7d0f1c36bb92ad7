"""A dry run reads the data as the run would: it shows the first example, and refuses what the run would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, DataError
from podium.trainer import GRPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from podium_dryrun import describe_data
from podium_preferences import DPOConfig, PreferenceTrainer
from tests.integration.training import metrics_rows, tiny


def test_the_first_prompt_is_shown_as_the_model_reads_it(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, data={"holdout": 0.0, "eval": str(tmp_path / "copy.jsonl")})
    said = describe_data(PPOTrainer(config, cluster="inline").read_data)
    assert "training     60 prompts of 3 tokens each\n" in said
    assert "epochs       2 steps x 4 prompts = 8 of 60 = 0.133 epochs\n" in said
    assert "most tokens  96 a step: 48 sampled, 48 of prompts\n" in said
    assert "held-out     4 prompts" in said
    assert "copy.jsonl, line 1: prompt 'prompt', answer 'answer' number 0" in " ".join(said.split())
    assert "number 0     3 tokens, as the model reads them:\n             00=\ntokens       '0' '0' '='\n" in said
    assert said.endswith("answer       '00'")
    assert not (tmp_path / "runs").exists()


def test_of_an_example_what_is_learned_is_shown(tmp_path: Path) -> None:
    said = describe_data(SFTTrainer(tiny(SFTConfig, tmp_path), cluster="inline").read_data)
    assert "most tokens  48 a step\n" in said, "8 examples of 6 tokens"
    assert "to learn     3 of these tokens:\n             01<eos>\ntokens       '0' '1' '<eos>'" in said


def test_the_dry_run_says_which_columns_are_prompt_and_answer(tmp_path: Path) -> None:
    (tmp_path / "verl.jsonl").write_text(
        json.dumps({"prompt": "1=", "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 0}}) + "\n"
    )
    config = tiny(GRPOConfig, tmp_path, data={"train": str(tmp_path / "verl.jsonl"), "holdout": 0.0}, eval={"items": 0})
    said = " ".join(describe_data(PPOTrainer(config, cluster="inline").read_data).split())
    assert "verl.jsonl: the answers of 1 row are those in reward_model.ground_truth" in said
    read = "prompt 'prompt', answer 'reward_model.ground_truth'; not read: 'extra_info'"
    assert f"verl.jsonl, line 1: {read}" in said


def test_how_many_prompts_are_too_long_is_said(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, data={"max_prompt_tokens": 3, "holdout": 0.0}, eval={"items": 0})
    with (tmp_path / "copy.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "0 1 2 3 4 5=", "answer": "0"}) + "\n")
    said = describe_data(PPOTrainer(config, cluster="inline").read_data)
    assert "data.max_prompt_tokens = 3: 1 dropped, 0 cut, of 61 (1.6%)" in said
    assert "the longest is" not in said


@pytest.mark.parametrize(
    ("rows", "sections", "error", "message"),
    [
        ([{"question": "1=", "answer": "1"}], {}, DataError, r"copy\.jsonl, line 1: no column 'prompt' for the prompt"),
        ([], {}, DataError, r"copy\.jsonl.*(holds no|is empty)"),
        (
            [{"prompt": "0=" * 40, "answer": "0"}] * 9,
            {},
            ConfigError,
            "longest .* line 1, has 80 tokens",
        ),
    ],
)
def test_what_the_run_would_refuse_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], sections: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = tiny(GRPOConfig, tmp_path, data={"holdout": 0.0, "eval": str(tmp_path / "copy.jsonl")}, **sections)
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(error, match=message):
        describe_data(PPOTrainer(config, cluster="inline").read_data)


def test_a_run_of_epochs_has_as_many_steps_as_its_data_need(tmp_path: Path) -> None:
    """48 or so of 60 examples, 8 a step. A resume goes on to the same step, and to a later one by run.steps."""
    config = tiny(SFTConfig, tmp_path, run={"epochs": 0.5, "steps": 100}, eval={"items": 0}, save={"every": 1})
    trainer = SFTTrainer(config, cluster="inline", show=False)
    summary = trainer.fit()
    assert summary.finished
    assert summary.steps == -(-len(trainer.run.data.stream) // 16) == len(metrics_rows(tmp_path / "runs/run"))
    written = (tmp_path / "runs/run/config.yaml").read_text()
    assert f"steps: {summary.steps}\n  epochs: null" in written
    again = tiny(SFTConfig, tmp_path, run={"epochs": 0.75, "resume": str(tmp_path / "runs/run")}, eval={"items": 0})
    later = SFTTrainer(again, cluster="inline", show=False).fit()
    assert later.steps == -(-3 * len(trainer.run.data.stream) // 32) > summary.steps
    fewer = tiny(SFTConfig, tmp_path, run={"epochs": 0.1, "resume": str(tmp_path / "runs/run")}, eval={"items": 0})
    with pytest.raises(ConfigError, match=r"run\.steps = 1, and the latest checkpoint .* is of step"):
        SFTTrainer(fewer, cluster="inline", show=False).fit()


def test_an_error_comes_with_the_notes_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{digit}=", "chosen": "1", "rejected": "1"} for digit in range(4)]
    (tmp_path / "equal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "equal.jsonl"), "holdout": 0.0}
    config = tiny(DPOConfig, tmp_path, data=data, eval={"items": 0})
    with pytest.raises(DataError, match="none of the 4 rows of preferences can be used: see the notes above"):
        describe_data(PreferenceTrainer(config, cluster="inline").read_data)
    assert "note: 4 of 4 pairs have two equal answers" in capsys.readouterr().err


def test_the_rows_the_share_and_the_epochs_of_each_source_are_shown(tmp_path: Path) -> None:
    tiny(GRPOConfig, tmp_path)
    rows = (tmp_path / "copy.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(rows[:6]))
    few, many = (str(tmp_path / f"{name}.jsonl") for name in ("few", "copy"))
    for train, shares in (([few, many], ("9.1%", "0.121", "90.9%")), ({few: 1, many: 3}, ("25.0%", "0.333", "75.0%"))):
        config = tiny(GRPOConfig, tmp_path, data={"train": train, "holdout": 0.0, "eval": many})
        said = describe_data(PPOTrainer(config, cluster="inline").read_data)
        assert "training     66 prompts of 3 tokens each\n" in said
        assert f"source       {few}: 6 of them, {shares[0]} of those taken, {shares[1]} epochs\n" in said
        assert f"source       {many}: 60 of them, {shares[2]} of those taken, " in said
