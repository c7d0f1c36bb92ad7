"""The completions that one call of an engine draws: what it asks for, and what has come."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from podium.rollout.engines.draw import seed_at
from podium.rollout.engines.journal import Drawn, Journal, checksum
from podium.rollout.engines.requests import Event, Failed, Finished, Request, RequestId, RowOfBatch
from podium.rollout.sampling import Completion, SamplingParams
from podium.telemetry.progress import Counting

__all__ = ["Rows"]


class Rows:
    """The completions of one call, some of which another engine may have begun.

    Attributes:
        count: Counts those that are finished.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        journal: Journal | None,
        begun: Mapping[int, Drawn],
        cut: Callable[[Completion], Completion] | None = None,
    ) -> None:
        self.seeds: dict[RequestId, int] = {RowOfBatch(index, params.n): seed for index, seed in enumerate(seeds)}
        self._prompts = [tuple(prompt) for prompt in prompts]  # one object for the n requests of a prompt
        self._params, self._journal = params, journal
        self._cut = cut or (lambda completion: completion)
        begun = {} if params.record_top or params.record_experts else begun  # journals have neither
        kept = journal is not None or bool(begun)
        sums = [prompt_sum for prompt in prompts for prompt_sum in [checksum(prompt) if kept else 0] * params.n]
        self.heads = {
            row: head
            for (row, seed), prompt in zip(self.seeds.items(), sums, strict=True)
            if (head := begun.get(seed)) is not None and head.prompt in (None, prompt)
        }
        self.completions = {
            row: self._cut(head.completion(reason))
            for row, head in self.heads.items()
            if (reason := head.ended(params))
        }
        self.count = Counting("completions", len(seeds))
        if journal is not None:
            for (row, seed), prompt in zip(self.seeds.items(), sums, strict=True):
                journal.begin(seed, self.heads.get(row), prompt)
            if self.heads:
                journal.flush()  # what was reported of them is in this process alone

    def missing(self) -> list[Request]:
        """The requests for what is not drawn yet."""
        requests: list[Request] = []
        for index, (row, seed) in enumerate(self.seeds.items()):
            prompt, params, head = self._prompts[index // self._params.n], self._params, self.heads.get(row)
            if row in self.completions:
                continue
            if head is not None:
                prompt, seed = (*prompt, *head.token_ids), seed_at(seed, len(head))
                params = replace(params, max_new_tokens=params.max_new_tokens - len(head))
            requests.append(Request(id=row, prompt=prompt, params=params, seed=seed, reuse_completions=False))
        return requests

    def take(self, event: Event) -> None:
        """Note a completion that is finished. Raises the error of one that failed."""
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            head, rest = self.heads.get(event.id), event.completion
            completion = self._cut(head.completion(rest.finish_reason, rest) if head else rest)
            self.completions[event.id] = completion
            self.count.done = len(self.completions)
            if self._journal is not None:
                self._journal.add(self.seeds[event.id], Drawn.of(completion))

    @property
    def done(self) -> bool:
        """Whether all completions are whole."""
        return len(self.completions) == len(self.seeds)
