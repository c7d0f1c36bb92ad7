"""A reward model scores completions on workers, and its scores train."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import podium
from podium import Cluster, Worker, endpoint
from podium.cli import main
from podium.data import Batch
from podium.errors import ConfigError, DataError, EndpointError, PodiumError
from podium.models import char_tokenizer
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.checks.preflight import check_given, names_of_given
from podium.workers import RewardModel
from podium_dryrun import describe_memory, describe_plan
from tests.integration.rewards import minus_half
from tests.integration.test_environments import config_of
from tests.integration.training import MODEL, metrics_rows, tiny

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }} {% endfor %}"
SHAPE = {name: value for name, value in MODEL["config"].items() if name != "model_type"}  # type: ignore[attr-defined]


def write_scorer(folder: Path, template: str | None = None, model_type: str = "qwen3", **settings: Any) -> Path:
    """A classifier with random weights and one output, whose alphabet is its own."""
    tokenizer = char_tokenizer(" =9876543210aus", chat_template=template)
    shape = (
        SHAPE if model_type == "qwen3" else {"max_position_embeddings": 32, "num_attention_heads": 2, "hidden_size": 32}
    )
    values = {"num_labels": 1, "vocab_size": len(tokenizer), "pad_token_id": None, "initializer_range": 0.5, **shape}
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**values, **settings})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def score_alone(folder: Path, text: str) -> float:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return float(model.eval()(**tokenizer(text, return_tensors="pt")).logits[0, 0])


def completions(run: Path, step: int) -> dict[str, list[Any]]:
    return pq.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pydict()


@pytest.mark.everyday("pools1")
@pytest.mark.parametrize("pools", [{}, {"train": {"roles": ["policy", "generator"]}, "judge": {"roles": ["reward"]}}])
def test_a_run_trains_on_the_models_scores(tmp_path: Path, pools: Mapping[str, Any]) -> None:
    scorer = write_scorer(tmp_path / "scorer")
    config = tiny(
        GRPOConfig,
        tmp_path,
        reward={"name": "model", "path": str(scorer)},
        placement={"pools": pools},
        run={"steps": 2},
    )
    PPOTrainer(config, cluster="inline", show=False).fit()
    run = tmp_path / "runs" / "run"
    for step in (1, 2):
        table = completions(run, step)
        texts = [prompt + text for prompt, text in zip(table["prompt"], table["completion"], strict=True)]
        assert table["reward"] == pytest.approx([score_alone(scorer, text) for text in texts], abs=1e-5)
        assert len(set(table["reward"])) > 4
        assert metrics_rows(run)[step - 1]["reward/mean"] == pytest.approx(sum(table["reward"]) / len(texts), abs=1e-5)
    assert [row["step"] for row in metrics_rows(run, "eval")] == [0, 2]
    if not pools:
        assert main(["eval", str(run), "--backend", "inline"]) == 0


def test_a_model_scores_the_last_answers_of_sessions_that_return_nothing(tmp_path: Path) -> None:
    scorer = write_scorer(tmp_path / "scorer")
    config = config_of("graded_by_reward", tmp_path, reward={"name": "model", "path": str(scorer)}, run={"steps": 1})
    PPOTrainer(config, cluster="inline", show=False).fit()
    table = completions(tmp_path / "runs" / "run", 1)
    texts = [prompt + text for prompt, text in zip(table["prompt"], table["completion"], strict=True)]
    assert table["reward"] == pytest.approx([score_alone(scorer, text) for text in texts], abs=1e-5)
    assert len(set(table["reward"])) > 4


class Stuck(Worker):
    """It fails once, and then never answers."""

    failed = False

    @endpoint
    def score(self, batch: Batch) -> Batch:
        if self.failed:
            time.sleep(600)
        self.failed = True
        raise LookupError("on purpose")


def test_a_run_that_ends_does_not_wait_for_a_score_that_never_comes(tmp_path: Path, preloaded: Cluster) -> None:
    config = tiny(
        GRPOConfig, tmp_path, reward={"name": "model", "path": str(write_scorer(tmp_path / "scorer"))},
        run={"schedule": "asynchronous"}, engine={"max_sequences": 4}, eval={"items": 0},
        placement={"pools": {name: {"roles": [name]} for name in ("policy", "generator", "reward")}},
    )  # fmt: skip
    with pytest.raises(EndpointError, match="on purpose"):
        PPOTrainer(config, cluster=preloaded, workers={"reward": Stuck.bind()}, show=False).fit()


def test_a_reward_of_ones_own_reads_the_models_score(tmp_path: Path) -> None:
    scorer = write_scorer(tmp_path / "scorer", TEMPLATE)
    sections: dict[str, Any] = {"data": {"system_prompt": "8"}, "eval": {"items": 0}, "run": {"steps": 1}}
    config = tiny(GRPOConfig, tmp_path, reward={"path": str(scorer)}, **sections)
    PPOTrainer(config, cluster="inline", show=False, reward=minus_half).fit()
    table = completions(tmp_path / "runs" / "run", 1)
    for answer, text, reward in zip(table["expected"], table["completion"], table["reward"], strict=True):
        conversation = f"s=8 u={answer}= a={text} "
        assert reward == pytest.approx(-0.5 * score_alone(scorer, conversation), abs=1e-5)


@pytest.mark.parametrize(("role", "before"), [("system", ""), ("developer", ""), ("user", "s=8 ")])
def test_the_system_prompt_comes_where_a_conversation_has_none(role: str, before: str, tmp_path: Path) -> None:
    scorer = write_scorer(tmp_path / "scorer", TEMPLATE)
    messages = [{"role": role, "content": "9"}, {"role": "user", "content": "1="}]
    batch = Batch({"messages": [messages], "prompt": [""], "completion": ["2"]})
    (score,) = RewardModel(str(scorer), "8").score(batch).dense("rewards").tolist()
    assert score == pytest.approx(score_alone(scorer, f"{before}{role[0]}=9 u=1= a=2 "), abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "qwen3"},
        {"model_type": "bert", "num_hidden_layers": 1},
        {"model_type": "fnet", "num_hidden_layers": 1, "pad_token_id": 3},  # it has no mask: padding is text to it
    ],
    ids=str,
)
def test_scores_do_not_depend_on_the_batch(tmp_path: Path, settings: dict[str, Any]) -> None:
    scorer = write_scorer(tmp_path, **settings)
    texts = ["1", "12=34", "999 9 9", "12=", "0=0=0=0=0="]
    columns = {"messages": [[]] * 5, "prompt": texts, "completion": [" ", "7", "", "5=5", "1"]}
    alone = [score_alone(scorer, text + end) for text, end in zip(texts, columns["completion"], strict=True)]
    for tokens in (1, 24, 4096):
        assert RewardModel(str(scorer), max_tokens=tokens).score(Batch(columns)).dense(
            "rewards"
        ).tolist() == pytest.approx(alone, abs=1e-5)
    long = Batch({"messages": [[]], "prompt": ["1" * 30], "completion": ["222"]})
    with pytest.raises(
        DataError, match=r"has 33 tokens for the reward model .*, which has 32 positions: lower sampling"
    ):
        RewardModel(str(scorer)).score(long)


def test_a_text_that_ends_in_the_padding_token_is_scored_there(tmp_path: Path) -> None:
    scorer = write_scorer(tmp_path, TEMPLATE.replace(" {% endfor", "<pad>{% endfor"))  # as <eos> where it is both
    turns = [[{"role": "user", "content": "1"}]] * 2
    columns = {"messages": turns, "prompt": ["", ""], "completion": ["2", "34567"]}
    alone = [score_alone(scorer, f"u=1<pad>a={end}<pad>") for end in columns["completion"]]
    scores = RewardModel(str(scorer)).score(Batch(columns)).dense("rewards")
    assert scores.tolist() == pytest.approx(alone, abs=1e-5)


def test_a_model_that_cannot_score_is_refused(tmp_path: Path) -> None:
    two = write_scorer(tmp_path / "two", num_labels=2)
    with pytest.raises(ConfigError, match=r"reward\.path = .*two' has 2 outputs .*: expected a model for sequence"):
        RewardModel(str(two))
    config = tiny(GRPOConfig, tmp_path, reward={"name": "model", "path": str(two)})
    with pytest.raises(ConfigError, match="has 2 outputs"):
        describe_memory(config, "local")
    headless = write_scorer(tmp_path / "headless")
    model = AutoModelForSequenceClassification.from_pretrained(headless)
    body = {name: tensor for name, tensor in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(headless, state_dict=body)
    with pytest.raises(ConfigError, match=r"headless' is no reward model: its files lack score\.weight"):
        RewardModel(str(headless))


def test_a_score_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    scorer = write_scorer(tmp_path / "scorer")
    with pytest.raises(ConfigError, match=r"reward\.name = 'fraction', which does not read the model's score: set"):
        describe_plan(tiny(GRPOConfig, tmp_path, reward={"path": str(scorer)}), "local")
    with pytest.raises(
        ConfigError, match=r"reward\.name = 'model' reads the score of a reward model: set reward\.path"
    ):
        describe_plan(tiny(GRPOConfig, tmp_path, reward={"name": "model"}), "local")
    config = tiny(GRPOConfig, tmp_path, reward={"name": "model", "path": str(scorer)})
    assert "policy, reward, estimator, generator" in describe_plan(config, "local")
    assert "  reward model " in describe_memory(config, "local")
    with podium.connect("inline") as cluster, pytest.raises(ConfigError, match="has no such role"):
        PPOTrainer(tiny(GRPOConfig, tmp_path), cluster=cluster, workers={"reward": RewardModel}, show=False).fit()


def test_a_reward_model_with_several_chat_templates_has_one_to_use_or_is_refused(tmp_path: Path) -> None:
    other = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    for named, template in (({"default": TEMPLATE, "tool_use": other}, TEMPLATE), ({"rag": TEMPLATE}, TEMPLATE)):
        folder = write_scorer(tmp_path / "_".join(named))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = dict(named)
        tokenizer.save_pretrained(folder)
        written = write_scorer(tmp_path / f"{'_'.join(named)}_alone", template)
        rows = Batch({"messages": [[{"role": "user", "content": "9="}]], "prompt": ["9="], "completion": ["9"]})
        scores = [RewardModel(str(path)).score(rows).dense("rewards").tolist() for path in (folder, written)]
        assert scores[0] == scores[1]
    tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": other}
    tokenizer.save_pretrained(folder)
    config = tiny(GRPOConfig, tmp_path, reward={"name": "model", "path": str(folder)})
    with pytest.raises(ConfigError, match="has the chat templates rag, tool_use, and none is called default: write"):
        PPOTrainer(config, cluster="inline", show=False).fit()


def test_a_chat_template_of_a_reward_model_that_refuses_a_conversation_is_named(tmp_path: Path) -> None:
    picky = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    scorer = str(write_scorer(tmp_path / "scorer", picky))
    data = {"system_prompt": "9"}
    config = tiny(GRPOConfig, tmp_path, reward={"name": "model", "path": scorer}, data=data, eval={"items": 0})
    with pytest.raises(PodiumError, match=r"cannot write a conversation of system, user, assistant: .*no system"):
        PPOTrainer(config, cluster="inline", show=False).fit()


def test_a_resume_without_the_class_of_the_reward_model_is_refused() -> None:
    before = names_of_given(None, "model", {"reward": RewardModel})
    with pytest.raises(ConfigError, match=r"passed its own reward model \(.*RewardModel\)"):
        check_given(before, {}, "model")
