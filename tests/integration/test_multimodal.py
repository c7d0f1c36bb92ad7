"""Models that are published for text and images, trained on text: the other parts come back as they were."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from podium.errors import ConfigError
from podium.models import ModelConfig, char_tokenizer, load_model
from podium.models.loading import lay_out
from podium.models.other_parts_search import find_other_parts, freeze_other_parts
from podium.models.value_head import add_value_head, find_value_head
from podium.runs.stored_models import find_model
from podium.trainer import SFTConfig, SFTTrainer
from podium_inference import export_model
from tests.integration.training import tiny

TEXT: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
}
SEEN: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
PROCESSOR = '{"image_processor_type": "Ours"}'


def gemma() -> Any:
    """transformers loads it whole."""
    text = {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    seen = {**SEEN, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    tokens: dict[str, Any] = {
        "mm_tokens_per_image": 4,
        "image_token_index": 39,
        "boi_token_index": 38,
        "eoi_token_index": 37,
    }
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=seen, **tokens)
    )


def qwen() -> Any:
    """transformers loads the text model alone."""
    linear = {f"linear_{kind}": 8 for kind in ("key_head_dim", "value_head_dim")}
    heads = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    text = {**TEXT, **linear, **heads, "layer_types": ["full_attention"] * 2}
    seen = {**SEEN, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
    tokens: dict[str, Any] = {
        "image_token_id": 39,
        "video_token_id": 38,
        "vision_start_token_id": 37,
        "vision_end_token_id": 36,
    }
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text, vision_config=seen, **tokens)
    )


def publish(model: Any, folder: Path) -> dict[str, Tensor]:
    """Save a model with what belongs to it, and with a tensor of a layer for speculation, which transformers skips."""
    model.save_pretrained(folder)
    char_tokenizer("0123456789=").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(PROCESSOR)
    return load_file(folder / "model.safetensors")


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def export(name: str, to: Path) -> None:
    model = find_model(name)
    assert model is not None
    export_model(model, to, merge=True)


@pytest.mark.everyday("gemma")
@pytest.mark.parametrize("make", [gemma, qwen])
def test_what_is_not_trained_comes_back_bit_for_bit(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    before = publish(make(), tmp_path / "published")
    model = {"path": str(tmp_path / "published"), "config": {}, "tokenizer": ""}
    settings: dict[str, Any] = {"model": model, "save": {"every": 1}, "eval": {"items": 0}}
    config = tiny(SFTConfig, tmp_path, **settings, optim={"weight_decay": 0.1})
    assert SFTTrainer(config, cluster="inline", show=False).fit().finished
    run = tmp_path / "runs/run"
    export(f"{run}@1", tmp_path / "exported")
    wholes = {}
    for folder in (run / "model", run / "checkpoints/step-000002/policy", tmp_path / "exported"):
        after = stored(folder)
        assert after.keys() == before.keys()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {name for name in before if "vis" not in name and "multi_modal" not in name}
        assert (folder / "preprocessor_config.json").read_text() == PROCESSOR
        auto: Any = transformers.AutoModelForImageTextToText
        loaded, report = auto.from_pretrained(folder, output_loading_info=True)
        assert type(loaded).__name__ == make().__class__.__name__ and not any(report.values())
        wholes[folder.name] = loaded.state_dict()
        content = json.loads((folder / "config.json").read_text())
        published = json.loads((tmp_path / "published/config.json").read_text())
        assert {**content["vision_config"], "dtype": ""} == {**published["vision_config"], "dtype": ""}
    assert all(torch.equal(tensor, wholes["policy"][name]) for name, tensor in wholes["model"].items())
    again = tiny(SFTConfig, tmp_path, **settings, run={"resume": str(run), "steps": 3})
    assert SFTTrainer(again, cluster="inline", show=False).fit().steps == 3


def test_adapters_are_merged_into_the_whole(tmp_path: Path) -> None:
    before = publish(qwen(), tmp_path / "published")
    model = {"path": str(tmp_path / "published"), "config": {}, "tokenizer": "", "lora": {"rank": 2}}
    config = tiny(SFTConfig, tmp_path, model=model, save={"every": 1}, eval={"items": 0})
    assert SFTTrainer(config, cluster="inline", show=False).fit().finished
    export(f"{tmp_path}/runs/run@1", tmp_path / "exported")
    for folder in (tmp_path / "runs/run/model", tmp_path / "exported"):
        after = stored(folder)
        assert after.keys() == before.keys()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed and not any("visual" in name for name in changed)
        assert transformers.AutoConfig.from_pretrained(folder).model_type == "qwen3_5"


def test_a_model_without_a_language_model_of_its_own_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """A Qwen2.5-VL, for one: transformers has its text model within the whole alone."""
    config = transformers.LlavaConfig(text_config={"model_type": "llama", **TEXT}, vision_config={})
    config.save_pretrained(tmp_path)
    for load in (load_model, lay_out):
        with pytest.raises(ConfigError, match="no language model for a LlavaConfig; choose a model of text, or one of"):
            load(ModelConfig(path=str(tmp_path)))


def test_parts_that_cannot_be_kept_are_told(tmp_path: Path) -> None:
    """The files are pickles, which are not copied."""
    model = qwen()
    publish(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    text = load_model(ModelConfig(path=str(tmp_path)))
    parts = f"only the text model is saved, without the parts vision_config of {tmp_path}"
    assert (
        f"{parts}, because its files are no safetensors" in find_other_parts(text, ModelConfig(path=str(tmp_path))).lost
    )


def test_a_model_whose_text_has_other_names_alone_is_saved_as_text_and_told(tmp_path: Path) -> None:
    """Llama 4, of which transformers writes the text model by names that the whole does not have."""
    text = {**TEXT, "intermediate_size_mlp": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    sizes = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
    seen = {**SEEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, **sizes}
    whole = transformers.Llama4Config(text_config={**text, "pad_token_id": 0}, vision_config=seen)
    publish(transformers.Llama4ForConditionalGeneration(whole), tmp_path)
    config = ModelConfig(path=str(tmp_path), allow_tensors=("vision_model.*", "multi_modal_projector.*"))
    parts = find_other_parts(load_model(config), config)
    assert not parts.tensors and not parts.texts
    assert parts.lost.endswith("because transformers gives the text model's tensors other names than the files have")


def test_a_value_head_is_trained_beside_frozen_parts() -> None:
    model = gemma()
    add_value_head(model)
    freeze_other_parts(model)
    head = find_value_head(model)
    assert head is not None
    assert all(parameter.requires_grad for parameter in head.parameters())
    assert not all(parameter.requires_grad for parameter in model.parameters())
