"""A reward model reads tools and calls of tools as the policy does, or the run is refused before it starts."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from podium.cli import main
from podium.data import Batch
from podium.errors import DataError
from podium.models import char_tokenizer
from podium.trainer import GRPOConfig, PPOTrainer
from podium.workers import RewardModel
from tests.integration.test_environments import config_of
from tests.integration.test_reward_model import TEMPLATE, completions, score_alone, write_scorer
from tests.integration.training import MODEL, tiny

ALPHABET = string.printable
LONG: dict[str, Any] = {**MODEL["config"], "max_position_embeddings": 2048}  # type: ignore[dict-item]
POLICY = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% endif %}"
)
SCORER = (
    "{% for tool in tools or [] %}<{{ tool | tojson }}>{% endfor %}{% for m in messages %}{{ m.role[0] }}={{ m.content "
    "}}{{ m.tool_calls | tojson if m.tool_calls else '' }};{% endfor %}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"name": "add", "arguments": '{"a": 1}'}
HISTORY = [
    {"role": "assistant", "content": None, "function_call": CALL},
    {"role": "function", "name": "add", "content": "3"},
]
WRITTEN = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "name": "add", "content": "3"},
]


def scorer_of(folder: Path, template: Any = SCORER) -> Path:
    """A reward model that knows all characters, and has room for tools."""
    tokenizer = char_tokenizer(ALPHABET)
    write_scorer(folder, vocab_size=len(tokenizer), max_position_embeddings=2048)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def run_of(folder: Path, rows: list[dict[str, Any]], scorer: Path, **sections: Any) -> Any:
    """A run on some rows whose policy has a chat template with tools."""
    char_tokenizer(ALPHABET, chat_template=POLICY).save_pretrained(folder / "tokenizer")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"config": LONG, "tokenizer": str(folder / "tokenizer")}
    reward, holdout = {"name": "model", "path": str(scorer)}, {"items": 1}
    settings = {"train": str(data), "eval": str(data)}
    return tiny(
        GRPOConfig, folder, model=model, reward=reward, data=settings, eval=holdout, run={"steps": 1},
        batch={"prompts": 2}, **sections,
    )  # fmt: skip


def write(scorer: Path, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    return str(AutoTokenizer.from_pretrained(scorer).apply_chat_template(messages, tools=tools, tokenize=False))


def row_of(question: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}, *HISTORY], "answer": "3", **columns}


def test_a_reward_model_scores_with_the_tools_and_calls_of_the_row(tmp_path: Path) -> None:
    scorer = scorer_of(tmp_path / "scorer")
    rows = [row_of("1+2?", tools=[ADD]), row_of("2+1?", tools=json.dumps([ADD]))]
    PPOTrainer(run_of(tmp_path, rows, scorer), cluster="inline", show=False).fit()
    table = completions(tmp_path / "runs" / "run", 1)
    for prompt, text, reward in zip(table["prompt"], table["completion"], table["reward"], strict=True):
        question = {"role": "user", "content": "1+2?" if "1+2?" in prompt else "2+1?"}
        conversation = write(scorer, [question, *WRITTEN, {"role": "assistant", "content": text}], [ADD])
        assert "Adds two numbers." in conversation
        assert '"arguments": {"a": 1}' in conversation
        assert reward == pytest.approx(score_alone(scorer, conversation), abs=1e-5)
    assert main(["eval", str(tmp_path / "runs" / "run"), "--backend", "inline"]) == 0


def test_a_reward_model_reads_tools_by_its_template_for_tools(tmp_path: Path) -> None:
    scorer = scorer_of(tmp_path / "scorer", {"default": TEMPLATE, "tool_use": SCORER})
    question, answer = {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}
    columns: dict[str, Any] = {"messages": [[question]] * 2, "prompt": [""] * 2, "completion": ["3"] * 2}
    scores = RewardModel(str(scorer)).score(Batch({**columns, "tools": [[ADD], None]})).dense("rewards").tolist()
    texts = [write(scorer, [question, answer], [ADD]), "u=1+2? a=3 "]
    assert texts[0].startswith('<{"type"')
    assert scores == pytest.approx([score_alone(scorer, text) for text in texts], abs=1e-5)
    assert RewardModel(str(scorer)).score(Batch(columns)).dense("rewards").tolist() == pytest.approx([scores[1]] * 2)


def test_sessions_that_return_nothing_are_scored_with_the_tools_of_the_row(tmp_path: Path) -> None:
    scorer = scorer_of(tmp_path / "scorer")
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}=", "answer": "1", "tools": [ADD]}) + "\n" for n in range(9)))
    config = config_of(
        "graded_by_reward", tmp_path, reward={"name": "model", "path": str(scorer)}, run={"steps": 1},
        data={"train": str(data)},
    )  # fmt: skip
    PPOTrainer(config, cluster="inline", show=False).fit()
    table = completions(tmp_path / "runs" / "run", 1)
    for prompt, text, reward in zip(table["prompt"], table["completion"], table["reward"], strict=True):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        assert reward == pytest.approx(score_alone(scorer, write(scorer, turns, [ADD])), abs=1e-5)


LEFT_OUT = "{#- podium: tools are left out -#}"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "tools": (
        TEMPLATE,
        {"prompt": "1+2?", "tools": [ADD]},
        r"line 2.*: there are tools, and the chat template does not",
    ),
    "a part of a tool": (
        "{% for t in tools or [] %}{{ t.function.name }}{{ t.function.parameters | tojson }}{% endfor %}" + TEMPLATE,
        {"prompt": "1+2?", "tools": [ADD]},
        r"line 2.*: tool 1 has function\.description = 'Adds two numbers\.', which the chat template does not write",
    ),
    "calls": (TEMPLATE, row_of("1+2?"), r"line 2.*: message 2 has tool_calls = .*, which the chat template does not"),
    "a variable": (
        SCORER + "{{ documents }}",
        {"prompt": "1+2?", "documents": "It is 3."},
        r"line 2.*: column 'documents' holds 'It is 3\.', and the chat template has a variable of this name",
    ),
    "a role": (
        SCORER.replace("messages", "messages | rejectattr('role', 'eq', 'system')"),
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]},
        r"line 2.*: message 1 of the role 'system', 'Be brief\.', is not written by the chat template",
    ),
    "refused": (
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + SCORER,
        {"prompt": "1+2?", "tools": [ADD]},
        r"line 2.*: the chat template of the reward model .* cannot write a conversation of user, assistant: .*no t",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_reward_model_would_not_read_is_refused_by_its_row(tmp_path: Path, case: str) -> None:
    template, row, message = CASES[case]
    rows = [{"prompt": "2+2?", "answer": "4"}, {"answer": "3", **row}]
    config = run_of(tmp_path, rows, scorer_of(tmp_path / "scorer", template))
    with pytest.raises(DataError, match=message) as refusal:
        PPOTrainer(config, cluster="inline", show=False).fit()
    if case != "refused":
        text = str(refusal.value)
        assert "chat template is that of the reward model" in text
        assert "data.chat_template" not in text
        assert "into the file chat_template.jinja of its directory" in text
    assert not (tmp_path / "runs" / "run" / "completions").exists()


def test_a_reward_model_may_do_without_tools_on_purpose(tmp_path: Path) -> None:
    scorer = scorer_of(tmp_path / "scorer", LEFT_OUT + TEMPLATE)
    rows = [{"prompt": "1+2?", "answer": "3", "tools": [ADD]}] * 2
    PPOTrainer(run_of(tmp_path, rows, scorer), cluster="inline", show=False).fit()
    table = completions(tmp_path / "runs" / "run", 1)
    texts = [f"u=1+2? a={text} " for text in table["completion"]]
    assert table["reward"] == pytest.approx([score_alone(scorer, text) for text in texts], abs=1e-5)
