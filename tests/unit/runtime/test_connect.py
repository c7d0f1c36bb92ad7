"""Connecting by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import podium
from podium.cli import main
from podium.errors import ConfigError
from podium.trainer import GRPOConfig, PPOTrainer
from tests.integration.training import MODEL, tiny, write_copy_task


def test_hints_are_for_backends_that_know_them() -> None:
    with podium.connect("inline", hints={"nodes": 3, "colour": "red"}) as cluster:
        assert len(cluster.nodes) == 3
    with podium.connect("inline", hints={"nodes": 3}, nodes=2) as cluster:
        assert len(cluster.nodes) == 2


def test_an_option_that_the_backend_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"connect\('inline'\).*colour"):
        podium.connect("inline", colour="red")


def test_a_name_that_is_no_backend_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean local"):
        podium.connect("locla")


def test_a_backend_of_a_package_that_is_not_installed_comes_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("elsewhere", "elsewhere://head:1"):
        with pytest.raises(
            ConfigError,
            match=r"no backend .*\(docs/backends.md\); .*podium\.backends.*by: pip install \./plugins/podium-NAME",
        ):
            podium.connect(name)
    assert main(["backends"]) == 0
    assert "by: pip install ./plugins/podium-NAME\n" in capsys.readouterr().out
    assert main(["train", "grpo", "--data.train", "absent", "--backend", "elsewhere"]) == 2
    assert "pip install ./plugins/podium-NAME" in " ".join(capsys.readouterr().err.split())


PLUGINS = {
    "ends": "raise SystemExit(3)",
    "raises": "raise RuntimeError('no driver')",
    "unwritten": "def (",
    "empty": "",
    "without_library": "import absent_library.part",
    "without_other": "import absent_other",
    "function": "def Backend(): ...",
    "partial": "from podium.runtime import Backend as Base\nclass Backend(Base):\n    def nodes(self): return []",
    "bare": (
        "from podium.backends.inline import InlineBackend\n"
        "class Backend(InlineBackend):\n    def __init__(self): super().__init__()"
    ),
}
"""Modules of backends in packages of their own. Only the last one works; it has none of the usual options."""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins-0.dist-info").mkdir()
    points = "".join(f"{name} = plugin_{name}:Backend\n" for name in PLUGINS)
    (tmp_path / "plugins-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plugins\nVersion: 0\nRequires-Dist: podium\nRequires-Dist: absent-library<3,>=2\n"
        "Requires-Dist: absent-other>=1; extra == 'more'\n"
    )
    (tmp_path / "plugins-0.dist-info" / "entry_points.txt").write_text(f"[podium.backends]\n{points}")
    for name, text in PLUGINS.items():
        (tmp_path / f"plugin_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ends", r"cannot be loaded: SystemExit: 3; try: another version of the package of plugin_ends"),
        ("raises", "cannot be loaded: RuntimeError: no driver"),
        ("unwritten", "cannot be loaded: SyntaxError"),
        ("empty", "cannot be loaded: AttributeError"),
        ("without_library", r"No module named 'absent_library'; try: pip install 'absent-library<3,>=2'$"),
        ("without_other", r"No module named 'absent_other'; try: another version of the package"),
        ("function", "is no subclass of podium.runtime.Backend"),
        ("partial", "does not implement close, pack, rendezvous, start_processes, unpack"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_one_error(plugins: None, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"backend '{name}'.*{says}"):
        podium.connect(name)


def test_plugins_that_cannot_be_loaded_break_no_command(plugins: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    assert "raises     not usable here: RuntimeError: no driver" in out
    assert "unwritten  not usable here: SyntaxError" in out
    assert "not usable here: No module named 'absent_library': pip install 'absent-library<3,>=2'\n" in out
    assert "local      can: processes" in out
    assert main(["train", "grpo", "--keys", "--backend", "inline"]) == 0
    with podium.connect("inline"):
        pass


def test_a_backend_without_the_usual_options_runs_commands_and_examples(
    plugins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They know neither ``log_dir`` nor ``preload``."""
    from examples import quickstart

    config = f"model: {json.dumps(MODEL)}\ndata: {{train: {write_copy_task(tmp_path)}}}\nrun: {{steps: 1}}\n"
    (tmp_path / "run.yaml").write_text(
        config + "eval: {items: 2}\nbatch: {examples: 2}\nsampling: {max_new_tokens: 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    train = ["train", "sft", "--config", "run.yaml", "--run.name", "bare", "--backend", "bare"]
    assert main(train) == 0
    for command in (["eval", "runs/bare", "--eval.items", "2"], ["sample", "runs/bare", "--prompt", "1"]):
        assert main([*command, "--backend", "bare"]) == 0
        assert "loading runs/bare\n" in capsys.readouterr().err

    def copying(cluster: podium.Cluster, seed: int, out: Path) -> Any:
        (out / "grpo").mkdir(parents=True)
        for name in ("summary.json", "curve.png"):
            (out / "grpo" / name).touch()
        return SimpleNamespace(metric=None, before={}, after={})

    monkeypatch.setattr(quickstart, "copying", copying)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--smoke", "--backend", "bare", "--out", str(tmp_path / "out")])
    quickstart.main()
    command = next(line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  view "))
    assert command[1:] == ["view", str(tmp_path / "out" / "grpo")]
    assert shutil.which("podium") if command[0] == "podium" else Path(command[0]).exists()


LAUNCHED = {
    "torchrun": {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
    "torchrun-other": {"WORLD_SIZE": "2", "RANK": "1"},
    "srun": {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
    "srun-other": {"SLURM_NTASKS": "4", "SLURM_PROCID": "3"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    "mpich": {"PMI_SIZE": "2", "PMI_RANK": "0"},
}
ALONE: dict[str, dict[str, str]] = {
    "torchrun of one": {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    "a job of one task": {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "one task in a larger job": {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a shell in a job": {"SLURM_NTASKS": "8"},
    "a number that somebody set": {"WORLD_SIZE": "8"},
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    def launch(variables: dict[str, str]) -> None:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize("variables", LAUNCHED.values(), ids=LAUNCHED)
def test_one_of_several_processes_is_told_who_starts_workers(
    launched: Any, variables: dict[str, str], tmp_path: Path
) -> None:
    launched(variables)
    message = r"started this process as \d of \d .*Podium starts its workers itself: run the script once"
    with pytest.raises(ConfigError, match=message):
        podium.connect("inline")
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(tiny(GRPOConfig, tmp_path), cluster="inline", show=False).fit()
    assert not (tmp_path / "runs").exists(), "no trainer has begun a run's directory"


@pytest.mark.parametrize("variables", ALONE.values(), ids=ALONE)
def test_a_process_that_is_alone_is_told_nothing(
    launched: Any, variables: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    launched(variables)
    podium.connect("inline").close()
    assert capsys.readouterr().err == ""


def test_a_batch_script_that_may_be_alone_is_told_once_and_goes_on(
    launched: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    launched({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    for _ in range(2):
        podium.connect("inline").close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("podium: if srun started this process as 0 of 4")


class Inner(podium.Worker):
    """A worker that connects itself."""

    @podium.endpoint()
    def connect(self) -> int:
        with podium.connect("inline") as cluster:
            return len(cluster.nodes)


def test_a_worker_is_told_nothing(launched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    launched({})
    with podium.connect("inline") as cluster:
        worker = cluster.start(Inner.bind(), cluster.pool([1]))
        launched(LAUNCHED["srun"])  # as a worker of Ray has it that srun started there
        assert worker.connect() == [1]
    assert capsys.readouterr().err == ""


def test_each_process_of_torchrun_is_told_who_starts_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, podium\n"
        "try:\n    podium.connect('local')\n"  # both processes have one pipe, in which a single write stays whole
        "except podium.ConfigError as error:\n    os.write(1, f'REFUSED {error}\\n'.encode())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path)
    lines = sorted(line for line in ran.stdout.splitlines() if line.startswith("REFUSED"))
    assert [f"as {rank} of 2" in line for rank, line in enumerate(lines)] == [True, True], ran.stdout + ran.stderr
    assert all("Podium starts its workers itself: run the script once" in line for line in lines)
