"""Our own decode loop for decoders of the Llama, Mistral, Qwen and SmolLM families, over the policy's own weights.

    policy.model --> parameters   the matrices of the forward pass, read from the model: no copy
                        |
    prompts ------>  decoder      prefill: all prompts of a batch, once each, packed      decode: one token a lane
                        |                                                                    ^
                      cache       keys and values of every lane, preallocated                |
                        |                                                                    |
    completions <--   lanes       the loop: fill, step, draw, retire, refill ----------------+

What it guarantees. A completion depends on its prompt, the parameters, its seed and the weights, up to rounding: a draw
that falls within rounding (about 1e-7 of the mass in float32) of the boundary between two tokens may go either way. In
float32 on the CPU even rounding does not depend on the batch, the lane, the number of lanes or the lengths of other
texts. BLAS promises no such thing, so the engine sees to it: a product takes only numbers of rows that were tried on
this machine (:mod:`.products`), few rows take matrices that were packed for them (:mod:`.packing`), and attention sums
over blocks that a token's position fixes (:mod:`.prompt_attention`, :mod:`.cache`). In bfloat16 it was seen not to
hold, nor between different numbers of threads. It does not hold for a
mixture of experts, where a product has as many rows as tokens chose its expert.

`torch.compile` was tried for the decode step and left out: on the CPU one compiled step of a 1M-parameter model took
longer than the eager one, each span of positions compiles anew (seconds), and dynamic shapes failed in the compiler.

With ``engine.options.cuda_graphs``, which is the default on CUDA, decode steps have static shapes and are replayed as
CUDA graphs: see :mod:`.graphs`.
"""

from podium_native.engine import NativeEngine

__all__ = ["NativeEngine"]
