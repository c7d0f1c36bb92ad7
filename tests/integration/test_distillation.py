"""Distillation on policy: a student that samples learns from the log-probabilities of a larger teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.models import ModelConfig
from podium.models.loading import load_model
from podium.models.tokenizers import load_tokenizer
from podium.runtime import Cluster
from podium.telemetry import metrics as names
from podium.trainer import GRPOConfig, SFTConfig
from podium_dryrun import describe_memory
from tests.integration.training import MODEL, metrics_rows, timeless, tiny, train

SHAPE: dict[str, Any] = MODEL["config"]  # pyright: ignore[reportAssignmentType] - a value of a mixed mapping
LARGER = {**SHAPE, "hidden_size": 48, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another size after a few steps on the answers."""
    model = {**MODEL, "config": LARGER}
    folder = tmp_path_factory.mktemp("teacher")
    return train(tiny(SFTConfig, folder, model=model, run={"steps": 3}, eval={"items": 0})) / "model"


def settings_of(folder: Path, teacher: Path, loss: Any = "teacher_kl", **sections: Any) -> GRPOConfig:
    folder.mkdir(exist_ok=True)
    algorithm = {"loss": loss, "options": {"teacher": str(teacher)}}
    values: dict[str, Any] = {"eval": {"items": 0}, "algorithm": algorithm}
    return tiny(GRPOConfig, folder, **{**values, **sections})


def test_a_student_learns_from_a_larger_teacher_and_goes_on_bit_by_bit(tmp_path: Path, teacher: Path) -> None:
    whole = train(settings_of(tmp_path / "whole", teacher, run={"steps": 4}))
    kls = [row["teacher/kl"] for row in metrics_rows(whole)]
    assert len(kls) == 4 and all(kl > 0 for kl in kls)
    run = train(settings_of(tmp_path / "parts", teacher, run={"steps": 2}))
    train(settings_of(tmp_path / "parts", teacher, run={"steps": 4, "resume": str(run)}))
    assert timeless(run) == timeless(whole)
    model = "model/model.safetensors"
    assert (run / model).read_bytes() == (whole / model).read_bytes()


def test_reinforcement_and_a_teacher_are_one_loss_with_weights(tmp_path: Path, teacher: Path) -> None:
    run = train(settings_of(tmp_path, teacher, {"ppo_clip": 0.5, "teacher_kl": 2.0}, run={"steps": 1}))
    (row,) = metrics_rows(run)
    assert row["loss"] == pytest.approx(0.5 * row["loss/ppo_clip"] + 2.0 * row["loss/teacher_kl"], abs=1e-6)
    assert row["loss/teacher_kl"] == pytest.approx(row["teacher/kl"], abs=1e-6)  # one update: the ratio is 1


@pytest.mark.parametrize("divergence", ["reverse", pytest.param("forward", marks=pytest.mark.exhaustive)])
def test_a_student_learns_from_the_most_probable_ids_of_its_teacher(
    tmp_path: Path, teacher: Path, divergence: str
) -> None:
    """All ids of text are as many as there are, and fewer ids give a smaller divergence."""
    kls: dict[int, list[float]] = {}
    for top in (2, 1000):
        options = {"teacher": str(teacher), "teacher_top_k": top, "teacher_divergence": divergence}
        algorithm = {"loss": "teacher_kl", "options": options, "minibatches": 2}
        run = train(settings_of(tmp_path / str(top), teacher, algorithm=algorithm, run={"steps": 6}))
        kls[top] = [row["teacher/kl_top"] for row in metrics_rows(run)]
        assert all((row["teacher/rest"] < 2e-6) == (top == 1000) for row in metrics_rows(run))
        assert kls[top][-1] < kls[top][0]
    assert 0 < kls[2][0] <= kls[1000][0]
    with pytest.raises(ConfigError, match=r"teacher_top_k = 2 with sampling\.top_k"):
        algorithm = {"loss": "teacher_kl", "options": {"teacher": str(teacher), "teacher_top_k": 2}}
        settings_of(tmp_path, teacher, algorithm=algorithm, sampling={"top_k": 3})


