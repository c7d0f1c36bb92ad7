"""Models whose files do not fit their configuration, at load and in a dry run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from podium.cli import main
from podium.errors import ConfigError
from podium.models import ModelConfig, load_model, load_tokenizer
from podium.models.weight_files import find_replaced_heads, read_stored_tensors
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium.workers import Critic
from podium_dryrun.memory import model_size
from tests.integration.training import write_copy_task
from tests.unit.workers.tiny import SHAPE, TINY, oracle_logprobs

UP = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def saved(folder: Path, change: Change | None = None, config: ModelConfig = TINY, shards: str = "5GB") -> ModelConfig:
    """A model's directory after ``change`` was made to its tensors and its config.json."""
    load_model(config).save_pretrained(folder, max_shard_size=shards)
    load_tokenizer(config.tokenizer).save_pretrained(folder)
    if change is not None:
        tensors, path = load_file(folder / "model.safetensors"), folder / "config.json"
        settings = json.loads(path.read_text())
        change(tensors, settings)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        path.write_text(json.dumps(settings))
    return ModelConfig(path=str(folder))


def one_layer_more(_: dict[str, Tensor], settings: dict[str, Any]) -> None:
    settings.update(num_hidden_layers=3, layer_types=None)


def one_tensor_less(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    del tensors[UP]


def one_tensor_more(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors["model.extra"] = torch.zeros(2)


def another_shape(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors[UP] = tensors[UP][:3].contiguous()


@pytest.mark.parametrize("check", [load_model, model_size], ids=["load", "dry run"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_layer_more, r"missing from the files \(11\): .*model\.layers\.2\.self_attn\.q_proj\.weight"),
        (one_tensor_less, rf"missing from the files \(1\): {UP}"),
        (one_tensor_more, r"unknown to the model \(1\): model\.extra"),
        (another_shape, rf"of another shape \(1\): {UP} \(files \[3, 32\], model \[64, 32\]\)"),
    ],
    ids=["layer", "less", "more", "shape"],
)
def test_tensors_that_do_not_fit_are_listed_and_can_be_allowed_by_name(
    tmp_path: Path, check: Callable[[ModelConfig], Any], change: Change, message: str
) -> None:
    config = saved(tmp_path, change)
    with pytest.raises(ConfigError, match=rf"model\.path.*{message}.*model\.allow_tensors") as caught:
        check(config)
    assert "\n" not in str(caught.value)
    check(replace(config, allow_tensors=("model.layers.2.*", UP, "model.extra")))


@pytest.mark.parametrize("shape", [SHAPE, {**SHAPE, "tie_word_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize("shards", ["5GB", "8KB"])
def test_whole_files_are_taken_without_a_word(tmp_path: Path, shape: dict[str, Any], shards: str) -> None:
    config = saved(tmp_path, config=replace(TINY, config=shape), shards=shards)
    read_stored_tensors(config.path)
    load_model(config)
    assert model_size(config).parameters == sum(p.numel() for p in load_model(config).parameters())


def test_experts_that_transformers_joins_are_neither_missing_nor_unknown(tmp_path: Path) -> None:
    shape = {
        **SHAPE,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    del shape["head_dim"]
    config = saved(tmp_path, config=replace(TINY, config=shape))
    assert any("experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    model_size(config)
    load_model(config)


def test_values_of_missing_tensors_that_are_allowed_follow_the_seed(tmp_path: Path) -> None:
    config = replace(saved(tmp_path, one_tensor_less), allow_tensors=(UP,))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load_model(config).state_dict()[UP]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(load_model(config).state_dict()[UP], first)
    assert not torch.equal(load_model(replace(config, seed=1)).state_dict()[UP], first)


@pytest.mark.each_value
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["lm_head", "score", None])
def test_a_critic_takes_its_own_head_and_makes_one_where_there_is_none(
    tmp_path: Path, tied: bool, head: str | None
) -> None:
    def change(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
        settings["tie_word_embeddings"] = tied
        if head is not None:
            tensors |= {f"{head}.weight": torch.arange(32.0)[None], f"{head}.bias": torch.tensor([7.0])}

    config = saved(tmp_path, change)
    body: Any = load_model(TINY).get_input_embeddings()
    model_size(config, spared=find_replaced_heads(config.path))
    critic: Any = Critic(config).model
    assert torch.equal(critic.get_input_embeddings().weight, body.weight)
    own = critic.get_output_embeddings()
    assert torch.equal(own.weight, torch.zeros(1, 32) if head is None else torch.arange(32.0)[None])
    assert float(own.bias.detach()) == (0.0 if head is None else 7.0)


def test_a_head_of_several_outputs_is_no_critics(tmp_path: Path) -> None:
    config = saved(tmp_path, lambda tensors, _: tensors.update({"score.weight": torch.zeros(2, 32)}))
    with pytest.raises(ConfigError, match=r"unknown to the model \(1\): score\.weight"):
        Critic(config)


@pytest.mark.parametrize("check", [lambda config: read_stored_tensors(config.path), load_model], ids=["files", "load"])
def test_a_corrupt_file_is_one_line(tmp_path: Path, check: Callable[[ModelConfig], Any]) -> None:
    config = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"model\.safetensors") as caught:
        check(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [["--dry-run"], ["--backend", "inline"]], ids=["dry run", "run"])
def test_the_command_line_answers_a_corrupt_file_in_one_line(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nonsense")
    write_copy_task(tmp_path)
    capsys.readouterr()
    assert main(["train", "sft", "--model.path", "./model", "--data.train", "copy.jsonl", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.path = './model': model.safetensors cannot be read" in line
    assert not (tmp_path / "runs").exists()


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    config = saved(tmp_path, shards="8KB")
    first, *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    name, values = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: values + 1}, last, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name} is in two files, {first.name} and {last.name}"):
        read_stored_tensors(config.path)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_tied_configuration_with_two_different_tensors_is_corrected(tmp_path: Path, dtype: Any) -> None:
    head = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    model = load_model(saved(tmp_path, lambda tensors, _: tensors.update({"lm_head.weight": head})))
    assert torch.equal(model.lm_head.weight, head)
    engine = make_engine(EngineConfig(name="transformers", dtype=dtype), model)  # bfloat16 needs a copy
    engine.refresh(1)
    (drawn,) = engine.generate([[4, 5, 6]], SamplingParams(max_new_tokens=8), [1])
    wanted = oracle_logprobs(model, torch.cat([torch.tensor([4, 5, 6]), drawn.token_ids]))[3:]
    assert torch.allclose(drawn.logprobs, wanted, atol=0.1 if dtype else 1e-4)


def test_a_directory_with_adapters_is_refused(tmp_path: Path) -> None:
    adapted = peft.get_peft_model(load_model(saved(tmp_path)), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(str(tmp_path))
    for check in (load_model, model_size):
        with pytest.raises(ConfigError, match=r"holds adapters \(adapter_config\.json\).*merge_and_unload"):
            check(ModelConfig(path=str(tmp_path)))


def test_a_shard_that_the_index_names_and_nobody_copied_is_named(tmp_path: Path) -> None:
    config = saved(tmp_path, shards="8KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"{shard.name}.*no such file"):
        read_stored_tensors(config.path)


def test_weights_that_cannot_be_opened_are_not_said_to_be_missing(tmp_path: Path) -> None:
    """safetensors calls them so, as for a user who may not read them. A link to itself is refused to root, too."""
    config = saved(tmp_path, shards="20KB")
    file = next(tmp_path.glob("model-00002-*.safetensors"))
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read: no such file; copy the file again"):
        read_stored_tensors(config.path)
    file.symlink_to(file.name)
    with pytest.raises(ConfigError, match=r"cannot be read: Too many levels of symbolic links; let this user read it"):
        read_stored_tensors(config.path)
