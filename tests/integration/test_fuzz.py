"""Ten thousand broken inputs at the doors of the command line: each is taken, or refused by an error of Podium's.

Anything else that is raised would be a traceback for the user. The suite tries every tenth input each day,
`make test-all` every third, and `make fuzz` all. An input that fails is named by its kind and number, and
``python -m tests.integration.test_fuzz KIND NUMBER`` shows its traceback.
"""

import contextlib
import csv
import gzip
import io
import json
import logging
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
import yaml
from huggingface_hub import constants

from podium.cli import main
from podium.config import config_to_yaml, load_config
from podium.errors import PodiumError
from podium.models import char_tokenizer, load_tokenizer
from podium.models.loading import position_limit
from podium.models.manifest import check_manifest, file_sums, write_manifest
from podium.rollout.tasks import DataConfig, encode_pairs, encode_prompts, load_examples
from podium.runs.checkpoint_folders import TrainerState
from podium.runs.recipes import find_recipe, list_recipes
from podium.runs.run_writer import RunDirectory
from podium.trainer.checks.preflight import check_settings, with_stop_tokens
from podium_inference.command import inference_config

CONFIGS = {name: find_recipe(name).config for name in list_recipes()}
TOKENIZER = char_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+= ")
TOKENIZER.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}<eos>{% endfor %}"

# Values that have broken programs: of every type, at the ends of ranges, deep, huge, half of something.
# fmt: off
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**30), 1.5, -0.0, 1e308, 1e-320,
    float("inf"), float("-inf"), float("nan"), "", " ", "0", "-1", "null", "true", "nan", "1e4", "~", "~nobody/x",
    "..", "/", "../../x", "/proc/self/mem", "/dev/null", "\0", "a\0b", "\n", "\ud800", "\udfff", "\u202e", "x" * 300,
    "a:b", "a:b:c", ":", "x.py:f", "/x.py:f", "json:loads", "os:nothing", "chars:", "chars:a", "reasoning_gym:",
    "reasoning_gym:x", "*.jsonl", "[", "**/*", "{", "}", "{x}", "{0}", "{x.y}", "{x[0]}", "%s",
    "\u00e9", "\u65e5\u672c",
    [], {}, [None], [[]], [{}], {"": ""}, {"a": {"b": {"c": []}}}, [1, "a", None, {}], {1: 2}, {None: None},
    [1.0, 2.0], [0.9, 0.999], ["a", "b"], ["tensorboard"], {"model_type": "qwen3"}, {"model_type": []}, "grpo", "gpt2",
]
SCRAPS = [
    b"\0", b"\xff\xfe", b"{", b"}", b"[" * 3000, b'"', b",", b"\n", b"\r", b":", b"- ", b"&a [*a, *a]", b"!!python/x ",
    b"null", b"NaN", b"1e999", b"9" * 5000, b"\\ud800", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"%", b"@", b"*x", b"<<: *x",
    b"!!binary x", b"2024-13-45", b"? ", b"|", b">", b"---\n", b"...\n", b"\t", b"#",
]
# fmt: on