def test_answers_of_the_data_are_learned_beside_completions(tmp_path: Path) -> None:
    """With advantages of 0 the answers alone move the policy, to where fine-tuning on them would."""
    from podium.algorithms import AlgorithmConfig

    def settings(folder: str, loss: Any) -> GRPOConfig:
        (tmp_path / folder).mkdir()
        values: dict[str, Any] = {"eval": {"items": 0}, "algorithm": {"loss": loss}, "run": {"steps": 6}}
        return tiny(GRPOConfig, tmp_path / folder, **values)

    mixed = metrics_rows(train(settings("mixed", {"ppo_clip": 0.0, "cross_entropy": 1.0})))
    values = [row["loss/cross_entropy"] for row in mixed]
    assert values[-1] < values[0] - 0.5
    assert all(row["loss/ppo_clip"] is not None for row in mixed)
    assert AlgorithmConfig(loss={"ppo_clip": 1.0, "cross_entropy": 0.5}).answer_weight == 0.5
    with pytest.raises(ConfigError, match="one of them a loss of completions; podium train sft learns answers alone"):
        AlgorithmConfig(loss={"cross_entropy": 1.0})
    config = settings("none", {"ppo_clip": 1.0, "cross_entropy": 1.0})
    rows = "".join(f'{{"prompt": "{number:02d}=", "answer": ""}}\n' for number in range(60))
    (tmp_path / "none/copy.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match="learns the data's answers, and no training prompt has one"):
        train(config)


@pytest.mark.everyday("answers-replicate")
@pytest.mark.parametrize("strategy", ["replicate", "fsdp2"])
@pytest.mark.parametrize(
    "term",
    [
        {"loss": {"ppo_clip": 1.0, "cross_entropy": 0.5}},
        {"loss": {"ppo_clip": 0.0, "cross_entropy": 1.0, "teacher_kl": 1.0}},
        {"loss": {"ppo_clip": 1.0, "cross_entropy": 0.5}, "entropy_coef": 0.1, "kl_in": "loss", "kl_coef": 0.5},
    ],
    ids=["answers", "teacher", "entropy-kl"],
)
def test_ranks_change_no_term_of_the_loss(
    preloaded: Cluster, tmp_path: Path, teacher: Path, term: dict[str, Any], strategy: str
) -> None:
    """A minibatch has the completions of one prompt, so that one of two ranks has no answer, or of a prompt without."""
    rows: list[list[dict[str, Any]]] = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        lines = [{"prompt": f"{number:02d}=", "answer": f"{number:02d}" if number % 3 else ""} for number in range(60)]
        (folder / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = {"options": {"teacher": str(teacher)}} if "teacher_kl" in term["loss"] else {}
        config = tiny(
            GRPOConfig, folder, algorithm={**term, **options}, data={"train": str(folder / "some.jsonl")},
            batch={"prompts": 1}, run={"steps": 5},
            placement={"ranks": ranks}, parallel={"strategy": strategy if ranks > 1 else "replicate"},
            eval={"items": 0}, save={"model": False, "every": 0},
        )  # fmt: skip
        rows.append(metrics_rows(train(config, "inline" if ranks == 1 else preloaded)))
    assert {"loss/cross_entropy" in row for row in rows[0]} == {True, False}
    for alone, ranks in zip(*rows, strict=True):
        assert alone.keys() == ranks.keys()
        for name in (*(name for name in alone if name.startswith("loss")), names.GRAD_NORM):
            assert ranks[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name


def test_a_dry_run_knows_the_teacher(tmp_path: Path, teacher: Path) -> None:
    config = settings_of(tmp_path, teacher)
    assert "teacher" in config.roles
    assert "teacher weights" in describe_memory(config, "inline")


@pytest.mark.parametrize(
    ("tokenizer", "shape", "complaint"),
    [
        (
            "chars:0123456789 =",
            LARGER,
            "another vocabulary than model.path: 2 of 16 tokens have other ids, such as",
        ),
        (
            MODEL["tokenizer"],
            {**LARGER, "max_position_embeddings": 4},
            "has 4 positions, and a prompt with its comp",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_the_start(
    tmp_path: Path, tokenizer: str, shape: dict[str, Any], complaint: str
) -> None:
    load_model(ModelConfig(config=shape, tokenizer=tokenizer)).save_pretrained(tmp_path / "other")
    load_tokenizer(tokenizer).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=rf"algorithm\.options\.teacher = .*{complaint}"):
        train(settings_of(tmp_path, tmp_path / "other"))
    assert not (tmp_path / "runs" / "run" / "config.yaml").exists()


def test_a_loss_that_needs_a_teacher_is_refused_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learns from a teacher, and there is none: set algorithm\.options\.teacher"):
        train(tiny(GRPOConfig, tmp_path, algorithm={"loss": {"ppo_clip": 1, "teacher_kl": 1}}))
