"""What Podium ships by name is no more than what anybody's file is: a copy of its text trains the same bits."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from podium import Cluster
from podium.algorithms import ADVANTAGES, LOSSES
from podium.data import Batch
from podium.rewards import NAMED_REWARDS
from podium.rollout.engines.config import find_engines
from podium.runs.schedules import SCHEDULES
from podium.trainer import GRPOConfig, PPOConfig, PPOTrainer, SFTConfig
from podium.trainer.prompts import Prompt
from tests.integration import worlds
from tests.integration.training import MODEL, timeless, tiny, train
from tests.waits import LONG_S

NEEDED_SETTINGS: dict[str, dict[str, Any]] = {
    "gdpo": {"reward": {"name": ["fraction", "exact"]}},
    "pass_at_k": {"algorithm": {"options": {"pass_k": 2}}},
}
"""What estimators need besides their names."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def copy_of(place: str, folder: Path) -> str:
    """Write the text of the module of ``place`` into a file of its own, and name the function there."""
    module, _, function = place.partition(":")
    path = folder / f"own_{module.rpartition('.')[2]}.py"
    path.write_text(Path(inspect.getfile(importlib.import_module(module))).read_text())
    return f"{path}:{function}"


def results(run: Path, columns: Sequence[str] = (), spared: Sequence[str] = ()) -> dict[str, Any]:
    """What a run has computed and written: metrics but for times, completions, the final weights, names of folders.

    Completions have ``columns`` alone, or all columns but the ``spared`` ones.
    """
    tables = [pq.read_table(file).to_pydict() for file in sorted((run / "completions").glob("*.parquet"))]
    if columns:
        return {"completions": [{name: table[name] for name in columns} for table in tables]}
    weights = load_file(run / "model" / "model.safetensors")
    return {
        "metrics": timeless(run),
        "completions": [  # NaN is not equal to itself, and its text is
            {name: repr(column) for name, column in table.items() if name not in spared} for table in tables
        ],
        "weights": {name: tensor.tolist() for name, tensor in weights.items()},
        "folders": sorted(path.name for path in run.iterdir() if path.is_dir()),
    }


def check_same(folder: Path, cls: type[Any], key: str, names: Sequence[str], **sections: Mapping[str, Any]) -> None:
    """Train once with each name for ``key``, and compare all that was computed."""
    outcomes = []
    for number, name in enumerate(names):
        (folder / str(number)).mkdir()
        section, _, field = key.partition(".")
        values = {**sections, section: {**sections.get(section, {}), field: name}}
        outcomes.append(results(train(tiny(cls, folder / str(number), **values))))
    assert outcomes[0] == outcomes[1]


class Gathering(PPOTrainer):
    """The first three steps wait for one another while their completions are drawn."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.together, self.drawn = Barrier(3, timeout=LONG_S), set[int]()

    def draw(self, prompts: Sequence[Prompt], step: int) -> list[Future[Batch]]:
        self.drawn.add(step)
        if step <= 3:
            self.together.wait()
        return super().draw(prompts, step)


@pytest.mark.everyday("asynchronous")
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule(name: str, tmp_path: Path, preloaded: Cluster) -> None:
    """With weights that stay as they are, time does not decide what is drawn, in whichever order steps are drawn. It
    decides after which token of a completion the asynchronous generator takes weights of another version."""
    outcomes, spared = [], ("version", "token_versions") if name == "asynchronous" else ()
    for number, spec in enumerate((name, copy_of(SCHEDULES[name], tmp_path))):
        (tmp_path / str(number)).mkdir()
        config = tiny(
            GRPOConfig, tmp_path / str(number), run={"schedule": spec, "steps": 4}, placement={"layout": "split"},
            optim={"lr": 1e-2 if name == "sync" else 0.0},
        )  # fmt: skip
        trainer = Gathering(config, cluster=preloaded, show=False)
        trainer.fit()
        outcomes.append({"drawn in parts": trainer.drawn, **results(trainer.run.directory.path, spared=spared)})
    assert outcomes[0] == outcomes[1]
    assert outcomes[1]["drawn in parts"] == ({1, 2, 3, 4} if name == "asynchronous" else set())


@pytest.mark.everyday("maxrl")
@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_an_advantage_estimator(name: str, tmp_path: Path) -> None:
    cls = PPOConfig if name.startswith("gae") else GRPOConfig
    sections = NEEDED_SETTINGS.get(name, {})
    check_same(
        tmp_path,
        cls,
        "algorithm.advantage",
        (name, copy_of(ADVANTAGES.declaration(name).function, tmp_path)),
        **sections,
    )


@pytest.mark.everyday("cross_entropy")
@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss(name: str, tmp_path: Path) -> None:
    """With dropout in the model, which is on by itself only where examples are imitated."""
    settings: Any = MODEL["config"]
    sections: dict[str, Any] = {"model": {"config": {**settings, "attention_dropout": 0.3}}}
    if name == "teacher_kl":
        (tmp_path / "teacher").mkdir()
        teacher = train(tiny(SFTConfig, tmp_path / "teacher", run={"steps": 1}, eval={"items": 0}))
        sections["algorithm"] = {"options": {"teacher": str(teacher / "model")}}
    check_same(
        tmp_path, GRPOConfig, "algorithm.loss", (name, copy_of(LOSSES.declaration(name).function, tmp_path)), **sections
    )


def test_a_reward(tmp_path: Path) -> None:
    check_same(tmp_path, GRPOConfig, "reward.name", ("fraction", copy_of(NAMED_REWARDS["fraction"], tmp_path)))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages: the engines and an environment of files of their own, by entry points."""
    folder = tmp_path / "packages"
    about = folder / "own_things-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-things\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[podium.engines]\nown_native = own_engine:NativeEngine\n"
        "own_transformers = own_transformers:TransformersEngine\n"
        "[podium.environments]\nnamed_twice = own_worlds:twice\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    find_engines.cache_clear()
    yield folder
    find_engines.cache_clear()


@pytest.mark.parametrize("name", ["native", "transformers"])
def test_an_engine(name: str, tmp_path: Path, packages: Path) -> None:
    module = {"native": "podium_native.engine", "transformers": "podium.rollout.engines.transformers"}
    copy_of(f"{module[name]}:", packages)
    check_same(tmp_path, GRPOConfig, "engine.name", (name, f"own_{name}"))


def test_an_environment(tmp_path: Path, packages: Path) -> None:
    """Calls of sessions share forward passes by chance, so the tokens and the rewards are compared."""
    path = copy_of(f"{worlds.__name__}:twice", packages)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    outcomes = []
    for number, name in enumerate(("named_twice", path)):
        (tmp_path / str(number)).mkdir()
        config = tiny(
            GRPOConfig, tmp_path / str(number), environment={"name": name},
            data={"chat_template": str(tmp_path / "chat.jinja")}, algorithm={"advantage": "grpo_turns"},
        )  # fmt: skip
        outcomes.append(results(train(config), ("session", "prompt", "tokens", "reward", "turn_rewards")))
    assert outcomes[0] == outcomes[1]
