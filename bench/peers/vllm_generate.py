"""vLLM's build for CPUs on the workload of bench.suites.generation. Runs in .venvs/vllm.

It takes random weights of its own. Its graphs are not compiled, as in the engine `vllm` of Podium's on a CPU. Its
scheduler runs in this process, so that no process of vLLM's works while others have their turn.
"""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import Peer

MOST_TOKENS = 128  # of a prompt and its completion
CACHE_BYTES = 1 << 30


class Generator:
    """An engine, made by `open`."""

    def __init__(self) -> None:
        self._llm: Any = None

    def open(self, folder: str, dtype: str, sequences: int) -> int:
        """Make the engine of the model whose configuration is in ``folder``. Returns its threads."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        import torch
        import vllm

        self._llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=dtype,
            max_num_seqs=sequences,
            max_model_len=MOST_TOKENS,
            enable_prefix_caching=False,  # each turn has the same prompts
            kv_cache_memory_bytes=CACHE_BYTES,
            enforce_eager=True,  # compiling took six minutes
        )
        return torch.get_num_threads()

    def generate(self, prompts: list[list[int]], group: int, new_tokens: int) -> dict[str, float]:
        """Seconds and completion tokens of one call."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(n=group, max_tokens=new_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self._llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        return {"seconds": seconds, "tokens": tokens}


if __name__ == "__main__":
    generator = Generator()
    Peer().serve({"open": generator.open, "generate": generator.generate})
