"""One call of the native engine: which completion sits in which slot, and when it leaves.

    prompts ──prefill, a batch at a time──> keys and values of each prompt ──place──> slots ──decode──> completions
                                            (kept until all n are placed)     ^                 |
                                                                              └── free slot <───┘ stop or length

Slots 0 to A-1 are decoded at every step, A a multiple of 16. While completions wait, a slot that falls free is filled
before the next step. When none waits any more, live slots from the end move into free ones and A shrinks.

The host knows without asking the device when a completion reaches its length. Whether a stop token was drawn it asks
at every step on the CPU, and every eighth on other devices, where asking empties the queue of kernels; what was drawn
after a stop token is dropped in the end.

New weights may come between two steps: ``_current_decoder`` then gives another decoder, and prompts and live slots go
through it again before the next token is drawn.

Legend: C completions of the call, S slots, A active slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.rollout.engines.draw import Draw, draw, uniforms
from podium.rollout.engines.gate import WeightGate
from podium.rollout.engines.native.cache import ROW_QUANTUM, KVCache
from podium.rollout.engines.native.decoder import Decoder, Prefill
from podium.rollout.sampling import SamplingParams

__all__ = ["Drawn", "SlotLoop"]

_STEPS_BETWEEN_LOOKS = {"cpu": 1}  # other devices: 8
_SHRINK_BELOW = 0.75  # moving slots costs about a step; worth it when a quarter of the rows falls away
_PREFILL_AHEAD = 4  # prompts for a quarter of the slots beyond those needed now, so that refills rarely wait for one
_FREE = -1


class Drawn(NamedTuple):
    """What was drawn for C completions, on the CPU, T = max_new_tokens: ids, log-probabilities, the versions of the
    weights that they come from, and kept sets."""

    ids_CT: Tensor
    logprobs_CT: Tensor
    versions_CT: Tensor
    kept: list[list[Tensor]] | None


class SlotLoop:
    """Draws all completions of one request; ``run`` is called once.

    State of a slot on the device, rows of one tensor: the token to feed next, its position, how many tokens were drawn,
    whether the slot moves on (0 or 1), and which completion it draws. A free slot stands still and draws for completion
    C, a row that is thrown away.
    """

    def __init__(
        self,
        gate: WeightGate,
        current_decoder: Callable[[], Decoder],
        cache: KVCache,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        *,
        slots: int,
        prefill_tokens: int,
    ) -> None:
        device, count = cache.device, len(seeds)
        self._device = device
        self._gate, self._current_decoder, self._changes = gate, current_decoder, -1
        self._cache, self._params = cache, params
        self._prompts = [list(prompt) for prompt in prompts]
        self._slots, self._prefill_tokens = slots, prefill_tokens

        self._ids = torch.zeros(count + 1, params.max_new_tokens, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(count + 1, params.max_new_tokens, device=device)
        self._versions = torch.zeros(count, params.max_new_tokens, dtype=torch.int64)
        self._uniforms = uniforms(torch.tensor([*seeds, 0], device=device), 0, params.max_new_tokens)
        self._kept: list[list[Tensor]] | None = [[] for _ in range(count)] if params.filtered else None
        self._stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)

        self._at_rest = torch.tensor([0, 0, 0, 0, count], device=device).unsqueeze(1)
        self._state = self._at_rest.repeat(1, cache.slots)
        self._stopped = torch.zeros(cache.slots, dtype=torch.bool, device=device)
        self._activate(0)

        # On the host. A slot's position at step s is _bases[slot] + s; it has reached its length when s is _ends[slot].
        self._owners = np.full(cache.slots, _FREE)
        self._bases = np.zeros(cache.slots, dtype=np.int64)
        self._ends = np.zeros(cache.slots, dtype=np.int64)
        self._step_number = 0
        self._next_completion = 0
        self._seen: dict[int, tuple[Prefill, int]] = {}  # prompt -> its prefill and row there, until all n are placed
        self._next_prompt = 0

    def run(self) -> Drawn:
        """Draw everything."""
        waits_until = len(self._ids) - 1
        while self._next_completion < waits_until or self._live().any():
            if self._next_completion < waits_until:
                self._fill()
            else:
                self._shrink()
            self._decode_until_one_leaves()
        return Drawn(self._ids[:-1].cpu(), self._logprobs[:-1].cpu(), self._versions, self._kept)

    def _live(self) -> np.ndarray:
        return self._owners != _FREE

    # ---- decoding

    def _decode_until_one_leaves(self) -> None:
        interval = _STEPS_BETWEEN_LOOKS.get(self._device.type, 8)
        live = self._live()
        soonest = int(self._ends[live].min())
        longest = int(self._bases[live].max())
        stops = bool(self._params.stop_token_ids)
        while self._step_number < soonest:
            if stops and self._step_number % interval == 0 and bool((self._host_stopped() & live).any()):
                break
            self._step(longest + self._step_number + 1)
            self._step_number += 1
        self._retire()

    def _host_stopped(self) -> np.ndarray:
        """Which slots have drawn a stop token; free slots draw too, and may have."""
        return self._stopped.cpu().numpy()

    def _step(self, until: int) -> None:
        tokens, positions, drawn, owners = self._views
        with self._gate:
            logits = self._decoder().decode(tokens, positions, self._cache, until)
        result = draw(logits, self._params, self._uniforms[owners, drawn])
        self._record(owners, drawn, result, self._owners[: len(tokens)])
        tokens.copy_(result.ids_B)
        self._advancing += self._moves
        if len(self._stops):
            self._active_stopped |= torch.isin(result.ids_B, self._stops)

    def _record(self, owners: Tensor, drawn: Tensor, result: Draw, host_owners: np.ndarray) -> None:
        self._ids[owners, drawn] = result.ids_B
        self._logprobs[owners, drawn] = result.logprobs_B
        if self._kept is not None and result.kept_ids_BK is not None and result.kept_sizes_B is not None:
            sizes = result.kept_sizes_B.tolist()
            order = result.kept_ids_BK[:, : max(sizes)].cpu()
            for row, owner in enumerate(host_owners.tolist()):
                if owner != _FREE:
                    self._kept[owner].append(order[row, : sizes[row]].clone())

    # ---- new weights

    def _decoder(self) -> Decoder:
        """The decoder of the weights that are there now; asked for inside the gate."""
        decoder = self._current_decoder()
        if self._gate.changes != self._changes:
            self._changes = self._gate.changes
            decoder.reserve(self._cache.length)
            self._begin_version(decoder, self._gate.version)
        return decoder

    def _begin_version(self, decoder: Decoder, version: int) -> None:
        """Nothing that other weights computed is used from here on: not the prompts seen, nor the slots' keys."""
        self._versions[self._next_completion :] = version
        self._seen.clear()
        self._next_prompt = self._next_completion // self._params.n
        slots = self._live().nonzero()[0]
        texts: list[list[int]] = []
        for slot, owner in zip(slots.tolist(), self._owners[slots].tolist(), strict=True):
            prompt = self._prompts[owner // self._params.n]
            drawn = int(self._bases[slot]) + self._step_number - len(prompt) + 1
            self._versions[owner, drawn:] = version
            texts.append(prompt + self._ids[owner, : drawn - 1].tolist())  # the last one drawn is the next one fed
        for part in _parts(texts, self._prefill_tokens):
            seen = decoder.prefill(texts[part])
            rows = torch.arange(part.stop - part.start, device=self._device)
            self._cache.place(seen.keys, seen.values, rows, torch.from_numpy(slots[part]).to(self._device))

    # ---- slots

    def _retire(self) -> None:
        """Free the slots whose completion has ended."""
        live = self._live()
        finished = live & (self._ends <= self._step_number)
        if len(self._stops):
            finished |= live & self._host_stopped()
        slots = finished.nonzero()[0]
        if len(slots):
            self._free(slots)

    def _free(self, slots: np.ndarray) -> None:
        self._owners[slots] = _FREE
        index = torch.from_numpy(slots).to(self._device)
        self._state[:, index] = self._at_rest
        self._stopped[index] = False

    def _fill(self) -> None:
        """Give free slots to waiting completions, which draw their first token from their prompt's last logits."""
        free = (self._owners[: self._slots] == _FREE).nonzero()[0]
        count = min(len(free), len(self._ids) - 1 - self._next_completion)
        if count == 0:
            return
        slots = free[:count]
        owners = np.arange(self._next_completion, self._next_completion + count)
        prompt_of = owners // self._params.n
        with self._gate:
            self._prefill_to(int(prompt_of[-1]))
        self._next_completion += count
        lengths = np.array([len(self._prompts[prompt]) for prompt in prompt_of])

        slot_index = torch.from_numpy(slots).to(self._device)
        owner_index = torch.from_numpy(owners).to(self._device)
        logits = torch.cat([self._place(part, prompt_of, slot_index) for part in _runs(prompt_of, self._seen)])
        start = torch.zeros_like(owner_index)
        result = draw(logits, self._params, self._uniforms[owner_index, start])
        self._record(owner_index, start, result, owners)

        ones = torch.ones_like(owner_index)
        positions = torch.from_numpy(lengths).to(self._device)
        self._state[:, slot_index] = torch.stack((result.ids_B, positions, ones, ones, owner_index))
        self._stopped[slot_index] = torch.isin(result.ids_B, self._stops)
        self._owners[slots] = owners
        self._bases[slots] = lengths - self._step_number
        self._ends[slots] = self._step_number + self._params.max_new_tokens - 1
        for prompt in [prompt for prompt in self._seen if (prompt + 1) * self._params.n <= self._next_completion]:
            del self._seen[prompt]
        self._activate(int(self._live().nonzero()[0][-1]) + 1)

    def _place(self, part: slice, prompt_of: np.ndarray, slots: Tensor) -> Tensor:
        """Write one prefill's keys and values into the slots of ``part``; their logits, one row a slot."""
        places = [self._seen[prompt] for prompt in prompt_of[part].tolist()]
        prefill = places[0][0]
        rows = torch.tensor([row for _, row in places], device=self._device)
        self._cache.place(prefill.keys, prefill.values, rows, slots[part])
        return prefill.logits_PV[rows]

    def _prefill_to(self, last: int) -> None:
        """See to it that prompts up to ``last`` have been through the model, each once a version."""
        decoder = self._decoder()
        ahead = self._slots // (_PREFILL_AHEAD * self._params.n)
        while self._next_prompt <= last:
            batch: list[int] = []
            width = 0
            for prompt in range(self._next_prompt, min(last + 1 + ahead, len(self._prompts))):
                width = max(width, len(self._prompts[prompt]))
                if batch and width * (len(batch) + 1) > self._prefill_tokens:
                    break
                batch.append(prompt)
            prefill = decoder.prefill([self._prompts[prompt] for prompt in batch])
            self._seen.update({prompt: (prefill, row) for row, prompt in enumerate(batch)})
            self._next_prompt += len(batch)

    def _shrink(self) -> None:
        """Nobody waits: close the gaps when that takes away enough rows."""
        live = self._live()
        size = _up(int(live.sum()))
        if size > _SHRINK_BELOW * self._active:
            return
        source = live[size:].nonzero()[0] + size
        target = (~live[:size]).nonzero()[0][: len(source)]
        if len(source):
            sources, targets = (torch.from_numpy(slots).to(self._device) for slots in (source, target))
            self._cache.move(sources, targets, int(self._bases[source].max()) + self._step_number)
            self._state[:, targets] = self._state[:, sources]
            self._stopped[targets] = self._stopped[sources]
            for array in (self._owners, self._bases, self._ends):
                array[target] = array[source]
            self._free(source)
        self._activate(size)

    def _activate(self, slots: int) -> None:
        """Decode slots 0 to ``slots``, rounded up, from now on; the views are made once for many steps."""
        self._active = _up(slots)
        tokens, positions, drawn, moves, owners = self._state[:, : self._active]
        self._views = (tokens, positions, drawn, owners)
        self._advancing, self._moves = self._state[1:3, : self._active], moves
        self._active_stopped = self._stopped[: self._active]


def _up(rows: int) -> int:
    return -(-rows // ROW_QUANTUM) * ROW_QUANTUM


def _parts(texts: Sequence[Sequence[int]], most_tokens: int) -> Iterator[slice]:
    """Cut ``texts``, in order, where a part padded to its longest would exceed ``most_tokens``; at least one each."""
    start, width = 0, 0
    for at, text in enumerate(texts):
        width = max(width, len(text))
        if at > start and width * (at + 1 - start) > most_tokens:
            yield slice(start, at)
            start, width = at, len(text)
    if start < len(texts):
        yield slice(start, len(texts))


def _runs(prompt_of: np.ndarray, seen: dict[int, tuple[Prefill, int]]) -> list[slice]:
    """Cut the completions, in order, where the prefill that saw their prompt changes."""
    prefills = [id(seen[prompt][0]) for prompt in prompt_of.tolist()]
    cuts = [0, *(i for i in range(1, len(prefills)) if prefills[i] != prefills[i - 1]), len(prefills)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]
