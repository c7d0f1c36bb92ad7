"""The suite of loading reads the weights that it says, and its floor the whole file."""

from __future__ import annotations

from bench.suites import loading
from bench.workload import SHAPES
from podium.models import ModelConfig, load_model


def test_a_model_directory_holds_the_shape_and_its_file_is_read_whole() -> None:
    with loading.model_directory("1m") as folder:
        model = load_model(ModelConfig(path=str(folder), tokenizer="chars:01"))
        assert model.config.hidden_size == SHAPES["1m"].hidden
        nbytes = sum(weight.nbytes for weight in model.parameters())
        assert nbytes < (folder / loading.WEIGHTS).stat().st_size < nbytes + 20_000
        assert loading.weights_s(lambda: model) > 0
        assert loading.read_s(folder / loading.WEIGHTS) > 0
    assert not folder.exists()
