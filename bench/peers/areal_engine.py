"""An engine of AReaL's that keeps a tensor, gives it and looks at what it is given. Its RPC server imports it."""

from __future__ import annotations

from typing import Any

import torch
from areal.api import InferenceEngine
from areal.infra.rpc.rtensor import TensorShardInfo, clear_fetch_buffer, get_backend
from touching import look, timed_look


class Holder(InferenceEngine):
    def __init__(self) -> None:
        self._tensor = torch.zeros(1)

    @property
    def initialized(self) -> bool:
        return True

    def destroy(self) -> None:
        self._tensor = torch.zeros(0)

    def prepare(self, nbytes: int) -> None:
        self._tensor = torch.rand(nbytes // 4)

    def give(self) -> torch.Tensor:
        """The server keeps the tensor and answers with an RTensor, a reference to it."""
        return self._tensor

    def look(self, tensor: torch.Tensor, pages: bool) -> None:
        """The server fetches the RTensor, over HTTP, before the method runs."""
        look(tensor, pages)

    def fetch(self, shard_id: str, node_addr: str) -> float:
        """Seconds inside the worker, from the parts of a reference to one element of the tensor."""
        shard = TensorShardInfo(shard_id=shard_id, node_addr=node_addr)
        return timed_look(lambda: get_backend().fetch([shard])[0], pages=False)

    def forget(self) -> None:
        """Drop what was fetched: AReaL keeps it until told."""
        clear_fetch_buffer()

    def echo(self, value: Any) -> Any:
        return value
