"""One forward and backward pass of an output layer, in a process of its own, as its memory is measured.

    python -m bench.scored VOCABULARY HIDDEN TOKENS chunks|whole PASSES

prints the seconds of each pass and the peak of the process's memory above what it had before, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from podium.backends.process import keep_freed_memory
from podium.training.output_layer import LogitsTail, output_scores


def whole(hidden_KH: Tensor, layer: nn.Linear, targets_K: Tensor) -> Tensor:
    """The plain way: all logits at once, which autograd keeps."""
    return torch.log_softmax(layer(hidden_KH), -1, dtype=torch.float32).gather(1, targets_K[:, None])[:, 0]


def chunks(hidden_KH: Tensor, layer: nn.Linear, targets_K: Tensor) -> Tensor:
    return output_scores(hidden_KH, layer, targets_K, tail=LogitsTail()).logprobs


def peak_kb() -> int:
    """The most memory that this process had. (What getrusage says is at least what its parent had when it began.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def main() -> None:
    vocabulary, hidden, tokens, how, passes = sys.argv[1:]
    keep_freed_memory()  # as worker processes do
    torch.set_num_threads(1)
    layer = nn.Linear(int(hidden), int(vocabulary), bias=False)
    hidden_KH = torch.randn(int(tokens), int(hidden)).requires_grad_()
    targets_K = torch.randint(int(vocabulary), (int(tokens),))
    before = peak_kb()
    seconds: list[float] = []
    for _ in range(int(passes)):
        layer.weight.grad = hidden_KH.grad = None
        started = time.perf_counter()
        {"chunks": chunks, "whole": whole}[how](hidden_KH, layer, targets_K).sum().backward()
        seconds.append(time.perf_counter() - started)
    sys.stdout.write(json.dumps({"seconds": seconds, "peak_mb": (peak_kb() - before) / 1024}) + "\n")


if __name__ == "__main__":
    main()
