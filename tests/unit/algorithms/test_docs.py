"""docs/algorithms.md and the worked examples in docstrings do what they say."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import podium.algorithms
from podium.algorithms import ADVANTAGES, LOSSES, AdvantageInputs, AlgorithmConfig
from podium.training import OptimConfig
from podium.workers import Policy
from tests.unit.workers.tiny import TINY, recorded

DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"
MODULES = [module.name for module in pkgutil.walk_packages(podium.algorithms.__path__, "podium.algorithms.")]


def test_the_losses_and_the_estimator_of_the_document_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are saved under the names that the text gives them; a block that tries one ends in its output."""
    loss, loss_trial, options, figures, estimator, per_source, trial = re.findall(
        r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL
    )
    for name, source in {"cispo": loss, "tempered": options, "surprising": figures, "best_of_group": estimator}.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for file, code in ((loss, loss_trial), (estimator, trial)):
        exec(compile(file + code, "docs/algorithms.md", "exec"), {})
        assert capsys.readouterr().out.strip() == code.rstrip().rsplit("\n# ", 1)[1]
    assert check_per_source(per_source) == [0.0, 0.0, -0.5, 0.0, 0.5]
    batch = recorded()
    policy = Policy(TINY, OptimConfig(lr=0.0), algorithm=AlgorithmConfig(loss="cispo.py:cispo"))
    assert 0 < policy.update(batch)["policy/clip_fraction"] < 1
    weak, strong = (
        Policy(TINY, OptimConfig(lr=0.0), algorithm=AlgorithmConfig(loss="tempered.py:tempered", options=options))
        for options in ({"strength": 0.5}, {})
    )
    assert weak.update(batch)["loss"] == pytest.approx(strong.update(batch)["loss"] / 2, rel=1e-5)
    options = {"surprising_share": 0.5}
    policy.algorithm = AlgorithmConfig(loss="surprising.py:surprising_only", options=options)
    mask = batch.jagged("loss_mask").values
    logprobs, old, advantages, weights = (
        (policy.logprobs(batch) if name == "new" else batch).jagged(column).values[mask]
        for name, column in [
            ("new", "old_logprobs"),
            *(("", f) for f in ("old_logprobs", "advantages", "loss_weights")),
        ]
    )
    losses = -(logprobs - old).exp() * advantages * (logprobs <= logprobs.quantile(0.5))
    assert policy.update(batch)["loss"] == pytest.approx(float((losses * weights).sum()), rel=1e-5)


def check_per_source(source: str) -> list[float]:
    names: dict[str, Any] = {}
    exec(compile(source, "docs/algorithms.md", "exec"), names)
    inputs = AdvantageInputs(
        rewards_B=torch.tensor([7.0, 1.0, 2.0]),
        group_B=torch.tensor([0, 0, 1]),
        mask_N=torch.tensor([True, False, True, False, True]),
        offsets_B1=torch.tensor([0, 1, 3, 5]),
        truncated_B=torch.tensor([True, False, False]),
        data={"source": ["web", "book", "book"]},
    )
    return names["per_source"](inputs, AlgorithmConfig()).advantages_N.tolist()


def test_the_document_knows_every_setting_estimator_and_loss() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in (*ADVANTAGES, *LOSSES) if f"| `{name}` " not in text] == []
    explained_elsewhere = {"gamma", "lam", "epochs", "minibatches"}
    assert [name for name in vars(AlgorithmConfig()) if name not in text and name not in explained_elsewhere] == []
