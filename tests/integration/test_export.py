"""Checkpoints and runs as models: for transformers, for peft, for ``podium eval`` and ``podium sample``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from podium.cli import main
from podium.errors import ConfigError
from podium.models import load_tokenizer
from podium.models.whole_weights import full_weights
from podium.runs.paths import resolve_models, resolve_resume
from podium.runtime import Cluster, endpoint, nothing
from podium.telemetry.held_out import Metric
from podium.trainer import GRPOConfig, PPOTrainer, load_config
from podium.workers import Policy
from tests.integration.finished_runs import compute_logits, copy_folder, read_logits, write_base
from tests.integration.hub_server import TOKEN, hub_server
from tests.integration.training import MODEL, metrics_rows, tiny, train
from tests.unit.rollout.tasks.test_encode import notes_of


def find_policy(folder: Path, step: int) -> Path:
    return folder / "runs" / "run" / "checkpoints" / f"step-{step:06}" / "policy"


def test_checkpoints_are_exported_evaluated_and_sampled(
    finished_grpo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, run, out = read_logits(finished_grpo), str(finished_grpo / "runs" / "run"), tmp_path / "out"
    for number, name in enumerate([f"{run}@1", f"{run}/checkpoints/latest", run, f"{run}@best"]):
        assert main(["export", name, "--to", str(out / str(number))]) == 0
        exported = AutoModelForCausalLM.from_pretrained(out / str(number))
        step = json.loads((Path(run) / "summary.json").read_text())["best_checkpoint"][-1] if number == 3 else 3
        assert torch.equal(compute_logits(exported), seen[1 if number == 0 else int(step)])
        tokenizer = AutoTokenizer.from_pretrained(out / str(number))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False) == "12"
        card = (out / str(number) / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\n")
        assert "| before training | " in card
        assert "`algorithm.advantage` | `grpo`" in card
    assert not torch.equal(seen[1], seen[3])
    capsys.readouterr()
    for name in (f"{run}@1", str(out / "0")):
        assert main(["sample", name, "--prompt", "12=", "--sampling.max_new_tokens", "3"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    model: Any = AutoModelForCausalLM.from_pretrained(find_policy(finished_grpo, 1))
    tokenizer = AutoTokenizer.from_pretrained(find_policy(finished_grpo, 1))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False) == "12"
    greedy = ["--sampling.temperature", "0", "--sampling.max_new_tokens", "3"]
    assert main(["sample", f"{run}@1", "--prompt", "12=", *greedy]) == 0
    prompt = tokenizer("12=", return_tensors="pt")["input_ids"]
    ids = model.generate(prompt, do_sample=False, max_new_tokens=3)[0, prompt.shape[1] :]
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(ids, skip_special_tokens=True)
    assert main(["eval", f"{run}@best", "--backend", "inline", "--eval.items", "4"]) == 0
    best = json.loads((Path(run) / "summary.json").read_text())["best_checkpoint"]
    state = json.loads((Path(best) / "trainer.json").read_text())
    value = Metric(state["metric"]).write(state["last"]["figures"][state["metric"]])
    assert capsys.readouterr().out.startswith(f"reward    {value}  (4 items")


def test_a_run_is_the_path_of_a_model(finished_grpo: Path, finished_lora: Path, tmp_path: Path) -> None:
    run, adapted = str(finished_grpo / "runs" / "run"), str(finished_lora / "runs" / "run")

    def configure(**model: str) -> GRPOConfig:
        values = {"config": {}, "tokenizer": "", **model}
        return tiny(GRPOConfig, tmp_path, run={"steps": 1}, model=values, eval={"items": 4}, save={"model": False})

    best = json.loads((Path(run) / "summary.json").read_text())["best_checkpoint"]
    means = {"": "model", "@1": "checkpoints/step-000001/policy", "@latest": "checkpoints/step-000003/policy"}
    means |= {
        "@best": f"checkpoints/{Path(best).name}/policy",
        "/checkpoints/step-000002": "checkpoints/step-000002/policy",
    }
    for name, folder in means.items():
        assert resolve_resume(configure(path=run + name)).model.path == f"{run}/{folder}"
        assert resolve_models(configure(path=run, tokenizer=run + name)).model.tokenizer == f"{run}/{folder}"
    assert resolve_models(configure(path=adapted)).model.path == f"{adapted}/model"  # merged
    for name, message in (
        (f"{run}@7", "there is no such checkpoint; .* has step-000001"),
        (f"{run}@first", "expected RUN@STEP with a number, RUN@best or RUN@latest"),
        (f"{adapted}@2", f"adapters alone: podium export {adapted}@2 --merge --to DIR"),
    ):
        with pytest.raises(ConfigError, match=f"model.path = '{name}': .*{message}"):
            resolve_resume(configure(path=name))
    (second,) = [row for row in metrics_rows(Path(run), "eval") if row["step"] == 2]
    summary = PPOTrainer(configure(path=f"{run}@2"), cluster="inline", show=False).fit()
    assert summary.before["reward_mean"] == second["reward_mean"]
    assert load_config(GRPOConfig, tmp_path / "runs" / "run" / "config.yaml").model.path.endswith("step-000002/policy")


def test_adapters_are_exported_for_peft_or_merged(finished_lora: Path, tmp_path: Path) -> None:
    seen, run, base = read_logits(finished_lora), str(finished_lora / "runs" / "run"), finished_lora / "base"
    assert main(["export", run, "--to", str(tmp_path / "adapters")]) == 0
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    plain = AutoModelForCausalLM.from_pretrained(base)
    unadapted = compute_logits(plain)
    assert torch.equal(compute_logits(PeftModel.from_pretrained(plain, str(tmp_path / "adapters"))), seen[3])
    for number, name in enumerate([run, f"{run}@2"]):
        assert main(["export", name, "--to", str(tmp_path / str(number)), "--merge"]) == 0
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        torch.testing.assert_close(compute_logits(merged), seen[3 - number])
        assert not torch.equal(compute_logits(merged), unadapted)


@pytest.mark.everyday("lora")
@pytest.mark.parametrize("lora", (False, True), ids=["plain", "lora"])
def test_a_checkpoint_of_two_ranks_that_share_the_model(preloaded: Cluster, tmp_path: Path, lora: bool) -> None:
    class Seen(Policy):
        """It saves its whole weights, and its logits, with each checkpoint."""

        @endpoint(collect=nothing())
        def copy_state(self, within: str | None = None) -> None:
            super().copy_state(within)
            logits, weights = compute_logits(self.model), dict(full_weights(self.model))
            if self.ctx.rank == 0:
                torch.save(logits, tmp_path / f"logits-{self.engine.step_count}.pt")
                torch.save(weights, tmp_path / f"weights-{self.engine.step_count}.pt")

    config = tiny(
        GRPOConfig, tmp_path, run={"steps": 1}, save={"every": 1}, eval={"items": 0},
        model=write_base(tmp_path / "base") if lora else MODEL,
        placement={"ranks": 2}, parallel={"strategy": "fsdp2"},
    )  # fmt: skip
    train(config, preloaded, workers={"policy": Seen})
    assert main(["export", f"{tmp_path}/runs/run@1", "--merge", "--to", str(tmp_path / "out")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(compute_logits(exported), read_logits(tmp_path)[1])
    if not lora:
        weights = torch.load(tmp_path / "weights-1.pt")
        loaded = dict(full_weights(AutoModelForCausalLM.from_pretrained(find_policy(tmp_path, 1))))
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_adapters_of_another_base_are_refused(
    finished_lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ["--model.path", write_base(tmp_path / "other", seed=1)["path"]]
    run = f"{copy_folder(finished_lora, tmp_path / 'copy')}/runs/run"
    resumed = ["train", "grpo", "--resume", run, "--run.steps", "4", "--backend", "inline", "--reward.name", "exact"]
    for command in (["export", f"{run}@1", "--to", str(tmp_path / "out")], resumed):
        assert main([*command, *other]) == 2
        assert "adapters of another base than model.path=" in capsys.readouterr().err


def test_adapters_keep_the_scale_with_which_they_were_trained(
    finished_lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another alpha would multiply what they have learned, without a word and without an error of shapes."""
    run = f"{copy_folder(finished_lora, tmp_path / 'copy')}/runs/run"
    alpha = json.loads(Path(run, "checkpoints/step-000001/policy/adapter_config.json").read_text())["lora_alpha"]
    resumed = ["train", "grpo", "--resume", run, "--run.steps", "4", "--backend", "inline", "--reward.name", "exact"]
    exported = ["export", f"{run}@1", "--to", str(tmp_path / "out")]
    for command in (exported, [*exported, "--merge"], resumed):
        assert main([*command, "--model.lora.alpha", str(8 * alpha)]) == 2
        assert f"were trained with alpha = {alpha}, and model.lora.alpha = {8 * alpha:g} " in capsys.readouterr().err
    assert main([*exported, "--model.lora.alpha", str(alpha)]) == 0


