"""The schemas in which the field publishes rows, one row of our own each: read by at most two settings, or refused.

docs/data.md has the same table.
"""

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from podium.errors import DataError
from podium.rollout.tasks import DataConfig, Example, encode_pairs, encode_prompts, load_examples
from tests.unit.rollout.tasks.test_encode import byte_tokenizer

PAGE: Final = Path(__file__).parents[4] / "docs" / "data.md"
TOOLS: Final = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


SUM: Final = "What is 3 plus 4?"
ADD: Final = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALL: Final = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
CALL_TEXT: Final = json.dumps(CALL["function"])
VERL: Final = {"data_source": "our/sums", "prompt": [user(SUM)], "ability": "math", "extra_info": {"index": 0}}


class Schema(NamedTuple):
    """A schema: one row, the settings that read it, and what is read, or what the error says in their place."""

    row: dict[str, Any]
    settings: dict[str, Any]
    prompt: Any = None
    answer: Any = None
    refusal: str = ""


SCHEMAS: Final[dict[str, Schema]] = {
    "verl (GSM8K, Eurus-2-RL)": Schema(
        {**VERL, "reward_model": {"style": "rule", "ground_truth": "7"}}, {}, [user(SUM)], "7"
    ),
    "DAPO-17k": Schema(
        {**VERL, "reward_model": {"ground_truth": "7", "style": "rule-lighteval/MATH_v2"}}, {}, [user(SUM)], "7"
    ),
    "Skywork-OR1": Schema({**VERL, "reward_model": {"ground_truth": '["7"]', "style": "rule"}}, {}, [user(SUM)], "7"),
    "SkyRL": Schema(
        {**VERL, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "7"}}, {}, [user(SUM)], "7"
    ),
    "Search-R1": Schema(
        {**VERL, "golden_answers": ["7"], "reward_model": {"ground_truth": {"target": ["7"]}, "style": "rule"}},
        {"answer_column": "reward_model.ground_truth.target"},
        [user(SUM)],
        "7",
    ),
    "NeMo-Gym": Schema(
        {"responses_create_params": {"input": [user(SUM)], "tools": [{"type": "function", **ADD}]}, "expected": "7"},
        {"answer_column": "expected"},
        [user(SUM)],
        "7",
    ),
    "Open-R1 (problem, solution)": Schema(
        {"problem": SUM, "solution": "It is 7.", "level": 1},
        {"prompt_column": "problem", "answer_column": "solution"},
        SUM,
        "It is 7.",
    ),
    "OpenR1-Math": Schema(
        {"problem": SUM, "answer": "7", "generations": ["…"], "messages": [user(SUM), model("so 7")]},
        {},
        [user(SUM)],
        "7",
    ),
    "OpenMathReasoning": Schema(
        {"problem": SUM, "generated_solution": "so 7", "expected_answer": "7", "problem_source": "ours"},
        {"prompt_column": "problem", "answer_column": "expected_answer"},
        SUM,
        "7",
    ),
    "NuminaMath": Schema(
        {"source": "ours", "problem": SUM, "solution": "It is 7.", "messages": [user(SUM), model("It is 7.")]},
        {},
        [user(SUM)],
        "It is 7.",
    ),
    "GSM8K": Schema(
        {"question": SUM, "answer": "3 + 4 = 7\n#### 7"}, {"prompt_column": "question"}, SUM, "3 + 4 = 7\n#### 7"
    ),
    "MATH": Schema(
        {"problem": SUM, "level": "Level 1", "type": "Algebra", "solution": "It is $7$."},
        {"prompt_column": "problem", "answer_column": "solution"},
        SUM,
        "It is $7$.",
    ),
    "MBPP": Schema(
        {
            "task_id": 1,
            "text": "Write add.",
            "code": "def add(): …",
            "test_list": ["assert add"],
            "test_setup_code": "",
        },
        {"prompt_column": "text", "answer_column": "code"},
        "Write add.",
        "def add(): …",
    ),
    "HumanEval": Schema(
        {"task_id": "H/0", "prompt": "def add(a, b):\n", "canonical_solution": "    return a + b\n", "test": "…"},
        {"answer_column": "canonical_solution"},
        "def add(a, b):\n",
        "    return a + b\n",
    ),
    "APPS": Schema(
        {
            "question": "Write add.",
            "solutions": '["def add(): …", "add = …"]',
            "input_output": "{}",
            "starter_code": "",
        },
        {"prompt_column": "question", "answer_column": "solutions.0"},
        "Write add.",
        "def add(): …",
    ),
    "MMLU": Schema(
        {"question": SUM, "subject": "sums", "choices": ["6", "7"], "answer": 1},
        {"prompt_column": "{question}\n0. {choices[0]}\n1. {choices[1]}"},
        f"{SUM}\n0. 6\n1. 7",
        1,
    ),
    "SQuAD": Schema(
        {"id": "1", "context": "3 + 4 is 7.", "question": SUM, "answers": {"text": ["7"], "answer_start": [9]}},
        {"prompt_column": "{context}\n{question}", "answer_column": "answers.text"},
        f"3 + 4 is 7.\n{SUM}",
        "7",
    ),
    "Alpaca": Schema(
        {"instruction": "Add.", "input": "3 4", "output": "7", "text": "Below is an instruction …"},
        {"prompt_column": "{instruction}\n{input}", "answer_column": "output"},
        "Add.\n3 4",
        "7",
    ),
    "Dolly": Schema(
        {"instruction": SUM, "context": "Sums.", "response": "7", "category": "open_qa"},
        {"prompt_column": "{context}\n{instruction}", "answer_column": "response"},
        f"Sums.\n{SUM}",
        "7",
    ),
    "OpenAI, fine-tuning": Schema(
        {
            "messages": [user(SUM), {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            "tools": [{"type": "function", "function": ADD}],
            "parallel_tool_calls": False,
        },
        {},
        [user(SUM)],
        "",
    ),
    "OpenAI, functions": Schema({"messages": [user(SUM), model("7")], "functions": [ADD]}, {}, [user(SUM)], "7"),
    "OpenAI, preferences": Schema(
        {"input": {"messages": [user(SUM)]}, "preferred_output": [model("7")], "non_preferred_output": [model("8")]},
        {"prompt_column": "input.messages"},
        refusal="'preferred_output' and 'non_preferred_output' are a preference pair",
    ),
    "UltraChat": Schema(
        {"prompt": SUM, "prompt_id": "1", "messages": [user(SUM), model("7"), user("And 1?"), model("8")]},
        {},
        [user(SUM), model("7"), user("And 1?")],
        "8",
    ),
    "Tulu 3": Schema({"id": "1", "messages": [user(SUM), model("7")], "source": "ours"}, {}, [user(SUM)], "7"),
    "Tulu 3, RLVR": Schema(
        {"messages": [user(SUM)], "ground_truth": "7", "dataset": "ours"},
        {"answer_column": "ground_truth"},
        [user(SUM)],
        "7",
    ),
    "ShareGPT (OpenHermes, SlimOrca)": Schema(
        {
            "conversations": [
                {"from": "system", "value": "Add.", "weight": 0.0},
                {"from": "human", "value": SUM, "weight": 0.0},
                {"from": "gpt", "value": "7", "weight": 1.0},
            ]
        },
        {},
        [{**system("Add."), "weight": 0.0}, {**user(SUM), "weight": 0.0}],
        "7",
    ),
    "ShareGPT with tools (ToolACE, APIGen)": Schema(
        {
            "system": "Add.",
            "conversations": [
                {"from": "human", "value": SUM},
                {"from": "function_call", "value": CALL_TEXT},
                {"from": "observation", "value": "7"},
                {"from": "gpt", "value": "It is 7."},
            ],
            "tools": json.dumps([ADD]),
        },
        {},
        [
            system("Add."),
            user(SUM),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "7"},
        ],
        "It is 7.",
    ),
    "OpenOrca": Schema(
        {"id": "1", "system_prompt": "Add.", "question": SUM, "response": "7"},
        {"prompt_column": "question", "answer_column": "response"},
        [system("Add."), user(SUM)],
        "7",
    ),
    "LIMA": Schema({"conversations": [SUM, "7"], "source": "ours"}, {}, [user(SUM)], "7"),
    "Capybara": Schema({"source": "ours", "conversation": [{"input": SUM, "output": "7"}]}, {}, [user(SUM)], "7"),
    "xLAM": Schema(
        {"id": 1, "query": SUM, "answers": f"[{CALL_TEXT}]", "tools": json.dumps([ADD])},
        {"prompt_column": "query", "answer_column": "answers"},
        SUM,
        f"[{CALL_TEXT}]",
    ),
    "Glaive": Schema(
        {"system": "SYSTEM: Add.", "chat": f"USER: {SUM}\nASSISTANT: 7 <|endoftext|>"},
        {"prompt_column": None, "answer_column": "{system}\n{chat}"},
        f"SYSTEM: Add.\nUSER: {SUM}\nASSISTANT: 7 <|endoftext|>",
    ),
    "HelpSteer2": Schema(
        {"prompt": SUM, "response": "7", "helpfulness": 4, "correctness": 4}, {"answer_column": "response"}, SUM, "7"
    ),
    "UltraFeedback, the better answers": Schema(
        {"prompt": SUM, "chosen": [user(SUM), model("7")], "rejected": [user(SUM), model("8")], "score_chosen": 9.0},
        {"answer_column": "chosen"},
        SUM,
        "7",
    ),
    "KTO": Schema({"prompt": SUM, "completion": "7", "label": True}, {}, SUM, "7"),
    "HH-RLHF": Schema(
        {"chosen": f"\n\nHuman: {SUM}\n\nAssistant: 7", "rejected": f"\n\nHuman: {SUM}\n\nAssistant: 8"},
        {},
        refusal="'chosen' and 'rejected' are a preference pair, from which policies .podium train dpo",
    ),
    "FineWeb, C4, TinyStories": Schema(
        {"text": "Three and four are seven.", "id": "1", "dump": "ours", "url": "u", "language_score": 0.9},
        {},
        "Three and four are seven.",
    ),
    "OpenAssistant, trees": Schema(
        {"message_id": "1", "parent_id": None, "text": SUM, "role": "prompter", "lang": "en"},
        {},
        refusal=r"no column 'prompt' for the prompt; the columns are .*'text'",
    ),
    "LLaVA": Schema(
        {
            "id": "1",
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>\nHow many?"}, {"from": "gpt", "value": "3"}],
        },
        {},
        refusal="column 'image' holds an image, video or audio",
    ),
}


