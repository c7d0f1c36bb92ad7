"""The command line: what it prints, how it fails, and what it does not import."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import config as datasets_config
from huggingface_hub import constants

import podium
import podium.cli
from podium.cli import main
from podium.cli.connecting import parse_with_backend
from podium.cli.spinner import StatusSink
from podium.cli.train import _replay_overrides, describe_repeats
from podium.config import load_config
from podium.errors import ConfigError
from podium.runs.run_writer import RunDirectory
from podium.telemetry import Note, emit, flush
from podium.trainer import GRPOConfig, SFTConfig, SFTTrainer
from podium.trainer.preload import PRELOAD
from podium_inference.command import inference_config
from tests.integration.training import MODEL, tiny, write_copy_task

READS_SETTINGS = {
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions", "yaml", "cloudpickle",
}  # fmt: skip


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {json.dumps(MODEL)}\ndata: {{train: {write_copy_task(tmp_path)}}}\nrun: {{dir: {tmp_path}/runs}}\n"
        "sampling: {max_new_tokens: 3}\n"
    )
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("word", ["x\udcff", "\ud800", "--data.train=\udfff"])
@pytest.mark.parametrize("words", [["train", "grpo"], ["eval"], ["sample"], ["export"], ["runs"], ["view"]])
def test_an_argument_that_is_not_utf8_is_named(words: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *words, word)
    assert (status, out) == (2, "")
    assert (
        err
        == f"podium {words[0]}: there is an argument {word!r}, which is not UTF-8: rename the file, if it names one\n"
    )
    assert err.isascii()


@pytest.mark.parametrize(
    ("words", "said", "needed"),
    [
        ("train grpo --algorithm.advantge x", "did you mean algorithm.advantage?", READS_SETTINGS),
        ("train grpo --keys", "--algorithm.advantage grpo", READS_SETTINGS),
        ("train grpo --help", "--dry-run", READS_SETTINGS),
        ("--help", "podium COMMAND --help", set[str]()),
    ],
)
def test_mistakes_and_help_wait_for_no_heavy_import(words: str, said: str, needed: set[str]) -> None:
    """They are answered in half a second because of what they leave out: importing torch alone takes seconds."""
    script = (
        "import sys; from podium.cli import main\n"
        f"try: main({words.split()})\n"
        "except SystemExit: pass\n"
        "files = {name: str(getattr(module, '__file__', '')) for name, module in sys.modules.items()}\n"
        "found = {name.partition('.')[0] for name, file in files.items() if 'site-packages' in file}\n"
        "print('\\nimported', *found)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200)
    assert said in done.stdout + done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "imported"
    assert {name for name in last[1:] if not name.startswith("_")} - {"podium"} <= needed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["trian"],
            "there is no command 'trian'; did you mean train?; the commands are train, backends, ",
        ),
        (["EVAL"], "; did you mean eval?"),
        (["fly"], "there is no command 'fly'; the commands are train, "),
        (["grpo", "--optim.lr", "1"], "'grpo' is a recipe: write podium train grpo"),
        (
            ["train", "grop"],
            "there is no recipe 'grop'; did you mean grpo?; grpo learns from rewards",
        ),
        (["train", "GRPO"], "there is no recipe 'GRPO'; did you mean grpo?"),
        (
            ["train", "fsdp"],
            "there is no recipe 'fsdp'; grpo learns from rewards, ppo learns from rewards",
        ),
        (["train", "IPO"], "ipo is a setting of the recipe dpo: podium train dpo --algorithm.loss ipo"),
        (["train", "opo"], "opo is a setting of the recipe grpo: podium train grpo --algorithm.advantage opo"),
        (["train", "rloo"], "rloo is a preset of the recipe grpo: podium train grpo --recipe rloo"),
        (["train", "gspo", "--optim.lr", "1e-6"], "podium train grpo --recipe gspo"),
        (["train"], "the following arguments are required: grpo|ppo|sft|dpo|rm"),
    ],
)
def test_a_word_that_is_no_command_is_answered_by_the_nearest_or_by_what_there_is(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_commands_of_one_package_have_one_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.count("\n    eval, export, sample\n") == 1


def test_a_recipe_of_a_package_that_is_absent_is_answered_by_the_package_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.runs.recipes.list_entry_points", lambda group: [])
    with pytest.raises(SystemExit):
        main(["train", "dpo"])
    said = capsys.readouterr().err
    assert "there is no recipe 'dpo';" in said
    assert "plugins/podium-preferences" in said
    with pytest.raises(SystemExit):
        main(["train", "ppi"])
    assert "there is no recipe 'ppi'; did you mean ppo?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train", "--help"], ["eval", "--help"], ["sample", "--help"], ["--version"]])
def test_help_of_commands(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "podium" in capsys.readouterr().out


def test_the_help_describes_the_commands_of_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search(r"^ +runs, view +show runs in a browser: .*\(podium-view\)$", capsys.readouterr().out, re.M | re.S)


def test_a_command_of_a_package_that_is_absent_says_how_it_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podium.cli, "list_entry_points", lambda group: [])
    with pytest.raises(SystemExit) as ended:
        main(["view", "runs/x"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "there is no command 'view'" in said
    assert "podium-NAME, are installed in its clone by: pip install ./plugins/podium-NAME" in said


def test_a_mistake_is_one_clean_message(capsys: pytest.CaptureFixture[str], yaml: Path) -> None:
    status, out, err = run(capsys, "train", "grpo", "--config", str(yaml), "--optim.lrr", "1e-4")
    assert (status, out) == (2, "")
    assert err == "podium train: unknown key optim.lrr (value 0.0001); did you mean optim.lr?\n"


def test_debug_shows_where_it_was_raised(capsys: pytest.CaptureFixture[str], yaml: Path) -> None:
    status, _, err = run(capsys, "train", "grpo", "--config", str(yaml), "--optim.lrr", "1e-4", "--debug")
    assert status == 2
    assert "Traceback" in err
    assert ConfigError.__name__ in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "grpo", "--config", "absent.yaml"], "cannot read the configuration absent.yaml"),
        (["train", "sft", "--resume", "absent"], "no run at absent: it has no config.yaml"),
        (["train", "sft", "--resume", "a", "--config", "b"], "leave out --config"),
        (["train", "grpo", "--optim.lr"], "--optim.lr has no value"),
        (["train", "grpo", "steps=3"], "'steps=3' is no setting"),
        (["train", "grpo", "--config", "a.yaml", "--config=b.yaml"], "--config is given 2 times (a.yaml, b.yaml), and"),
        (["train", "grpo", "--recipe", "dapo", "--recipe", "gspo"], "--recipe is given 2 times (dapo, gspo)"),
        (["eval", "a", "--suite", "x:y", "--suite", "x:z"], "--suite is given 2 times (x:y, x:z)"),
        (["sample", "a", "--best", "1.jsonl", "--best", "2.jsonl"], "--best is given 2 times"),
        (["export", "a", "--to", "b", "--to", "c"], "--to is given 2 times (b, c)"),
        (["train", "grpo", "--optim.lr", "1", "run.yaml"], "'run.yaml' is no setting: write --config run.yaml"),
        (["train", "grpo", "--dryrun", "--optim.lr", "1"], "there is no option --dryrun; did you mean --dry-run?"),
        (["train", "sft", "--dry_run"], "there is no option --dry_run; did you mean --dry-run?"),
        (["sample", "a", "--prompts", "x"], "there is no option --prompts; did you mean --prompt?"),
        (["export", "a", "--to", "b", "--optim.lr", "1"], "--optim.lr is no setting of podium export, which reads"),
        (["export", "a", "--to", "b", "--sampling.n", "4"], "which reads model.* and data.chat_template"),
        (["export", "a", "--to", "b", "--format", "gguf"], "--format is no setting of podium export"),
        (["train", "sft", "--run.resume", "absent"], "no run at absent: it has no config.yaml"),
        (["train", "grpo"], "data.train is not set"),
        (["eval", "runs/absent", "--eval.items", "0"], "eval.items = 0"),
        (["eval", "/absent"], "no run and no model at /absent"),
        (["sample", "/"], "/ is no run (it has no config.yaml) and no model (it has no config.json)"),
    ],
)
def test_mistakes_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *arguments, *(["--backend", "inline"] if arguments[0] == "eval" else []))
    assert status == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_values_of_a_list_that_are_given_one_by_one_are_told() -> None:
    words = (
        "--data.train a.jsonl --reward.name=exact --data.train b.jsonl --optim.lr 1 --optim.lr 2 --reward.name exact"
    )
    (said,) = describe_repeats(GRPOConfig, words.split())
    assert said == (
        "--data.train is given 2 times, and the last one alone counts; several values are one list: "
        "--data.train '[A, B]'"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model.config.num_hidden_layers -1", "model.config does not fit 'qwen3': .*num_hidden_layers"),
        ("--model.config.num_hidden_layers x", "model.config does not fit 'qwen3': .*num_hidden_layers"),
        ("--model.config.hidden_size 0", "model.config.hidden_size = 0: expected at least 1"),
        ("--model.config.vocab_size -5", "model.config.vocab_size = -5: expected at least 1"),
        ("--model.config.intermediate_size -5", "model.config makes no causal language model: .*negative dimension"),
        (f"--run.name {'x' * 300}", "the run's directory .* cannot be used: File name too long; set run.dir"),
        (f"--run.dir {'x' * 300}", "the run's directory .* cannot be used: File name too long; set run.dir"),
        ("--run.dir file", "the run's directory file/.* cannot be used: Not a directory: .*; set run.dir"),
        ("--run.dir /proc/nowhere", "the run's directory /proc/nowhere/.* cannot be used: .*; set run.dir"),
        (f"--data.train {'x' * 300}", "neither a file nor a dataset that can be loaded"),
        (f"--data.train {'x' * 300}.jsonl", "no file x"),
        ("--data.train ~nobody_of_this_name/a.jsonl", "no file ~nobody_of_this_name/a.jsonl"),
        ("--run.name a\0b", r"--run.name 'a.x00b' is not valid YAML: .* not text: NUL"),
        (f"--resume {'x' * 300}", "no run at x"),
        ("--model.tokenizer file", "no tokenizer on the hub at 'file'"),
    ],
)
def test_mistakes_that_end_in_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    yaml: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", True)
    Path("file").write_text("")
    config = [] if "--resume" in words else ["--config", str(yaml), "--sampling.max_new_tokens", "3"]
    status, out, err = run(capsys, "train", "sft", *config, *words.split(" "), "--backend", "inline")
    assert status == 2
    assert "Traceback" not in out
    assert re.fullmatch(f"podium train: .*{said}.*\n", err)


def test_a_mistake_that_a_worker_finds_is_said_once(capsys: pytest.CaptureFixture[str], yaml: Path) -> None:
    words = ["--config", str(yaml), "--backend", "inline", "--model.attention", "nonsense", "--eval.items", "0"]
    status, _, err = run(capsys, "train", "sft", *words)
    assert status == 2
    assert err.count("is not supported") == err.count("\n") == 1
    assert err.endswith("(raised in a worker; --debug shows where)\n")
    assert "Traceback of rank 0" in run(capsys, "train", "sft", *words, "--run.name", "again", "--debug")[2]


def test_a_disk_that_is_full_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, yaml: Path
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/x/summary.json")

    monkeypatch.setattr(RunDirectory, "write_config", full)
    status, _, err = run(capsys, "train", "sft", "--config", str(yaml), "--backend", "inline", "--eval.items", "0")
    assert status == 2
    assert err == "podium train: cannot write /runs/x/summary.json: No space left on device; make room on that disk\n"


def test_a_backend_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], yaml: Path) -> None:
    status, _, err = run(capsys, "train", "grpo", "--config", str(yaml), "--backend", "inlin")
    assert status == 2
    assert "did you mean inline?" in err


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_a_run_that_a_configuration_resumes_and_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], yaml: Path, tmp_path: Path, words: list[str]
) -> None:
    config = ["--config", str(yaml), "--run.resume", str(tmp_path / "absent")]
    status, out, err = run(capsys, "train", "sft", *config, *words)
    assert status == 2
    assert f"no run at {tmp_path / 'absent'}: it has no config.yaml" in err
    assert out == ""


def test_a_run_of_another_recipe_is_not_resumed(capsys: pytest.CaptureFixture[str], yaml: Path, tmp_path: Path) -> None:
    for recipe, batch in (("grpo", "prompts: 4"), ("sft", "examples: 4")):
        (tmp_path / recipe).mkdir()
        (tmp_path / recipe / "config.yaml").write_text(f"{yaml.read_text()}batch: {{{batch}}}\n")
    status, _, err = run(capsys, "train", "ppo", "--resume", str(tmp_path / "sft"))
    assert status == 2
    assert f"is a run of another recipe: podium train sft --resume {tmp_path / 'sft'}" in err
    status, _, err = run(capsys, "train", "sft", "--run.resume", str(tmp_path / "grpo"))
    assert status == 2
    assert "podium train grpo --resume" in err
    status, out, _ = run(capsys, "train", "grpo", "--run.resume", str(tmp_path / "grpo"), "--dry-run")
    assert status == 0
    assert "step         4 prompts" in out  # the run's own settings


def test_a_runs_model_answers_once_unless_asked_for_more(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text("sampling: {n: 8, max_new_tokens: 5}\n")
    config = inference_config(str(tmp_path), None, [])
    assert (config.sampling.n, config.sampling.max_new_tokens) == (1, 5)
    assert inference_config(str(tmp_path), None, ["--sampling.n", "3"]).sampling.n == 3


def test_an_option_given_to_a_runs_model_leaves_the_runs_other_options(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text("environment: {name: 'm:play', options: {level: 2}}\n")
    name = ["--environment.name", "m:play"]  # which a run of somebody else does not choose
    config = inference_config(str(tmp_path), None, [*name, "--environment.options.at_once", "3"], needs=("reward",))
    assert config.environment.options == {"level": 2, "at_once": 3}
    whole = inference_config(str(tmp_path), None, [*name, "--environment.options", "{at_once: 3}"], needs=("reward",))
    assert whole.environment.options == {"at_once": 3}


def test_a_dry_run_prints_settings_and_plan_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], yaml: Path, tmp_path: Path
) -> None:
    split = ["--placement.layout", "split", "--placement.ranks", "2", "--algorithm.minibatches", "4"]
    kl = ["--algorithm.kl_in", "loss", "--algorithm.kl_coef", "0.01"]
    status, out, _ = run(
        capsys, "train", "grpo", "--config", str(yaml), "--dry-run", "--batch.prompts", "4", *split, *kl
    )
    assert status == 0
    assert "kl_coef: 0.01" in out
    assert "process 0    cpu     policy, reference" in out
    assert "process 2    cpu     generator" in out
    assert "4 prompts x 8 completions = 32 rows" in out
    assert "1 epoch x 4 minibatches = 4 optimizer steps of 8 rows; 4 a rank" in out
    assert "200 steps = 800 optimizer steps" in out
    assert "reference weights" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.everyday("local")
@pytest.mark.parametrize("backend", ["inline", "local"])
def test_a_dry_run_asks_the_backend_for_accelerators(
    capsys: pytest.CaptureFixture[str], yaml: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """And not torch, which sees none here."""
    for visible, device in (("0,1", "gpu"), ("", "cpu")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        status, out, _ = run(capsys, "train", "grpo", "--config", str(yaml), "--dry-run", "--backend", backend)
        assert status == 0
        assert f"process 0    {device}     policy" in out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    split = ["--placement.layout", "split", "--placement.ranks", "1", "--placement.generator_ranks", "2"]
    status, out, _ = run(capsys, "train", "grpo", "--config", str(yaml), "--dry-run", "--backend", backend, *split)
    assert "process 0    gpu/2   policy" in out
    assert "process 1    gpu     generator" in out
    assert "process 2    gpu/2   generator" in out


def test_a_dry_run_checks_what_a_run_would_check(capsys: pytest.CaptureFixture[str], yaml: Path) -> None:
    status, _, err = run(capsys, "train", "grpo", "--config", str(yaml), "--dry-run", "--data.train", "")
    assert status == 2
    assert "data.train is not set" in err
    wrong = {"lokal": "did you mean local?", "local://here": "unexpected keyword argument 'address'"}
    wrong |= {"local --backend.ecko true": "unexpected keyword argument 'ecko'"}
    for backend, said in wrong.items():
        words = ["--config", str(yaml), "--dry-run", "--backend", *backend.split()]
        status, _, err = run(capsys, "train", "grpo", *words)
        assert status == 2
        assert said in err


def test_notes_of_eval_and_sample_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """They say what the model does not see, or that no completion was graded."""
    with StatusSink("loading runs/a"):
        emit(Note("1 of 4 prompts hold \x1b[2J"))
        flush()
    assert capsys.readouterr().err == "loading runs/a\n1 of 4 prompts hold \\x1b[2J\n"


def test_a_replay_of_a_run_with_a_goal_has_none(tmp_path: Path) -> None:
    """Nothing is evaluated in a replay."""
    (tmp_path / "run.yaml").write_text("eval: {every: 2, stop_at: 0, patience: 3}")
    config = load_config(GRPOConfig, tmp_path / "run.yaml", _replay_overrides("runs/a", []))
    assert (config.eval.items, config.eval.stop_at, config.eval.patience) == (0, None, 0)
    assert (config.engine.name, config.engine.replayed_run) == ("replay", "runs/a")
    with pytest.raises(ConfigError, match=r"engine\.options\.prefill_tokens"):
        load_config(GRPOConfig, None, _replay_overrides("runs/a", ["--engine.options.prefill_tokens", "64"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sampling.stop_token_ids=[999]", "the stop token 999 (sampling.stop_token_ids"),
        ("--eval.items 0 --eval.stop_at 0.5", "eval.stop_at = 0.5 with eval.items = 0"),
        ("--eval.items 0 --eval.stop_at 0", "eval.stop_at = 0 with eval.items = 0"),
        ("--eval.items 0 --eval.patience 3", "eval.patience = 3 with eval.items = 0"),
        ("--eval.every 0 --eval.stop_at 0.5", "eval.stop_at = 0.5 with eval.every = 0"),
        ("--eval.every 0 --eval.patience 3", "eval.patience = 3 with eval.every = 0"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_settings_without_effect_are_refused_before_the_start(
    capsys: pytest.CaptureFixture[str], yaml: Path, tmp_path: Path, words: str, said: str, dry: bool
) -> None:
    place = ["--run.dir", str(tmp_path / "runs"), "--backend", "inline", *(["--dry-run"] if dry else [])]
    status, _, err = run(capsys, "train", "grpo", "--config", str(yaml), *place, *words.split())
    assert status == 2
    assert said in err
    assert not [*tmp_path.glob("runs/*/config.yaml")]


def test_options_of_a_backend_are_taken_out_and_read_as_yaml() -> None:
    words = ["--backend.address", "auto", "--backend.init.num_cpus=4", "--backend.echo", "true"]
    parser = argparse.ArgumentParser()
    _, overrides, backend = parse_with_backend(parser, ["--run.steps", "3", *words, "--eval.items", "-1"], "local")
    assert backend == ("local", {"address": "auto", "init": {"num_cpus": 4}, "echo": True}, words)
    assert overrides == ["--run.steps", "3", "--eval.items", "-1"]


@pytest.mark.parametrize("command", ["train", "eval", "sample"])
def test_mistakes_in_a_backends_options(capsys: pytest.CaptureFixture[str], yaml: Path, command: str) -> None:
    kind = [command, "sft", "--config", str(yaml)] if command == "train" else [command, "hub-name"]
    for words, message in [
        (["--backend.echo"], "--backend.echo has no value"),
        (["--backend.", "x"], "--backend. names no option"),
        (["--backend.thread", "true"], "connect('inline'): "),
    ]:
        status, _, err = run(capsys, *kind, *words, "--backend", "inline")
        assert status == 2
        assert message in err
    assert "unexpected keyword argument 'thread'" in err


def test_a_connected_cluster_takes_no_options(tmp_path: Path) -> None:
    with (
        podium.connect("inline") as cluster,
        pytest.raises(ConfigError, match=r"backend_options = .*: <Cluster inline .* is connected already"),
    ):
        SFTTrainer(tiny(SFTConfig, tmp_path), cluster=cluster, backend_options={"echo": True}, show=False).fit()


def test_adapters_train_little(capsys: pytest.CaptureFixture[str], yaml: Path) -> None:
    _, out, _ = run(capsys, "train", "ppo", "--config", str(yaml), "--dry-run", "--model.lora.rank", "2")
    # q 32+32, k and v 32+16 each, o 32+32, gate and up 32+64 each, down 64+32, times rank 2
    assert "0.01 M parameters, 0.00 M trained" in out
    assert "critic with optimizer" in out
    assert "generator's own weights" in out


def test_keys_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "train", "ppo", "--keys")
    assert status == 0
    assert "--algorithm.advantage gae " in out
    assert "--placement.generator_ranks null " in out
    assert "--run.trackers [] " in out
    assert "\nmodel.lora: Low-rank adapters by peft. " in out
    assert "\n  --algorithm.gamma 1.0  (a number from 0 to 1)\n      gae and reinforce_pp discount" in out
    assert "``" not in out


def test_backends_lists_what_each_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "backends")
    assert status == 0
    assert "inline     can: " in out
    assert "podium.backends.local:LocalBackend" in out


def test_a_run_says_at_once_what_it_is_and_then_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], yaml: Path
) -> None:
    words = ["--config", str(yaml), "--backend", "inline", "--eval.items", "0", "--save.model", "false"]
    status, out, _ = run(capsys, "train", "sft", *words, "--run.name", "named", "--run.steps", "1")
    assert status == 0
    first, second, *rest = out.splitlines()
    assert first.startswith("podium sft  run ")
    assert "/named  model " in first
    assert "  data " in first
    assert second == "importing torch and transformers"
    waits = [line.split()[0] for line in rest[: [line[:3] for line in rest].index("sft")]]
    assert [word for word in waits if word in ("reading", "tokenizing", "loading")] == [
        "reading", "tokenizing", "loading",
    ]  # fmt: skip


def test_worker_processes_preload_the_modules_of_all_roles() -> None:
    from podium.trainer import roles

    assert {cls.__module__ for cls in roles._ROLES.values()} <= {*PRELOAD}


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "sft"])
def test_the_list_of_settings_says_in_words_what_each_takes(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    status, out, _ = run(capsys, "train", recipe, "--keys")
    assert status == 0
    assert not re.search(r"Annotated|FieldInfo|typing\.|<class", out)
    if recipe == "grpo":
        assert "--algorithm.correction auto  (" in out


def test_a_command_in_a_directory_that_was_removed_says_so(tmp_path: Path) -> None:
    code = (
        "import os, sys, tempfile; folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder); "
        "from podium.cli import main; sys.exit(main(['train', 'grpo', '--data.train', 'a.jsonl', '--model.path', 'm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the directory in which it was started does not exist any more" in done.stderr
    assert "room on the disk" not in done.stderr