def damaged(data: bytes, rng: random.Random) -> bytes:
    """``data`` with some bytes flipped, removed, doubled or replaced."""
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(broken) + 1)
        match rng.randrange(6):
            case 0 if broken:
                broken[min(at, len(broken) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del broken[at : at + rng.choice((1, 1, 10, 10**6))]
            case 2:
                broken[at:at] = rng.choice(SCRAPS)
            case 3:
                broken[at:at] = broken[max(0, at - rng.randrange(40)) : at]
            case 4:
                broken[at:at] = json.dumps(rng.choice(NASTY)).encode()
            case _:
                broken[at : at + rng.randrange(8)] = rng.randbytes(rng.randrange(8))
    return bytes(broken)


def spoiled(value: Any, rng: random.Random) -> Any:
    """``value`` with one part of it, at any depth, replaced, removed or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        changed = {**value}
        match rng.randrange(8):
            case 0:
                del changed[name]
            case 1:
                changed[rng.choice(("", "x", f"{name}{name}", 7))] = changed.pop(name)
            case _:
                changed[name] = spoiled(value[name], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return [*value[:at], spoiled(value[at], rng), *value[at + 1 :]]
    return rng.choice(NASTY)


# -- the doors -------------------------------------------------------------------------------------------------------


class Doors:
    """The kinds of input, each a method of the input's own random generator. ``home`` is the working directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.data = home / "data.jsonl"
        self.data.write_text("".join(json.dumps({"prompt": f"{n} + 1", "answer": n}) + "\n" for n in range(30)))
        base = {
            "model": {"config": {"model_type": "qwen3", "hidden_size": 32}, "tokenizer": "chars:0123456789+ "},
            "data": {"train": str(self.data)},
            "run": {"dir": str(home / "runs"), "steps": 1},
        }
        self.base = base
        self.configs = {
            name: json.loads(json.dumps(yaml.safe_load(config_to_yaml(load_config(cls, self._written(base))))))
            for name, cls in CONFIGS.items()
        }
        self.rows = [
            {"prompt": "1 + 1 =", "answer": 2, "level": 1.5},
            {"prompt": [{"role": "user", "content": "hi"}], "answer": "ho", "tools": []},
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
            {"prompt": "a", "completion": [{"role": "assistant", "content": [{"type": "text", "text": "b"}]}]},
        ]
        self.model = home / "model"
        TOKENIZER.save_pretrained(self.model)
        safetensors.torch.save_file({"x": torch.zeros(3)}, self.model / "model.safetensors")
        settings = {"model_type": "qwen3", "hidden_size": 32, "vocab_size": 50, "num_hidden_layers": 1}
        (self.model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 64}))
        (self.model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
        self.run = home / "run"
        self._make_run()

    def _written(self, values: Any) -> Path:
        path = self.home / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def _make_run(self) -> None:
        step = self.run / "checkpoints" / "step-000001"
        (step / "policy").mkdir(parents=True)
        (self.run / "model").mkdir()
        (self.run / "config.yaml").write_text(yaml.safe_dump(self.base))
        (self.run / "metrics.jsonl").write_text(
            '{"kind": "step", "step": 1, "loss": 0.5}\n{"kind": "eval", "step": 2}\n'
        )
        (self.run / "summary.json").write_text('{"steps": 1}')
        state = {"step": 1, "prompts": {"seed": 0, "items": 3, "epoch": 0, "position": 1}, "first": None, "last": None}
        (step / "trainer.json").write_text(json.dumps(state))
        write_manifest(step, [file_sums([step / "trainer.json"])])
        (self.run / "checkpoints" / "latest").symlink_to("step-000001")

    def configuration(self, rng: random.Random) -> None:
        """A configuration file of any recipe, with settings of the command line on top."""
        recipe = rng.choice(list(CONFIGS))
        values: Any = self._some(recipe, rng)
        for _ in range(rng.choice((1, 1, 1, 3))):
            values = spoiled(values, rng)
        with contextlib.suppress(UnicodeEncodeError):
            data = json.dumps(values).encode() if rng.random() < 0.5 else yaml.safe_dump(values).encode()
            (self.home / "run.yaml").write_bytes(damaged(data, rng) if rng.random() < 0.3 else data)
        self._check(recipe, self.home / "run.yaml", self._overrides(rng) if rng.random() < 0.3 else [])

    def overrides(self, rng: random.Random) -> None:
        """Settings of the command line."""
        recipe = rng.choice(list(CONFIGS))
        self._check(recipe, self._written(self.base), self._overrides(rng))

    def _some(self, recipe: str, rng: random.Random) -> dict[str, Any]:
        """A few sections: a whole configuration takes long to read."""
        whole = self.configs[recipe]
        return {**self.base, **{name: whole[name] for name in rng.sample(list(whole), 2)}}

    def _overrides(self, rng: random.Random) -> list[str]:
        words: list[str] = []
        for _ in range(rng.choice((1, 1, 2))):
            section, keys = rng.choice(list(self.configs["ppo"].items()))
            key = rng.choice([*keys, "", "x", "config.x", "lora.rank", "options.a.b"])
            dotted = rng.choice((f"{section}.{key}", f"{section}.{key}", section, f"{section}..{key}", key, ".", "-"))
            value: Any = rng.choice(NASTY)
            with contextlib.suppress(TypeError):
                value = value if isinstance(value, str) else json.dumps(value)
            if rng.random() < 0.2:
                value = damaged(str(value).encode(errors="replace"), rng).decode(errors="surrogateescape")
            words += [f"--{dotted}={value}"] if rng.random() < 0.3 else [f"--{dotted}", str(value)]
        return words

    def _check(self, recipe: str, path: Path, words: list[str]) -> None:
        config = load_config(CONFIGS[recipe], path, words)
        check_settings(config)
        if path.stat().st_size % 5:  # only now and then, because it takes long
            return
        again = self.home / "again.yaml"
        again.write_text(config_to_yaml(config))
        assert config_to_yaml(load_config(CONFIGS[recipe], again)) == again.read_text(), "read as it was written"

    def command_line(self, rng: random.Random) -> None:
        """Words of the command line, most of them known ones."""
        command = rng.choice(["train", "train", "eval", "sample", "backends", "", "x"])
        known = ["grpo", "sft", "--config", "run.yaml", "--resume", "run", "--dry-run", "--keys", "--backend", "inline"]
        known += [
            "--backend.x",
            "--backend.",
            "--prompt",
            "--help",
            "model",
            "--data.train",
            "data.jsonl",
            "--run.name",
        ]
        words = [str(rng.choice(known if rng.random() < 0.7 else NASTY)) for _ in range(rng.randrange(7))]
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(SystemExit),
            mock.patch("podium_dryrun.command.describe_plan", lambda config, *_: str(check_settings(config))),
            mock.patch("podium_dryrun.data.describe_data", str),
            mock.patch("podium.trainer.PPOTrainer", _NoTrainer),
            mock.patch("podium.trainer.SFTTrainer", _NoTrainer),
            mock.patch("podium.connect", _refuse),
        ):
            main([command, *words])

    def data_file(self, rng: random.Random) -> None:
        """A file of any kind, with rows that have something wrong, loaded and encoded."""
        rows = [spoiled(row, rng) if rng.random() < 0.5 else row for row in rng.choices(self.rows, k=3)]
        kind = rng.choice(list(WRITERS))
        try:
            data = WRITERS[kind]([row for row in rows if isinstance(row, dict)] if kind != ".jsonl" else rows)
        except Exception:  # noqa: BLE001 - what the format itself cannot hold
            data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        path = self.home / f"rows{kind}"
        path.write_bytes(damaged(data, rng) if rng.random() < 0.5 else data)
        settings: dict[str, Any] = {}
        if rng.random() < 0.3:
            name = rng.choice(["bad_rows", "system_prompt", "prompt_column", "answer_column", "chat_template"])
            settings[name] = rng.choice(
                ["{prompt}", "{prompt[0]}", "{level.real}", "{x!r}", "{", "none", "level", "tools"]
            )
        config = DataConfig(train=str(path), holdout=rng.choice((0.0, 0.5)), **settings)
        examples = load_examples(config.train, config, rng.choice(("train", "test")))
        encode = rng.choice((encode_prompts, encode_pairs))
        assert len(list(encode(examples, TOKENIZER, config).token_ids)) <= len(examples)

    def chat_template(self, rng: random.Random) -> None:
        """A chat template that was damaged, with all that is asked of one."""
        path = self.home / "chat.jinja"
        template = rng.choice((str(TOKENIZER.chat_template), GENERATION))
        path.write_bytes(damaged(template.encode(), rng))
        config = DataConfig(train=str(self.data), chat_template=str(path), holdout=0)
        (self.home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        examples = load_examples(str(self.home / "rows.jsonl"), config)
        with_stop_tokens(self.sampling, self.no_model, TOKENIZER, config)
        encode_pairs(examples, TOKENIZER, config)

    def model_directory(self, rng: random.Random) -> None:
        """The directory of a model and its tokenizer, one file of which is damaged."""
        folder = self.home / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.model, folder)
        file = rng.choice([path for path in folder.iterdir() if path.suffix == ".json"])
        if rng.random() < 0.6:
            file.write_text(json.dumps(spoiled(json.loads(file.read_text()), rng)))
        else:
            file.write_bytes(damaged(file.read_bytes(), rng))
        model = type(self.no_model)(path=str(folder))
        if file.name != "config.json":
            tokenizer = load_tokenizer(str(folder))
            with_stop_tokens(self.sampling, model, tokenizer, DataConfig())
        else:
            position_limit(model)

    def run_directory(self, rng: random.Random) -> None:
        """The directory of a run, one file of which is damaged, as a resume and an evaluation read it."""
        folder = self.home / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.run, folder, symlinks=True)
        file = rng.choice([path for path in folder.rglob("*") if path.is_file()])
        match rng.randrange(6):
            case 0:
                file.unlink()
            case 1:
                file.unlink()
                file.mkdir()
            case 2 if file.suffix == ".json":
                file.write_text(json.dumps(spoiled(json.loads(file.read_text()), rng)))
            case _:
                file.write_bytes(damaged(file.read_bytes(), rng))
        with contextlib.suppress(PodiumError):
            inference_config(str(folder), None, [])
        load_config(CONFIGS["grpo"], folder / "config.yaml")
        directory = RunDirectory(folder, resume=True)
        with contextlib.closing(directory):
            latest = directory.checkpoints.latest()
            directory.rewind(1)
        if latest is not None:
            with contextlib.suppress(PodiumError):
                TrainerState.read(latest)
            check_manifest(latest, others=["policy"])

    @property
    def no_model(self) -> Any:
        from podium.models import ModelConfig

        return ModelConfig(config={"model_type": "qwen3"}, tokenizer="chars:0")

    @property
    def sampling(self) -> Any:
        from podium.rollout.sampling import SamplingParams

        return SamplingParams(max_new_tokens=3)


