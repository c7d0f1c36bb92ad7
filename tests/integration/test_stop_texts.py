"""A run whose completions end with texts: its tokens are those that were sampled, and its texts end before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from podium.data import fields
from podium.trainer import GRPOConfig
from tests.integration.training import metrics_rows, tiny, train

TEXTS = ("7", "33")


def keep_stop(completion: str, row: Any, stop_text: str) -> dict[str, Any]:
    return {"score": float(len(completion)), "end": stop_text or "none"}


def test_tokens_stay_and_texts_end_before_the_stop(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 8, "stop_token_ids": [*TEXTS], "top_k": 9}
    run = train(tiny(GRPOConfig, tmp_path, sampling=sampling, eval={"items": 8, "temperature": 1.0}), reward=keep_stop)
    ends = set[str]()
    for file in [*run.glob("completions/*.parquet"), *run.glob("evaluations/*.parquet")]:
        table = pq.read_table(file).to_pydict()
        for text, stop, tokens, chars, reason, end in zip(
            *(table[name] for name in ("completion", fields.STOP_TEXT, "tokens", "token_chars", "finish_reason")),
            table["logged_end"],
            strict=True,
        ):
            ends.add(stop)
            assert not any(one in text for one in TEXTS), "the text ends before the stop"
            assert end == (stop or "none"), "a reward may ask which text ended the completion"
            assert len(chars) == len(tokens), "each token that was sampled is there"
            if stop:
                assert reason == "stop" and len(tokens) >= len(text) + len(stop), "the tokens have the stop"
            else:
                assert len(tokens) == 8 or reason == "stop"
    assert ends == {"", *TEXTS}
    assert all(abs(row["mismatch/max"]) < 1e-4 for row in metrics_rows(run)), "training sees the sampled tokens"
