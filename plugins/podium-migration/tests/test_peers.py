"""The tables against the packages of the other projects. A test is skipped and counted where its package is absent."""

from __future__ import annotations

from pathlib import Path

import pytest

peers = pytest.importorskip("podium_migration.peers")


@pytest.mark.parametrize("peer", peers.PEERS)
def test_every_setting_of_a_peer_has_an_answer_and_the_defaults_are_theirs(peer: str) -> None:
    settings = peers.read_settings(peer)
    if not settings:
        pytest.skip(f"{peer} is not installed")
    assert sum(map(len, settings.values())) > 300
    assert peers.find_problems(peer, settings) == []


def write_peer(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()


@pytest.fixture
def peer_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(peers, "find_package", lambda name: tmp_path / name if (tmp_path / name).is_dir() else None)
    return tmp_path


def test_a_new_setting_and_another_default_of_verl_are_named(peer_folder: Path) -> None:
    text = "trainer: {nnodes: 1, brand_new: 3}\nalgorithm: {lam: 0.9, gamma: 1.0}\n"
    write_peer(peer_folder, {"verl/trainer/config/_generated_ppo_trainer.yaml": text})
    assert peers.find_problems("verl", peers.read_settings("verl")) == [
        "verl has trainer.brand_new, which the table does not answer",
        "verl fsdp: algorithm.lam is 0.9 by default, and 1.0 in the table",
    ]


def test_the_fields_of_a_configuration_of_trl_are_those_of_its_bases_too(peer_folder: Path) -> None:
    base = "@dataclass\nclass _BaseConfig(TrainingArguments):\n    seed: int = 42\n"
    grpo = "@dataclass\nclass GRPOConfig(_BaseConfig):\n    beta: float = field(default=0.5)\n    brand_new: int = 1\n"
    write_peer(peer_folder, {"trl/trainer/base_config.py": base, "trl/trainer/grpo_config.py": grpo})
    settings = peers.read_settings("trl")
    assert settings["grpo"] == {"seed": 42, "beta": 0.5, "brand_new": 1}
    assert peers.find_problems("trl", settings) == [
        "trl grpo: beta is 0.5 by default, and 0.0 in the table",
        "trl has brand_new, which the table does not answer",
    ]


def test_the_options_that_a_loop_of_openrlhf_adds_are_read(peer_folder: Path) -> None:
    script = (
        "for prefix in ('actor', 'critic'):\n"
        "    parser.add_argument(f'--{prefix}.adam.lr', default=1e-6 if prefix == 'actor' else 9e-6)\n"
        "parser.add_argument('--brand.new', action='store_true')\n"
    )
    write_peer(peer_folder, {"openrlhf/cli/train_ppo_ray.py": script})
    settings = peers.read_settings("openrlhf")
    assert settings["ppo_ray"] == {"actor.adam.lr": 1e-6, "critic.adam.lr": 9e-6, "brand.new": False}
    assert peers.find_problems("openrlhf", settings) == ["openrlhf has brand.new, which the table does not answer"]


def test_the_settings_of_prime_rl_are_nested_models(peer_folder: Path) -> None:
    trainer = (
        "class AdamWConfig(BaseConfig):\n    lr: float = Field(1e-6, ge=0)\n    brand_new: int = 3\n"
        "OptimizerConfig: TypeAlias = AdamWConfig\n"
        "class TrainerConfig(BaseConfig):\n    optim: OptimizerConfig = AdamWConfig()\n    max_steps: int = None\n"
    )
    write_peer(peer_folder, {"prime_rl/configs/trainer.py": trainer})
    settings = peers.read_settings("prime-rl")
    assert settings["trainer"] == {"optim.lr": 1e-6, "optim.brand_new": 3, "max_steps": None}
    assert peers.find_problems("prime-rl", settings) == [
        "prime-rl has optim.brand_new, which the table does not answer"
    ]


def test_the_script_says_what_is_installed(capsys: pytest.CaptureFixture[str], peer_folder: Path) -> None:
    assert peers.main() == 0
    assert capsys.readouterr().out.splitlines() == [f"{peer}: not installed" for peer in peers.PEERS]