def load(folder: Path, row: dict[str, Any], settings: dict[str, Any]) -> list[Example]:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    config = DataConfig(train=str(file), holdout=0, **settings)
    return load_examples(config.train, config)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_schema_of_the_field_is_read_by_at_most_two_settings_or_refused(tmp_path: Path, schema: Schema) -> None:
    tokenizer = byte_tokenizer(TOOLS)
    assert len(schema.settings) <= 2
    if schema.refusal:
        with pytest.raises(DataError, match=rf"rows\.jsonl, line 1: .*{schema.refusal}"):
            encode_pairs(load(tmp_path, schema.row, schema.settings), tokenizer, DataConfig())
        return
    (example,) = load(tmp_path, schema.row, schema.settings)
    assert example.prompt == schema.prompt
    assert example.row["answer"] == schema.answer or example.answer == schema.answer
    ((tokens, mask),) = encode_pairs([example], tokenizer, DataConfig())
    learned = str(tokenizer.decode([token for token, counts in zip(tokens, mask, strict=True) if counts]))
    written = str(tokenizer.decode(tokens))
    assert str(schema.answer if schema.answer is not None else schema.prompt[1:]) in learned
    if "tools" in schema.row or "functions" in schema.row or "responses_create_params" in schema.row:
        assert written.startswith('<|im_start|>system\n{"') and '"description": "Adds."' in written
    if example.is_text:
        with pytest.raises(DataError, match="a text without a prompt, which only supervised fine-tuning can use"):
            encode_prompts([example], tokenizer, DataConfig())
    else:
        assert encode_prompts([example], tokenizer, DataConfig()).kept == [0]


def test_the_page_has_the_table() -> None:
    table = re.findall(
        r"^\| ([^|`]+?) \| ([^|]+?) \|$",
        PAGE.read_text().partition("## Schemas")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    expected = [("schema", "settings")]
    for name, schema in SCHEMAS.items():
        settings = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in schema.settings.items())
        expected.append((name, "refused" if schema.refusal else settings or "none"))
    assert [row for row in table if not row[0].startswith("-")] == expected
    usable = sum(not schema.refusal for schema in SCHEMAS.values())
    assert len(SCHEMAS) == 39 and usable >= 35
