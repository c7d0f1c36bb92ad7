"""The lanes of the native engine: which request sits in which lane, what it draws there, and when it leaves.

    waiting ──prefill, a batch at a time──> keys and values of each prompt ──place──> lanes ──decode──> events
       ^                                    (until no request that is due needs them)   ^         |
       └── submit                                                                       └─ free <─┘ stop, length, abort

A lane is a row of the key/value cache. Lanes 0 to A-1 are decoded at every step, A a multiple of 16, or less where the
decoder's matrices are packed or no request is ``exact``. While requests wait, a lane that falls free is filled before
the next step. When none waits, live lanes from the end change places with free ones and A shrinks.

A free lane remembers: its keys and values stay until another request needs the lane, and then move to pages (see
:mod:`.memory`) if the request allowed that they are reused. A prompt that begins like the text of some lane or page
takes them from there, and only the rest goes through the model. What a prefill computed is the same, bit by bit, for
every prompt that begins alike (``exact`` counts these positions); what decoding computed differs from it by rounding,
and serves only requests that allow it (``reuse_completions``). New weights end all memory.

When a completion reaches its length is known without asking the device. Whether a stop token was drawn is asked at
every step on the CPU, and at every eighth on other devices, where asking empties the queue of kernels. A lane that has
drawn its stop token stands still until then. The ids that a lane with a constraint draws are read at every step, since
the next mask depends on them.

New weights may come between two steps: ``current_decoder`` then gives another decoder, and prompts and live lanes go
through it again before the next token is drawn.

Legend: A active lanes, B rows of one draw, T most new tokens, S most stop tokens, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby, islice, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from podium.errors import GenerationError
from podium.rollout.engines.constraints import restrict_logits
from podium.rollout.engines.draw import draw, uniforms
from podium.rollout.engines.gate import WeightGate
from podium.rollout.engines.journal import Drawn
from podium.rollout.engines.requests import Event, Failed, Request, RequestId, RequestQueue, Tokens, conclude
from podium.rollout.sampling import SamplingParams
from podium.telemetry.progress import Counting
from podium_native.cache import KVCache, cache_class
from podium_native.decoder import Decoder, Past
from podium_native.graphs import DecodeGraphs, bucket
from podium_native.lane import LANE, keep_draw
from podium_native.memory import PagedMemory
from podium_native.products import round_rows
from podium_native.prompts import (
    Beginning,
    Key,
    Seen,
    cut_texts,
    drawing_of,
    find_due,
    guide_of,
    key_of,
)

__all__ = ["Lanes"]

_STEPS_BETWEEN_LOOKS = {"cpu": 1}  # other devices: 8
_SHRINK_BELOW = 0.75  # moving lanes costs about a step; worth it when a quarter of the rows falls away
_PREFILL_AHEAD = 4  # prompts for a quarter of the lanes beyond those needed now, so that refills rarely wait for one
_SHORTEST_PREFIX = 16  # below it, copying keys and values costs more than computing them

_Groups: TypeAlias = list[tuple[SamplingParams, Tensor]]  # rows that are drawn alike


class Lanes:
    """Draws the completions of requests side by side.

    State of a lane on the device, rows of one tensor: the token to feed next, its position, how many tokens were drawn,
    and whether the lane moves on (0 or 1). A free lane stands still behind the text that it remembers; what it draws
    is not read.

    Args:
        grow: Gives the lanes more positions, at most so many, where what they draw reaches the last one.
        graphs: Decodes in steps of static shape; None decodes step by step as it comes.
        vocabulary: The number of ids, of which masks say which may come.

    Attributes:
        memory: The texts that lanes lost.
        prompt_tokens: Number of tokens of the prompts that began so far.
        reused_tokens: Those of them whose keys and values were there already.
        prefilled_tokens: Number of tokens that went through the model, those that new weights computed again included.
    """

    def __init__(
        self,
        gate: WeightGate,
        current_decoder: Callable[[], Decoder],
        prefill_tokens: int,
        count: Counting,
        grow: Callable[[int], None],
        graphs: DecodeGraphs | None = None,
        vocabulary: int = 0,
    ) -> None:
        self._count, self._grow, self._vocabulary, self._graphs = count, grow, vocabulary, graphs
        self._broken: dict[int, GenerationError] = {}  # lanes that can draw no further token
        self._gate, self._current_decoder, self._changes = gate, current_decoder, -1
        self._prefill_tokens = prefill_tokens
        self.prompt_tokens = self.reused_tokens = self.prefilled_tokens = 0
        self.memory = PagedMemory()
        self.clear()

    def clear(self) -> None:
        """Give back all memory. No lane may be live."""
        self.memory.clear()
        self.clear_lanes()

    def clear_lanes(self) -> None:
        """Give back what the lanes take. No lane may be live."""
        self.cache: KVCache | None = None
        if self._graphs is not None:
            self._graphs.clear()
        self._device = device = self._current_decoder().weights.device
        self._state = torch.zeros(4, 0, dtype=torch.int64, device=device)
        self._ids = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, 1, device=device)
        self._uniforms = torch.zeros(0, 1, dtype=torch.float64, device=device)
        self._stops = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._records: Any = np.zeros(0, LANE)
        self._texts = np.zeros((0, 0), np.int64)
        self._seen: dict[Key, Seen] = {}
        self._kinds: dict[SamplingParams, int] = {}
        self._step_number = self._version = self._clock = 0
        self._activate(0)

    def resize(self, count: int, length: int) -> None:
        """Have ``count`` lanes of ``length`` positions, no fewer than before; what the lanes hold stays."""
        cache = cache_class(self._device)(self._current_decoder().weights, count, length)
        if self.cache is not None:
            cache.take_over(self.cache)
        self.cache = cache
        more = count - len(self._records)
        self._state = F.pad(self._state, (0, more))
        self._records = np.concatenate((self._records, np.zeros(more, LANE)))
        self._texts = np.pad(self._texts, ((0, more), (0, length - self._texts.shape[1])))
        self._widen(lanes=more)
        self._activate(self._active)

    @property
    def live(self) -> int:
        """Number of lanes that draw."""
        return int(self._records["live"].sum())

    @property
    def remembers(self) -> bool:
        """Whether some lane holds keys and values that a request may need."""
        return bool(self._records["known"].any())

    def advance(self, waiting: RequestQueue | None, most: int, interrupted: Callable[[], bool]) -> list[Event]:
        """Begin requests of ``waiting`` in the first ``most`` lanes, and draw tokens until there is an event."""
        self._events: list[Event] = []
        if waiting:
            self._fill(waiting, most)
        if not waiting:
            self._shrink()
        if not self._events and self._records["live"].any():
            self._decode(interrupted)
        return self._events

    def drop(self, ids: Collection[RequestId]) -> None:
        """Free the lanes of these requests."""
        live = self._records["live"].nonzero()[0]
        if lanes := [lane for lane in live if self._records["request"][lane].id in ids]:
            self._free(np.array(lanes), forget=True)

    def drawn(self) -> list[tuple[RequestId, Drawn]]:
        """What each live lane has drawn."""
        if not len(lanes := self._records["live"].nonzero()[0]):
            return []
        index = self._index(lanes)
        lengths = self._state[2].index_select(0, index).tolist()
        ids, logprobs = (
            table[:, : max(lengths)].index_select(0, index).tolist() for table in (self._ids, self._logprobs)
        )
        finished: list[tuple[RequestId, Drawn]] = []
        for row, (lane, length) in enumerate(zip(lanes.tolist(), lengths, strict=True)):
            starts = [*self._records["versions"][lane], (length, 0)]
            versions = [version for (at, version), (end, _) in pairwise(starts) for _ in range(at, end)]
            kept = self._records["kept"][lane]
            kept = None if kept is None else [token_ids.tolist() for token_ids in kept[:length]]
            top = self._records["top"][lane]
            draft = Drawn(ids[row][:length], logprobs[row][:length], versions, kept, top=top and top[:length])
            finished.append((self._records["request"][lane].id, draft))
        return finished

    # ---- decoding

    def _decode(self, interrupted: Callable[[], bool]) -> None:
        if self._graphs is not None:
            self._graphs.look_again()
        live = self._records["live"].nonzero()[0]
        ends, bases, kinds = (self._records[field][live] for field in ("end", "base", "kind"))
        soonest, longest, groups = int(ends.min()), int(bases.max()), self._groups(kinds, live)
        stops, streaming = bool(self._records["stops"][live].any()), live[self._records["streams"][live]]
        guided = bool(self._records["guided"][live].any())
        interval = 1 if len(streaming) or guided else _STEPS_BETWEEN_LOOKS.get(self._device.type, 8)
        first = self._step_number
        while True:
            if self._step_number >= soonest or (stops and self._step_number % interval == 0):
                stopped = self._state[3].cpu().numpy() == 0
                ended = self._records["live"] & (stopped | (self._records["end"] <= self._step_number))
                if ended.any():
                    return self._retire(ended.nonzero()[0])
            if self._step_number > first and (len(streaming) or interrupted()):
                return None
            until = longest + self._step_number + 1
            if self.cache is not None and until >= self.cache.length:  # a lane that ends there stands behind it
                asked = self._records["request"][live]
                self._grow(max(len(request.prompt) + request.params.max_new_tokens for request in asked))
            self._step(until, groups, stops, guided)
            self._step_number += 1
            self._count.done += len(live)
            if self._broken:
                return self._end_broken()
            self._stream(streaming)

    def _step(self, until: int, groups: _Groups, stops: bool, guided: bool) -> None:
        assert self.cache is not None
        ids: Tensor | None = None
        logprobs: Tensor | None = None
        logits: Tensor | None
        with self._gate:
            decoder = self._decoder()
            tokens, positions, drawn_A1, uniforms_AT, ids_AT, logprobs_AT, stops_AS = self._views
            numbers = uniforms_AT.gather(1, drawn_A1).squeeze(1)
            if self._graphs is None:
                logits = decoder.decode(tokens, positions, self.cache, until)
            else:
                params = groups[0][0] if len(groups) == 1 and not guided else None
                params = None if params is None or params.filtered or params.record_top else params
                inputs = tokens, positions, numbers
                logits, ids, logprobs = self._graphs.step(decoder, self.cache, inputs, until, params)
        if ids is None or logprobs is None:
            assert logits is not None
            ids, logprobs = self._draw(logits, groups, numbers, range(self._active))
        ids_AT.scatter_(1, drawn_A1, ids.unsqueeze(1))
        logprobs_AT.scatter_(1, drawn_A1, logprobs.unsqueeze(1))
        tokens.copy_(ids)
        self._advancing += self._moves
        if stops:
            self._moves.masked_fill_((ids.unsqueeze(1) == stops_AS).any(1), 0)

    def _groups(self, kinds: np.ndarray, rows: np.ndarray) -> _Groups:
        params = list(self._kinds)
        if (kinds == kinds[0]).all():
            return [(params[kinds[0]], self._index(rows))]
        return [(params[kind], self._index(rows[kinds == kind])) for kind in np.unique(kinds)]

    def _draw(
        self, logits_BV: Tensor, groups: _Groups, uniforms_B: Tensor, lanes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities of one token of each row. Row b belongs to lane ``lanes[b]``."""
        guided = list[int]()
        if self._records["guided"].any():
            guided = self._records["guided"][list(lanes)].nonzero()[0].tolist()
            self._restrict(logits_BV, guided, lanes)
        ids, logprobs = self._draw_groups(logits_BV, groups, uniforms_B, lanes)
        if guided:
            for row, token_id in zip(guided, ids[guided].tolist(), strict=True):
                if lanes[row] not in self._broken and (error := self._records["guide"][lanes[row]].accept(token_id)):
                    self._broken[lanes[row]] = error
        return ids, logprobs

    def _draw_groups(
        self, logits_BV: Tensor, groups: _Groups, uniforms_B: Tensor, lanes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        if len(groups) == 1:
            result = draw(logits_BV, groups[0][0], uniforms_B)
            keep_draw(self._records, result, lanes)
            return result.ids_B, result.logprobs_B
        ids = torch.zeros_like(uniforms_B, dtype=torch.int64)
        logprobs = torch.zeros_like(uniforms_B, dtype=torch.float32)
        for params, rows in groups:
            result = draw(logits_BV[rows], params, uniforms_B[rows])
            keep_draw(self._records, result, [lanes[row] for row in rows.tolist()])
            ids[rows], logprobs[rows] = result.ids_B, result.logprobs_B
        return ids, logprobs

    def _restrict(self, logits_BV: Tensor, rows: Sequence[int], lanes: Sequence[int]) -> None:
        """Let these rows draw what their constraints allow. Lanes without a token to draw are noted as broken."""
        errors = restrict_logits(logits_BV, rows, [self._records["guide"][lanes[row]] for row in rows])
        self._broken |= {lanes[row]: error for row, error in zip(rows, errors, strict=True) if error is not None}

    def _end_broken(self) -> None:
        """Fail the requests of broken lanes, and free these."""
        broken, self._broken = self._broken, {}
        self._events += [Failed(self._records["request"][lane].id, error) for lane, error in broken.items()]
        self._free(np.array([*broken]), forget=True)

    def _stream(self, lanes: np.ndarray) -> None:
        """Report what these lanes drew last."""
        if len(lanes):
            index = self._index(lanes)
            last_number = self._state[2, index] - 1
            ids, logprobs = self._ids[index, last_number].tolist(), self._logprobs[index, last_number].tolist()
            requests, reused = self._records["request"][lanes], self._records["reused"][lanes].tolist()
            for request, id, logprob, count in zip(requests, ids, logprobs, reused, strict=True):
                self._events.append(Tokens(request.id, [id], [logprob], self._version, count))

    # ---- new weights

    def _decoder(self) -> Decoder:
        """The decoder of the weights that are there now; asked for inside the gate."""
        assert self.cache is not None
        decoder = self._current_decoder()
        decoder.reserve(self.cache.length)
        if self._gate.changes != self._changes:
            self._changes, self._version = self._gate.changes, self._gate.version
            self._begin_version(decoder, self.cache)
            decoder.pack(self.live, self._steps_left())
            self._activate(self._active)  # as many rows as these weights allow
            if self._graphs is not None:
                self._graphs.look_again()
        return decoder

    def _begin_version(self, decoder: Decoder, cache: KVCache) -> None:
        """Nothing that other weights computed is used from here on: no prompt, no memory, no lane's keys."""
        self._seen.clear()
        self.memory.clear()
        records = self._records
        records["known"] = records["used"] = 0
        lanes = records["live"].nonzero()[0]
        texts: list[Sequence[int]] = []
        for lane, count in zip(lanes, self._state[2, self._index(lanes)].tolist(), strict=True):
            prompt = records["request"][lane].prompt
            records["versions"][lane].append((count, self._version))
            records["known"][lane] = records["exact"][lane] = len(prompt)
            texts.append((*prompt, *self._ids[lane, : count - 1].tolist()))  # the last one drawn is fed next
        for part in cut_texts(texts, self._prefill_tokens):
            seen = decoder.prefill(texts[part])
            self.prefilled_tokens += sum(map(len, texts[part]))
            rows = torch.arange(part.stop - part.start, device=self._device)
            cache.place(seen.keys, seen.values, rows, self._index(lanes[part]))

    # ---- lanes

    def _retire(self, lanes: np.ndarray) -> None:
        """Free these lanes, whose completions have ended."""
        records, index = self._records, self._index(lanes)
        lengths = self._state[2].index_select(0, index).tolist()
        ids, logprobs = (
            table[:, : max(lengths)].index_select(0, index).cpu().numpy() for table in (self._ids, self._logprobs)
        )
        failed: list[int] = []
        with torch.inference_mode(False):  # what is reported may take part in training
            for row, (lane, length) in enumerate(zip(lanes.tolist(), lengths, strict=True)):
                request, kept, top, reused = (records[name][lane] for name in ("request", "kept", "top", "reused"))
                (_, version), *changes = records["versions"][lane]
                if changes:
                    version = torch.full((length,), version)
                    for start, changed in changes:
                        version[start:] = changed
                guide = records["guide"][lane]
                masks = guide.masks[:length] if guide is not None and guide.restricts else None
                parts = version, kept and kept[:length], masks, top and top[:length]
                event = conclude(request, ids[row, :length], logprobs[row, :length], *parts, reused=int(reused))
                self._events.append(event)
                if isinstance(event, Failed):
                    failed.append(lane)
                begin, end = len(request.prompt), len(request.prompt) + length - 1  # the last token was not fed
                self._texts[lane, begin:end] = ids[row, : length - 1]
                records["known"][lane] = end
        self._free(lanes)
        if failed:
            self._free(np.array(failed), forget=True)

    def _free(self, lanes: np.ndarray, forget: bool = False) -> None:
        """Let these lanes stand still. With ``forget`` their keys and values, which may not be numbers, go."""
        self._clock += 1
        self._records["live"][lanes] = self._records["guided"][lanes] = False
        self._records["guide"][lanes] = None
        self._records["used"][lanes] = self._clock
        index = self._index(lanes)
        self._state[2:].index_fill_(1, index, 0)
        if forget and self.cache is not None:
            self._records["known"][lanes] = self._records["used"][lanes] = 0
            self.cache.clear(index)

    def _fill(self, waiting: RequestQueue, most: int) -> None:
        """Give free lanes to waiting requests, which draw their first token from their prompt's last logits."""
        assert self.cache is not None
        records = self._records
        free = (~records["live"][:most]).nonzero()[0]
        if not (requests := waiting.take(len(free))):
            return
        keys = list(map(key_of, requests))
        due = find_due(waiting, keys[-1], min(most, len(records)) // _PREFILL_AHEAD)
        with self._gate:
            decoder = self._decoder()
            decoder.pack(self.live + len(requests), max(request.params.max_new_tokens for request in requests))
            self._prefill(decoder, keys, due)
        lanes = free[np.argsort(records["used"][free], kind="stable")][: len(requests)]  # first those just read whole
        index = self._index(lanes)
        seen = [self._seen[key] for key in keys]
        reused = self._count_prompts(keys)
        for request in requests:
            self.memory.forget_session(request.session)  # whose lane has all of it
        self.spill(lanes)
        logits: list[Tensor] = []
        at = 0
        for _, run in groupby(seen, lambda one: id(one.prefill)):
            prefills, run_rows, *_ = zip(*run, strict=True)
            rows = torch.tensor(run_rows, device=self._device)
            self.cache.place(prefills[0].keys, prefills[0].values, rows, index[at : at + len(rows)])
            logits.append(prefills[0].logits_PV[rows])
            at += len(rows)
        rows = zip(lanes.tolist(), seen, reused, requests, strict=True)
        for lane, (_, _, exact, _), reused_tokens, request in rows:
            params, length = request.params, len(request.prompt)
            self._texts[lane, :length] = request.prompt
            kind = self._kinds.setdefault(drawing_of(params), len(self._kinds))
            records[lane] = (
                *(True, bool(params.stop_token_ids), request.stream, kind),
                *(length - self._step_number, self._step_number + params.max_new_tokens - 1),
                *(length, exact, 0, reused_tokens, request, [(0, self._version)], [] if params.filtered else None),
                [] if params.record_top else None,
                *(request.constraint is not None, guide_of(request, self._vocabulary)),
            )
        due += map(key_of, islice(waiting, 1))
        self._seen = {key: seen for key, seen in self._seen.items() if key in due}
        self._draw_first(requests, lanes, torch.cat(logits))
        self._count.done += len(requests)
        if self._broken:
            self._end_broken()
        self._stream(lanes[records["streams"][lanes] & records["live"][lanes]])

    def _draw_first(self, requests: Sequence[Request], lanes: np.ndarray, logits_BV: Tensor) -> None:
        """Draw the first token of each request, and let its lane move on from there."""
        records, index = self._records, self._index(lanes)
        new_tokens = max(request.params.max_new_tokens for request in requests)
        stops = [request.params.stop_token_ids for request in requests]
        self._widen(new_tokens=new_tokens, stop_tokens=max(map(len, stops)))
        width = self._stops.shape[1]
        stops_BS = self._index(np.array([(*ids, *([-1] * (width - len(ids)))) for ids in stops], dtype=np.int64))
        numbers = uniforms(torch.tensor([request.seed for request in requests]), 0, new_tokens).to(self._device)
        self._uniforms[:, :new_tokens].index_copy_(0, index, numbers)
        self._stops.index_copy_(0, index, stops_BS)
        groups = self._groups(records["kind"][lanes], np.arange(len(lanes)))
        ids, logprobs = self._draw(logits_BV, groups, numbers[:, 0], lanes.tolist())
        self._ids[:, 0].index_copy_(0, index, ids)
        self._logprobs[:, 0].index_copy_(0, index, logprobs)
        positions = self._index(records["known"][lanes])
        moves = (ids.unsqueeze(1) != stops_BS).all(1).long()
        self._state.index_copy_(1, index, torch.stack((ids, positions, torch.ones_like(ids), moves)))
        self._activate(int(records["live"].nonzero()[0][-1]) + 1)

    def _count_prompts(self, keys: Sequence[Key]) -> list[int]:
        """Count the tokens of prompts, and return how many of each had been computed before."""
        reused: list[int] = []
        for key in keys:
            seen = self._seen[key]
            self.prompt_tokens += len(key[0])
            reused.append(len(key[0]) - seen.computed)
            self._seen[key] = seen._replace(computed=0)
        self.reused_tokens += sum(reused)
        return reused

    def spill(self, lanes: Iterable[int]) -> None:
        """Move the texts that these free lanes remember to pages, if their requests allowed that they are reused."""
        if self.cache is None or not self.memory.limit_bytes:
            return
        for lane in lanes:
            request, length, exact = (self._records[field][lane] for field in ("request", "known", "exact"))
            if self._records["used"][lane] and length >= _SHORTEST_PREFIX and request.reuse_completions:
                keys, values = self.cache.keys_by_time[:, lane], self.cache.values[:, lane]
                self.memory.remember(self._texts[lane, :length].tolist(), int(exact), keys, values, request.session)

    def forget_sessions(self, names: Collection[str]) -> None:
        """Let what these sessions left in lanes and pages be the first to go."""
        requests, lanes = self._records["request"], (self._records["used"] > 0).nonzero()[0]
        self._records["used"][[lane for lane in lanes if requests[lane].session in names]] = 0
        for name in names:
            self.memory.forget_session(name)

    def _shrink(self) -> None:
        """Close the gaps between live lanes where that takes away enough rows; no request waits."""
        assert self.cache is not None
        live = self._records["live"]
        if (count := self.live) and not self._current_decoder().is_narrow:
            with self._gate:
                self._decoder().pack(count, self._steps_left())
        size = self._rows(count)
        if size > _SHRINK_BELOW * self._active:
            return
        first = live[size:].nonzero()[0] + size
        if len(first):
            second = (~live[:size]).nonzero()[0][: len(first)]
            both, other = np.concatenate((first, second)), np.concatenate((second, first))
            records = self._records[both]
            until = int(np.where(records["live"], records["base"] + self._step_number, records["known"]).max())
            self.cache.swap(list(zip(first.tolist(), second.tolist(), strict=True)), until)
            for array in (self._records, self._texts):
                array[both] = array[other]
            both, other = self._index(both), self._index(other)
            for table in (self._state.T, self._ids, self._logprobs, self._uniforms, self._stops):
                table[both] = table[other]
        self._activate(size)

    def _widen(self, lanes: int = 0, new_tokens: int = 0, stop_tokens: int = 0) -> None:
        """Have so many more lanes in the tables, and columns for so many tokens."""
        tokens, stops = (max(0, new_tokens - self._ids.shape[1]), max(0, stop_tokens - self._stops.shape[1]))
        if lanes or tokens:
            self._ids, self._logprobs, self._uniforms = (
                F.pad(table, (0, tokens, 0, lanes)) for table in (self._ids, self._logprobs, self._uniforms)
            )
        if lanes or stops:
            self._stops = F.pad(self._stops, (0, stops, 0, lanes), value=-1)

    def _rows(self, lanes: int) -> int:
        """The number of rows that are decoded for so many lanes."""
        if self._graphs is not None:
            return bucket(lanes, len(self._records))
        is_exact = any(request.exact for request in self._records["request"][self._records["live"]])
        return round_rows(lanes, is_packed=self._current_decoder().is_narrow, is_exact=is_exact)

    def _steps_left(self) -> int:
        return int((self._records["end"][self._records["live"]] - self._step_number).max(initial=0))

    def _activate(self, lanes: int) -> None:
        """Decode lanes 0 to ``lanes``, rounded up, from now on; the views are made once for many steps."""
        self._active = active = self._rows(lanes)
        tokens, positions, numbers, self._moves = self._state[:, :active]
        tables = (self._uniforms[:active], self._ids[:active], self._logprobs[:active], self._stops[:active])
        self._views = (tokens, positions, numbers.unsqueeze(1), *tables)
        self._advancing = self._state[1:3, :active]

    def _index(self, lanes: np.ndarray) -> Tensor:
        return torch.from_numpy(lanes).to(self._device)

    # ---- prompts

    def _prefill(self, decoder: Decoder, keys: Sequence[Key], due: Sequence[Key]) -> None:
        """See to it that the prompts ``keys`` have been through the model, and with them some that are due next."""
        needed = [key for key in dict.fromkeys(keys) if key not in self._seen]
        prompts = [*needed, *(key for key in dict.fromkeys(due) if key not in self._seen and key not in needed)]
        for part in cut_texts([prompt for prompt, _ in prompts], self._prefill_tokens):
            if part.start >= len(needed):
                break
            beginnings = [(key, self._find_beginning(*key)) for key in prompts[part]]
            for alike in (
                [beginning for beginning in beginnings if not beginning[1].length],
                [beginning for beginning in beginnings if beginning[1].length],
            ):
                if alike:
                    self._prefill_part(decoder, alike)

    def _prefill_part(self, decoder: Decoder, prompts: Sequence[tuple[Key, Beginning]]) -> None:
        """One forward pass over prompts, each after so many positions of a lane or of pages that are there already."""
        keys, beginnings = (list(column) for column in zip(*prompts, strict=True))
        past = self._past(beginnings) if any(beginning.length for beginning in beginnings) else None
        prefill = decoder.prefill([prompt for prompt, _ in keys], past)
        for row, (key, (length, exact, lane, _)) in enumerate(prompts):
            if length and lane >= 0 and length == self._records["known"][lane]:
                self._records["used"][lane] = 0  # the new text has all of it
            computed = len(key[0]) - length
            self._seen[key] = Seen(prefill, row, len(key[0]) if length <= exact else exact, computed)
            self.prefilled_tokens += computed

    def _past(self, beginnings: Sequence[Beginning]) -> Past:
        assert self.cache is not None
        lengths = [beginning.length for beginning in beginnings]
        lanes = np.array([max(beginning.lane, 0) for beginning in beginnings])
        past = Past(*self.cache.read(self._index(lanes), max(lengths)), lengths)
        for row, beginning in enumerate(beginnings):
            if beginning.match is not None:
                past.keys[:, row] = past.values[:, row] = 0
                beginning.match.copy_into(past.keys[:, row], past.values[:, row])
        return past

    def _find_beginning(self, prompt: Sequence[int], reuse_completions: bool) -> Beginning:
        """Return the longest beginning of ``prompt`` that a lane or pages have: all but the last token at most."""
        if len(prompt) <= _SHORTEST_PREFIX:
            return Beginning()
        in_lane = self._find_in_lanes(prompt, reuse_completions)
        match = self.memory.find(prompt, reuse_completions)
        if match.length >= _SHORTEST_PREFIX and match.length > in_lane.length:
            return Beginning(match.length, match.exact, match=match)
        return in_lane

    def _find_in_lanes(self, prompt: Sequence[int], reuse_completions: bool) -> Beginning:
        records, head = self._records, _SHORTEST_PREFIX
        usable = records["known"] if reuse_completions else np.minimum(records["known"], records["exact"])
        wanted = np.array(prompt[:-1])
        lanes = ((usable >= head) & (self._texts[:, :head] == wanted[:head]).all(1)).nonzero()[0]
        if not len(lanes):
            return Beginning()
        width = min(len(wanted), self._texts.shape[1])
        differ = self._texts[lanes, :width] != wanted[:width]
        lengths = np.minimum(np.where(differ.any(1), differ.argmax(1), width), usable[lanes])
        best = int(lengths.argmax())
        return Beginning(int(lengths[best]), int(records["exact"][lanes[best]]), int(lanes[best]))
