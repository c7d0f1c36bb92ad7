"""Our own decode loop for decoders of the Llama and Qwen families, over the policy's own weights.

                      fusion      q, k, v (and gate, up) of the policy's layers become views of one storage
                        |
    policy.model --> weights      the matrices of the forward pass, read from the module: no copy
                        |
    prompts ------>  decoder      prefill: all prompts of a batch, once each, packed      decode: one token a slot
                        |                                                                    ^
                      cache       keys and values of every slot, preallocated                |
                        |                                                                    |
    completions <--   slots       the loop: fill, step, draw, retire, refill ----------------+

What it guarantees. Completions depend on prompt, parameters, seed and weights. In float32 on the CPU the ids are, as
far as tests and measurements show, also the same whatever else is in the batch, bit by bit: a row of a matrix product
comes out the same for any multiple of 16 rows, and so do attention's sums over any multiple of 16 positions, which is
why both are padded to that. BLAS promises no such thing, and other dtypes and devices do not show it: there, a draw
that falls within rounding (about 1e-7 of the mass in float32) of the boundary between two tokens may go either way.
"""

from podium.rollout.engines.native.engine import NativeEngine
from podium.rollout.engines.native.fusion import fuse_projections
from podium.rollout.engines.native.weights import unsupported

__all__ = ["NativeEngine", "fuse_projections", "unsupported"]
