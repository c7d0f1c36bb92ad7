"""The verdict whether rows share a forward pass is kept for later starts, and never believed where it may be wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.models.llama import modeling_llama

from podium.errors import ConfigError
from podium.training import ParallelConfig, row_isolation, row_isolation_cache
from podium.training.row_isolation import choose_batching, may_share_prompts
from tests.unit.training.families import make

CPU = torch.device("cpu")
Trials = list[dict[str, bool]]


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    """RowIsolationCache on models of any size are kept in an empty cache; the list gets each trial that is made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(row_isolation_cache, "_FROM", 0)
    made: Trials = []
    interference = row_isolation.interference

    def count(*args: Any, **rows: bool) -> str:
        made.append(rows)
        return interference(*args, **rows)

    monkeypatch.setattr(row_isolation, "interference", count)
    return made


def start(model: Any, precision: torch.dtype = torch.float32) -> tuple[str, bool]:
    batching, _ = choose_batching(model, ParallelConfig(), CPU, precision)
    return batching, may_share_prompts(model, ParallelConfig(), batching, CPU, precision)


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "podium" / "row-isolation").glob("*"))


def test_a_later_start_reads_the_verdict_and_tries_nothing(trials: Trials, tmp_path: Path) -> None:
    assert start(make("llama")) == start(make("llama")) == ("padded", True)
    assert trials == [{}, {"share": True}]
    assert [path.stat().st_mode & 0o777 for path in kept(tmp_path)] == [0o600] * 2


def test_a_verdict_against_a_model_is_kept_too(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelConfig, "packed", lambda self, device: self.batching != "padded")
    monkeypatch.setattr(
        row_isolation, "interference", lambda *args, **rows: trials.append(rows) or row_isolation._MIXED
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match="depends on the other row or on padding"):
            choose_batching(make("llama"), ParallelConfig(batching="packed"), CPU, torch.float32)
    assert len(trials) == 1


def other_weight(model: Any) -> None:
    model.model.norm.weight.data[3] += 1


def other_setting(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


def other_attention(model: Any) -> None:
    model.config._attn_implementation = "eager"


def other_module(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


@pytest.mark.parametrize("change", [other_weight, other_setting, other_attention, other_module])
def test_whatever_differs_is_tried_again(trials: Trials, change: Callable[[Any], None]) -> None:
    start(make("llama"))
    model = make("llama")
    change(model)
    start(model)
    assert len(trials) == 4


def test_another_precision_and_changed_code_are_tried_again(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(make("llama"))
    start(make("llama"), torch.bfloat16)
    assert len(trials) == 4
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr(row_isolation_cache, "_code_folders", lambda model: iter([code]))
    for text in ("a = 1", "a = 2"):
        (code / "model.py").write_text(text)
        row_isolation_cache._digest_code.cache_clear()
        start(make("llama"))
    assert len(trials) == 8


def hook(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: output)


def replace_forward(model: Any) -> None:
    model.model.norm.forward = lambda states: states


def derive_class(model: Any) -> None:
    model.model.norm.__class__ = type("Norm", (type(model.model.norm),), {})


@pytest.mark.parametrize("change", [hook, replace_forward, derive_class])
def test_a_model_that_runs_code_from_elsewhere_is_tried_at_every_start(
    trials: Trials, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    for _ in range(2):
        model = make("llama")
        change(model)
        start(model)
    assert len(trials) == 4
    assert kept(tmp_path) == []


@pytest.mark.parametrize("name", ["function", "method", "of torch"])
def test_a_library_that_is_patched_is_tried_at_every_start(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    place, attribute = {
        "function": (modeling_llama, "apply_rotary_pos_emb"),
        "method": (modeling_llama.LlamaMLP, "forward"),
        "of torch": (torch.nn.Linear, "forward"),
    }[name]
    original: Any = getattr(place, attribute)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(place, attribute, patched)
    start(make("llama"))
    start(make("llama"))
    assert len(trials) == 4
    assert kept(tmp_path) == []


def open_file(path: Path) -> None:
    path.chmod(0o666)


def open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def open_upper_folder(path: Path) -> None:
    path.parent.parent.chmod(0o775)


def link_file(path: Path) -> None:
    path.rename(path.parent / "other")
    path.symlink_to("other")


def link_folder(path: Path) -> None:
    path.parent.rename(path.parent.parent / "other")
    path.parent.symlink_to("other")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def write_junk(path: Path) -> None:
    path.write_bytes(b"\xff{")


def write_far_number(path: Path) -> None:
    path.write_text(json.dumps({"verdict": 7}))


def write_negative_number(path: Path) -> None:
    path.write_text(json.dumps({"verdict": -1}))


def write_list(path: Path) -> None:
    path.write_text("[0]")


@pytest.mark.parametrize(
    "spoil",
    [
        *(open_file, open_folder, open_upper_folder, link_file, link_folder, make_pipe),
        *(write_junk, write_far_number, write_negative_number, write_list),
    ],
)
def test_a_file_that_somebody_else_may_have_written_is_not_believed(
    trials: Trials, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    choose_batching(make("llama"), ParallelConfig(), CPU, torch.float32)
    (path,) = kept(tmp_path)
    spoil(path)
    assert choose_batching(make("llama"), ParallelConfig(), CPU, torch.float32) == ("padded", "")
    assert len(trials) == 2


def test_a_file_of_another_user_is_not_believed(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    start(make("llama"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    start(make("llama"))
    assert len(trials) == 4


def test_weights_that_are_not_finite_are_found_though_the_verdict_is_kept(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_isolation_cache, "_SAMPLE", 8)
    model = make("llama")
    start(model)
    model.model.layers[1].mlp.up_proj.weight.data[0, 1] = float("nan")
    with pytest.raises(ConfigError, match=r"NaN or infinity.* model.layers.1.mlp.up_proj\.weight is not finite"):
        start(model)
    assert len(trials) == 2


def test_ranks_that_hold_shards_leave_the_trial_out_together(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [True]

    def gather(every: list[bool], value: bool) -> None:
        every[:] = [value, others[0]]

    monkeypatch.setattr(row_isolation, "is_sharded", lambda model: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    start(make("llama"))
    start(make("llama"))
    assert len(trials) == 2
    others[0] = False  # the other rank has no file
    start(make("llama"))
    assert len(trials) == 4
