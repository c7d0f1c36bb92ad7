"""The number of processes that a script starts is that of all machines, and other options of launchers are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

launchers = pytest.importorskip("podium_migration.launchers")
sources = pytest.importorskip("podium_migration.sources")

TORCHRUN = "torchrun --nnodes=2 --nproc_per_node=8"
OPTIONS = "--learning_rate 1e-6"


def read(tmp_path: Path, text: str) -> tuple[int, list[str]]:
    """The number of processes, and what is listed about the launcher."""
    (tmp_path / "run.sh").write_text(f"{text} {OPTIONS}\n")
    settings = sources.read_trl(tmp_path / "run.sh")
    assert settings.values == {"learning_rate": 1e-6}
    return settings.processes, [subject for subject, _ in settings.changes]


@pytest.mark.parametrize(
    ("command", "processes", "subjects"),
    [
        (f"{TORCHRUN} sft.py", 16, []),
        (
            "torchrun --nnodes 4 --nproc-per-node 2 --rdzv-backend c10d --rdzv_endpoint=$HOST:1 -m trl.scripts.sft",
            8,
            [],
        ),
        ("python -m torch.distributed.run --nproc_per_node=8 --master_port 1234 sft.py", 8, []),
        ("torchrun --nnodes=3 sft.py", 3, []),
        ("torchrun --standalone sft.py", 0, []),
        ("torchrun --nnodes=1:4 --nproc_per_node=8 sft.py", 0, ["--nnodes=1:4"]),
        ("torchrun --nproc_per_node=gpu sft.py", 0, ["--nproc_per_node=gpu"]),
        ("torchrun --nproc_per_node=8 --nnodes=$(wc -l hosts) sft.py", 0, ["--nnodes=…"]),
        ("accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0 sft.py", 16, []),
        ("accelerate launch --num_machines 2 --num_processes=16 --multi_gpu --module trl.scripts.sft", 16, []),
        ("accelerate launch --num_processes 8 -m trl.scripts.sft", 8, []),
        ("accelerate launch --num_machines 2 sft.py", 0, []),
        (
            "accelerate launch --num_processes 4 --mixed_precision bf16 --use_fsdp sft.py",
            4,
            ["--mixed_precision=bf16", "--use_fsdp"],
        ),
        ("accelerate launch --gradient_accumulation_steps 4 sft.py", 0, ["--gradient_accumulation_steps=4"]),
        ("accelerate launch --config_file absent.yaml sft.py", 0, ["--config_file=absent.yaml"]),
        ("deepspeed --num_nodes 2 --num_gpus 4 sft.py", 8, []),
        ("deepspeed --num_nodes 2 --include worker-0 sft.py", 0, ["--include=worker-0"]),
        (f"srun --ntasks-per-node=1 -N 2 {TORCHRUN} sft.py", 16, ["srun --ntasks-per-node=1 -N"]),
        ("mpirun -np 8 python sft.py", 0, ["mpirun -np"]),
        ("trl sft --num_processes 4 --num_machines 2", 4, []),
        ("python -u sft.py", 0, []),
    ],
)
def test_the_processes_of_all_machines_count(command: str, processes: int, subjects: list[str], tmp_path: Path) -> None:
    assert read(tmp_path, command) == (processes, subjects)


def test_a_file_of_accelerate_says_the_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "multi.yaml").write_text("num_machines: 2\nnum_processes: 16\nmixed_precision: bf16\n")
    for command in ("accelerate launch --config_file multi.yaml sft.py", "trl sft --accelerate_config multi.yaml"):
        assert read(tmp_path, command) == (16, ["--config_file=multi.yaml"])
    assert read(tmp_path, "accelerate launch --config_file multi.yaml --num_processes 2 sft.py")[0] == 2


@pytest.mark.parametrize("name", launchers.OF_TRL)
def test_no_option_of_accelerate_that_trl_takes_is_taken_for_a_setting(name: str, tmp_path: Path) -> None:
    read(tmp_path, f"trl sft --{name} 1")


def test_options_of_launchers_are_listed_in_the_configuration(tmp_path: Path) -> None:
    trl = pytest.importorskip("podium_migration.trl")
    (tmp_path / "run.sh").write_text(
        f"{TORCHRUN} --tasks 3 trl/scripts/sft.py --per_device_train_batch_size 4 --packing no\n"
    )
    conversion = trl.convert_trl(sources.read_trl(tmp_path / "run.sh"))
    assert conversion.values["batch.examples"] == 64 and conversion.values["placement.ranks"] == 16
    assert [line for line in conversion.lost if line.startswith("--tasks=3: this option of torchrun is not read")]