def test_a_setting_is_refused_where_the_model_is_copied_and_used_where_it_is_made(
    finished_grpo: Path, finished_lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, adapted = (str(folder / "runs" / "run") for folder in (finished_grpo, finished_lora))
    dtype, template = ["--model.dtype", "bfloat16"], ["--data.chat_template", "none"]
    for name, words in (
        (f"{plain}@1", template),
        (f"{plain}@1", dtype),
        (plain, dtype),
        (adapted, ["--merge", *dtype]),
    ):
        assert main(["export", name, "--to", str(tmp_path / "out"), *words]) == 2
        refusal = capsys.readouterr().err
        assert f"{words[-2]} has no effect: the model of " in refusal
        assert not (tmp_path / "out").exists()
    latest = ["export", f"{adapted}@latest", "--merge", "--to", str(tmp_path / "out")]
    assert main([*latest, *dtype]) == 2
    assert "and its model.dtype, which is bfloat16 here" in capsys.readouterr().err
    (tmp_path / "other.jinja").write_text(written := "{% for message in messages %}{{ message.content }};{% endfor %}")
    assert main([*latest, "--data.chat_template", str(tmp_path / "other.jinja")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == written


def test_models_of_a_run_name_its_stop_tokens_and_the_card_its_stop_texts(tmp_path: Path) -> None:
    sampling = {"stop_token_ids": [5, "77"]}
    run = train(tiny(GRPOConfig, tmp_path, run={"steps": 1}, sampling=sampling, eval={"items": 0}, save={"every": 1}))
    for number, name in enumerate((str(run), f"{run}@1")):
        assert main(["export", name, "--to", str(tmp_path / str(number))]) == 0
        card = (tmp_path / str(number) / "README.md").read_text()
        assert "| `sampling.stop_token_ids` | `[5, '77']` |" in card
        assert 'ended with these texts, too: `"77"`. No file of a model ends completions with a text: ' in card
    policy = find_policy(tmp_path, 1)
    for folder in (run / "model", policy, tmp_path / "0", tmp_path / "1"):
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings["eos_token_id"] == [5], "a list with ids replaces the end tokens"
        assert "stop_strings" not in settings, "transformers would then refuse to generate without a tokenizer"
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    assert exported.generate(torch.tensor([[4]]), max_new_tokens=2).shape[0] == 1
    assert main(["eval", str(run), "--backend", "inline", "--eval.items", "2"]) == 0


def test_the_card_has_the_settings_with_which_the_model_was_written(tmp_path: Path) -> None:
    """A later resume changes config.yaml, and not what an earlier checkpoint was trained with."""

    def resume(steps: int, lr: float, stops: Sequence[int | str]) -> Path:
        run: dict[str, Any] = {"steps": steps, "resume": f"{tmp_path}/runs/run" if steps > 1 else ""}
        save, sampling = {"every": 1, "keep": 9}, {"stop_token_ids": stops}
        return train(
            tiny(GRPOConfig, tmp_path, run=run, optim={"lr": lr}, sampling=sampling, eval={"items": 0}, save=save)
        )

    def export(name: str) -> tuple[str, list[int]]:
        folder = tmp_path / f"out{len([*tmp_path.glob('out*')])}"
        assert main(["export", name, "--to", str(folder)]) == 0
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        return (folder / "README.md").read_text(), ends

    for steps, lr, stops in ((1, 0.25, [5, "77"]), (2, 0.125, [6]), (3, 0.0625, [7])):
        run = resume(steps, lr, stops)
    card, ends = export(f"{run}@1")
    assert "| `optim.lr` | `0.25` |" in card and "0.0625" not in card and ends == [5]
    assert "this model. Earlier" not in card and 'ended with these texts, too: `"77"`' in card
    changes = [
        f"- Still at step {step} (config.{step}.yaml): `optim.lr` = `{lr}`" for step, lr in ((1, 0.25), (2, 0.125))
    ]
    card, ends = export(f"{run}@2")
    assert "| `optim.lr` | `0.125` |" in card and "0.0625" not in card and ends == [6]
    assert changes[0] in card and changes[1] not in card and "ended with these texts" not in card
    for name in (f"{run}@3", str(run)):
        card, ends = export(name)
        assert "| `optim.lr` | `0.0625` |" in card and all(line in card for line in changes) and ends == [7]
    shutil.rmtree(run / "checkpoints" / "step-000001")
    (run / "config.2.yaml").write_text("a: [")
    card, _ = export(f"{run}@3")
    assert "- At steps of which no checkpoint is left (config.1.yaml): `optim.lr` = `0.25`" in card
    assert "- Still at step 2: not known, because config.2.yaml of the run is missing or cannot be read" in card
    state = run / "checkpoints" / "step-000003" / "trainer.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "configs": None}))
    (run / "config.2.yaml").unlink()
    card, _ = export(f"{run}@3")
    assert "The checkpoint does not say which of the run's settings were in force" in card and "0.25" not in card


def test_the_card_names_the_model_that_a_run_began_as(tmp_path: Path) -> None:
    """A resume with another model.path has the weights of its checkpoint."""
    for steps, seed in ((1, 0), (2, 1)):
        write_base(tmp_path / f"base{seed}")
        model = {"path": str(tmp_path / f"base{seed}"), "config": {}}
        run = {"steps": steps, "resume": f"{tmp_path}/runs/run" if steps > 1 else ""}
        folder = train(tiny(GRPOConfig, tmp_path, run=run, model=model, eval={"items": 0}, save={"every": 1}))
    assert main(["export", str(folder), "--to", str(tmp_path / "out")]) == 0
    assert f"A model that began as `{tmp_path / 'base0'}`" in (tmp_path / "out" / "README.md").read_text()


def test_a_run_and_its_export_say_that_others_encode_text_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AutoTokenizer makes Qwen2's class of any tokenizer beside a model of that type."""
    fields = {name: value for name, value in MODEL["config"].items() if name != "head_dim"}
    model = {"config": {**fields, "model_type": "qwen2"}}
    config = tiny(GRPOConfig, tmp_path, run={"steps": 1}, model=model, eval={"items": 0})
    others = "AutoTokenizer makes a Qwen2Tokenizer of it, which encodes text otherwise"
    notes = notes_of(lambda: train(config))
    assert sum(others in note for note in notes) == 1
    assert main(["export", f"{tmp_path}/runs/run", "--to", str(tmp_path / "out")]) == 0
    assert others in capsys.readouterr().err
    saved: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert saved.encode("1+2=3") == load_tokenizer(config.model.tokenizer_source).encode("1+2=3")


def test_what_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {**MODEL, "lora": {"rank": 2}}
    train(tiny(GRPOConfig, tmp_path, model=model, save={"every": 1, "keep": 0}, eval={"items": 0}))
    run, to = f"{tmp_path}/runs/run", ["--to", str(tmp_path / "out")]
    for words, said in [
        ([run], "say where the model goes: --to DIR, --push NAME, or both"),
        ([f"{run}@7", *to], "there is no such checkpoint; "),
        ([f"{run}@7", *to], "run has step-000001, step-000002"),
        ([f"{run}@best", *to], "no step of these checkpoints was evaluated"),
        ([f"{run}@worst", *to], "expected RUN@STEP with a number, RUN@best or RUN@latest"),
        ([f"{tmp_path}/nothing", *to], "no run and no checkpoint at "),
        ([run, *to], "the base of the adapters has random weights (model.config): write the merged model with --merge"),
        ([run, "--merge", "--to", run], f"{run} is there already and is not empty"),
        ([run, "--merge", "--push", "no/such/name"], "--push no/such/name: Repo id must be"),
    ]:
        assert main(["export", *words]) == 2
        assert said in capsys.readouterr().err
    weights = next((Path(run) / "checkpoints" / "step-000001" / "policy" / "resume").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    for command in (["export", f"{run}@1", "--merge", *to], ["sample", f"{run}@1", "--prompt", "12="]):
        assert main(command) == 2
        assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


PUSHES = """
import os, sys
from huggingface_hub import constants
from podium.cli import main

run, adapters = sys.argv[1:]
main(["export", run, "--merge", "--push", "me/whole", "--private"])
main(["export", run, "--merge", "--push", "me/whole", "--private"])
main(["export", adapters, "--push", "adapters"])
main(["export", adapters, "--push", "me/adapters", "--private"])
main(["export", adapters, "--push", "other/closed"])
os.environ["HF_TOKEN"] = "hf_of_a_stranger"
main(["export", adapters, "--push", "me/whole"])
constants.ENDPOINT = "http://127.0.0.1:9"
main(["export", adapters, "--push", "me/whole"])
"""


def test_models_are_pushed_by_the_hubs_own_client(finished_lora: Path, tmp_path: Path) -> None:
    """Small files are in the commit itself and large ones are uploaded by LFS. Xet, which has a store of its own, is
    switched off."""
    run = f"{finished_lora}/runs/run"
    with hub_server() as hub:
        hub.refused = ["PUT /lfs/", "POST /api/models/other/closed/commit/"]
        asked = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", PUSHES, run, f"{run}@1"]
        done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    whole, adapters = hub.files["me/whole"], hub.files["me/adapters"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= whole.keys(), done.stderr
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= adapters.keys()
    assert hub.by_lfs >= {"model.safetensors", "adapter_model.safetensors"}
    assert "config.json" not in hub.by_lfs
    assert [hub.settings[name].get("visibility") for name in ("me/whole", "me/adapters")] == ["private", None]
    for files, name in ((whole, "whole"), (adapters, "adapters")):
        for path, content in files.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / path).write_bytes(content)
    words = ["--merge", "--to", str(tmp_path / "out")]
    assert main(["export", run, *words]) == 0
    local, pushed = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "whole"))
    assert torch.equal(compute_logits(local), compute_logits(pushed))
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(finished_lora / "base"), str(tmp_path / "adapters"))

    assert f"pushed to {hub.url}/me/whole\n" in done.stdout
    assert f"adapters of {run}/checkpoints/step-000001 pushed to {hub.url}/me/adapters\n" in done.stdout
    _, *errors = (part.splitlines()[0] for part in done.stderr.split("podium export: --push"))
    said = ["Error while uploading '", "is public", "403 Forbidden", "401", "onnect"]
    for error, part in zip(errors, said, strict=True):
        assert part in error
        assert error.endswith("and push again: files that were uploaded are not uploaded twice") or part == "is public"
    assert "Traceback" not in done.stderr


def test_two_evaluations_are_compared(finished_grpo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are changed by hand, so that one prompt became worse, and one better."""
    run = copy_folder(finished_grpo, tmp_path / "copy") / "runs" / "run"
    files = sorted((run / "evaluations").iterdir())
    assert [file.stem for file in files] == ["step-000000", "step-000002", "step-000003"]
    table = pq.read_table(files[0])
    assert table.num_rows == 4
    for file, scores in ((files[0], [1.0, 0.0, 0.5, 0.0]), (files[1], [0.5, 1.0, 0.5, 0.0])):
        place = table.schema.get_field_index("reward")
        pq.write_table(table.set_column(place, "reward", pa.array(scores)), file)
    capsys.readouterr()
    assert main(["changes", f"{run}@0", f"{run}@2"]) == 0
    said = capsys.readouterr().out
    prompts = table.column("prompt").to_pylist()
    assert said.startswith(
        f"metric    reward\nbefore    0.375  (4 items)  {files[0]}\nafter     0.500  (4 items)  {files[1]}\n"
    )
    assert f"worse     1\nbetter    1\n\nworse     {prompts[0]!r}\nreward    1.000 to 0.500\nbefore " in said
    assert f"\nbetter    {prompts[1]!r}\nreward    0 to 1.000\n" in said
    assert main(["changes", str(run)]) == 0
    assert f"{files[0]}\n" in (said := capsys.readouterr().out)
    assert f"{files[2]}\n" in said
    for words, wrong in [
        ([str(tmp_path)], "no run at "),
        ([f"{run}@0", f"{run}@7"], "expected RUN@STEP, and "),
        ([f"{run}@0", f"{run}@7"], "run evaluated 0, 2, 3"),
        (["a", "b", "c"], "expected two evaluations"),
    ]:
        assert main(["changes", *words]) == 2
        assert wrong in capsys.readouterr().err
