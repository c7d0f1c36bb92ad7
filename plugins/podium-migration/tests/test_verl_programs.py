"""Of verl's programs the PPO trainer is converted, and the others are refused, with what to run in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.cli import main
from podium.config import keys_of
from podium.runs.config import SFTConfig

programs = pytest.importorskip("podium_migration.verl_programs")

SFT = (
    "data.train_files=a.parquet data.prompt_key=question model.partial_pretrain=q optim.lr=1e-4 trainer.total_epochs=2"
)
SFT_COMMAND = (
    "podium train sft --data.train a.parquet --data.prompt_column question --model.path q --optim.lr 1e-4 "
    "--run.epochs 2. The program"
)
PPO = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 data.train_batch_size=64"
MAIN = f"python3 -m verl.trainer.main_ppo {PPO}"


def run(tmp_path: Path, name: str, text: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the values that are written, and the text of the file."""
    (tmp_path / name).write_text(f"{text}\n")
    target = tmp_path / "run.yaml"
    status = main(["config", "--from", "verl", str(tmp_path / name), "--output", str(target)])
    written = target.read_text() if status == 0 else ""
    return status, yaml.safe_load(written) or {}, written.replace("\n#   ", " ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", f"torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer {SFT}", SFT_COMMAND),
        ("a.sh", f"torchrun --nnodes=2 verl/trainer/sft_trainer.py {SFT}", SFT_COMMAND),
        ("a.sh", f"python -m torch.distributed.run -m mine.sft_with_changes {SFT}", SFT_COMMAND),
        ("a.sh", f"$LAUNCH {SFT}", "--model.path q --optim.lr 0.0001 --run.epochs 2."),
        (
            "a.yaml",
            "data: {train_files: a.parquet}\nmodel: {path: q}\noptim: {lr: 0.1}",
            "--model.path q --optim.lr 0.1",
        ),
        ("a.sh", f"python -m verl.trainer.fsdp_sft_trainer {SFT} data.val_files=[b,c]", "--data.eval '[b, c]'"),
        ("a.sh", "python -m verl.trainer.main_generation model.path=q rollout.n=4", "podium eval MODEL writes"),
        ("a.sh", "python -m verl.trainer.main_eval data.path=q", "podium eval MODEL grades"),
        ("a.sh", f"python -m verl.experimental.fully_async_policy.fully_async_main {PPO}", "run.schedule asynchronous"),
        ("a.sh", "python -m verl.trainer.new_main data.path=q", "docs/coming-from-verl.md"),
    ],
)
def test_other_programs_are_refused_with_what_to_run(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, name, text)[0] == 2
    error = capsys.readouterr().err
    assert (
        message in error and "which is not converted: " in error and "The program that is converted: main_ppo" in error
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (MAIN, ""),
        (f"{MAIN} reward.custom_reward_function.path=sft.py", ""),
        (f"ray job submit --address a -- python3 verl/trainer/main_ppo.py {PPO}", ""),
        (f"python -m verl.experimental.one_step_off_policy.main_ppo {PPO}", ""),
        (f"python -m verl.model_merger merge --local_dir a\n{MAIN}", ""),
        (f"torchrun -m verl.trainer.fsdp_sft_trainer {SFT}\n{MAIN}", "verl.trainer.fsdp_sft_trainer: the file runs"),
        (f"python -m recipe.dapo.main_dapo {PPO}", "recipe.dapo.main_dapo: this program is none of verl's own"),
        (f"python verl_main.py {PPO}", "verl_main.py: this program is none of verl's own"),
    ],
)
def test_the_settings_of_the_ppo_trainer_are_converted(text: str, line: str, tmp_path: Path) -> None:
    status, values, written = run(tmp_path, "a.sh", text)
    assert (status, values["batch"], values["sampling"]["n"]) == (0, {"prompts": 64}, 4)
    assert values["optim"]["lr"] == 1e-6, "that of verl, and none of another program"
    assert not line or f"# - {line}" in written
    assert ("this program is none" in written or "the file runs this program" in written) == bool(line)


def test_the_keys_of_fine_tuning_are_those_of_podium() -> None:
    assert {*programs.OF_SFT.values()} <= {key.path for key in keys_of(SFTConfig)}


@pytest.mark.parametrize("files", ["[a.parquet,b.parquet]", "a.parquet", "[a.parquet]", "[a,b,c,d]"])
def test_the_number_of_rows_is_that_of_all_files_together(files: str, tmp_path: Path) -> None:
    """Podium's keys count the rows of each source."""
    text = (
        f"{MAIN} data.train_files={files} data.val_files={files} data.train_max_samples=1000 data.val_max_samples=100"
    )
    _, values, written = run(tmp_path, "a.sh", text)
    count = files.count(",") + 1
    assert values["data"]["train_items"] == 1000 // count
    assert values["eval"]["items"] == 100 // count
    for line in ("data.train_max_samples=1000: data.train_items", "data.val_max_samples=100: eval.items"):
        assert (f"# - {line} counts the rows of each of the {count} sources" in written) == (count > 1)


def test_all_rows_are_taken_where_no_number_is_set(tmp_path: Path) -> None:
    _, values, written = run(tmp_path, "a.sh", f"{MAIN} data.train_files=[a,b] data.train_max_samples=-1")
    assert "train_items" not in values["data"] and "counts the rows of each" not in written
