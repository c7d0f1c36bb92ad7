"""Systems other than Linux: macOS runs everything in one process, and Windows is refused by name.

There is no Mac here. A test withholds what macOS lacks from a Python on Linux, for the code of Podium alone: libraries
have code of their own for each system.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import podium
from podium.backends.local import LocalBackend
from podium.errors import ConfigError
from podium.runtime import backend_class

WITHHELD = r'''
"""What macOS lacks is taken away, and what macOS has is left."""
import builtins, ctypes, io, os, select, socket, sys

for module, names in {
    os: "memfd_create eventfd eventfd_read eventfd_write pidfd_open sched_getaffinity sched_setaffinity "
        "posix_fallocate EFD_CLOEXEC EFD_NONBLOCK MFD_CLOEXEC",
    select: "epoll EPOLLIN EPOLLOUT",
    socket: "SOCK_SEQPACKET MSG_NOSIGNAL MSG_CMSG_CLOEXEC",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def ours():
    """Whether the caller, without the standard library in between, is code of Podium."""
    frame = sys._getframe(2)
    while frame and "site-packages" not in frame.f_code.co_filename and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back
    return bool(frame) and frame.f_code.co_filename.startswith(SOURCE)


def without_proc(call):
    def guarded(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/dev/shm")) and ours():
            raise FileNotFoundError(2, "withheld", os.fspath(path))
        return call(path, *args, **kwargs)
    return guarded


for module, names in {os: "open listdir scandir stat", io: "open", builtins: "open"}.items():
    for name in names.split():
        setattr(module, name, without_proc(getattr(module, name)))

found = ctypes.CDLL.__getattr__


def without_prctl(self, name):
    if name in ("prctl", "mallopt"):
        raise AttributeError(name)
    return found(self, name)


ctypes.CDLL.__getattr__ = without_prctl
'''

SCRIPT = """
import json, os
from pathlib import Path
import podium
from podium.rewards import Grader, RewardConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.trainer import EvalConfig, GRPOConfig, PPOTrainer, PromptBatch, RunConfig
from podium.models import ModelConfig

assert not hasattr(os, "memfd_create")


def reward(completion, row):
    while completion == "spin":
        pass  # is killed at the time limit
    return float(completion.strip() == row["answer"])


Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}=", "answer": f"{n}"}) + "\\n" for n in range(20)))
shape = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
with podium.connect("local") as cluster:
    print(cluster.backend_name)
    config = GRPOConfig(
        run=RunConfig(dir=".", name="run", steps=2),
        model=ModelConfig(config=shape, tokenizer="chars:0123456789= "),
        data=DataConfig(train="rows.jsonl", holdout=0.2), batch=PromptBatch(prompts=4),
        sampling=SamplingParams(max_new_tokens=2, n=4), eval=EvalConfig(items=4),
    )
    summary = PPOTrainer(config, cluster=cluster, reward=reward, show=False).fit()
print(summary.steps, summary.finished)
with Grader(RewardConfig(time_limit_s=0.5, processes=2), reward=reward) as grader:
    for _ in range(10):  # until the second one did not wait for a core until its time was over
        late = [grade.timed_out for grade in grader.grade(["spin", "3"], [{"answer": "3"}] * 2)]
        if late == [True, False]:
            break
    print(late)
"""


def run_withheld(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    site = tmp_path / "withheld"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"SOURCE = {str(Path(podium.__file__).parent)!r}\n{WITHHELD}")
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(  # a new interpreter, which reads sitecustomize
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.exhaustive
def test_a_run_trains_without_the_calls_that_macos_lacks(tmp_path: Path) -> None:
    """With one line that says where the workers are. A grader has processes that are killed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_withheld(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "inline\n2 True\n[True, False]\n"
    said = [line for line in done.stderr.splitlines() if line.startswith("podium: ")]
    assert said == [
        "podium: importing torch and transformers",
        (
            "podium: 'inline' takes the place of the backend 'local': it needs Linux, and this system has no "
            "memfd_create, eventfd, pidfd_open, SOCK_SEQPACKET, MSG_CMSG_CLOEXEC, epoll, /proc"
        ),
    ]
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_the_list_of_backends_says_which_cannot_be_used(tmp_path: Path) -> None:
    done = run_withheld(tmp_path, "-m", "podium", "backends")
    assert done.returncode == 0, done.stderr
    assert "local      not usable here: it needs Linux" in done.stdout
    assert "inline     can: " in done.stdout


def test_local_is_what_it_is_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_class("local") is LocalBackend
    monkeypatch.delattr("os.memfd_create")
    assert backend_class("local") is backend_class("inline")
    with pytest.raises(ConfigError, match="'local' needs Linux, and this system has no memfd_create; use 'inline'"):
        LocalBackend()
    with pytest.raises(ConfigError, match="spill_dir"):
        podium.connect("local", spill_dir="/tmp")


def test_windows_is_refused_by_name() -> None:
    script = "import sys; sys.platform = 'win32'; import podium"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: Podium does not run on Windows")
    assert "install podium inside WSL" in done.stderr