GENERATION = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<eos>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


class _NoTrainer:
    def __init__(self, config: Any, **others: Any) -> None:
        check_settings(config)
        raise PodiumError("a run would start")


def _refuse(*arguments: Any, **options: Any) -> Any:
    raise PodiumError("workers would start")


def _csv(rows: list[Any]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, sorted({str(name) for row in rows for name in row}))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _table(rows: list[Any], write: Callable[[Any, Any], Any]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    write(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def _stream(table: Any, sink: Any) -> None:
    with pyarrow.ipc.new_stream(sink, table.schema) as file:
        file.write_table(table)


def _lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


WRITERS: dict[str, Callable[[list[Any]], bytes]] = {
    ".jsonl": _lines,
    ".json": lambda rows: json.dumps(rows).encode(),
    ".csv": _csv,
    ".jsonl.gz": lambda rows: gzip.compress(_lines(rows)),
    ".parquet": lambda rows: _table(rows, pyarrow.parquet.write_table),
    ".arrow": lambda rows: _table(rows, _stream),
}

KINDS = {
    "configuration": 3000,
    "overrides": 2500,
    "command_line": 1000,
    "data_file": 2000,
    "chat_template": 300,
    "model_directory": 500,
    "run_directory": 700,
}


@contextlib.contextmanager
def opened() -> Iterator[Doors]:
    with (
        tempfile.TemporaryDirectory() as home,
        contextlib.chdir(home),
        mock.patch.object(constants, "HF_HUB_OFFLINE", True),
    ):
        logging.disable(logging.CRITICAL)
        try:
            yield Doors(Path(home))
        finally:
            logging.disable(logging.NOTSET)


def told(doors: Doors, kind: str, number: int) -> BaseException | None:
    """Give one input to its door. Returns what was raised beside errors of Podium's and of the operating system."""
    try:
        getattr(doors, kind)(random.Random(f"{kind}/{number}"))
    except (PodiumError, OSError):
        pass
    except Exception as error:  # noqa: BLE001 - this is what the test looks for
        return error
    return None


def tried(kind: str, stride: int = 1) -> str:
    """Give every ``stride``-th input of a kind to its door. Returns what was raised, "" for nothing."""
    numbers = range(0, KINDS[kind], stride)
    with opened() as doors:
        raised = {number: error for number in numbers if (error := told(doors, kind, number)) is not None}
    kinds: dict[str, list[int]] = {}
    for number, error in raised.items():
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}:{last.lineno}"
        kinds.setdefault(f"{type(error).__name__} at {place}: {str(error)[:90]}", []).append(number)
    said = "\n".join(f"{len(numbers)} x {what} (number {numbers[0]})" for what, numbers in kinds.items())
    return f"{len(raised)} of {len(numbers)} {kind} inputs:\n{said}" if raised else ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stride", [20, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_broken_input_ends_in_a_traceback(kind: str, stride: int) -> None:
    assert not tried(kind, stride)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("\n".join(filter(None, map(tried, KINDS))) or None)
    with opened() as doors:
        error = told(doors, sys.argv[1], int(sys.argv[2]))
        if error is not None:
            traceback.print_exception(error)
