"""Tensors that leave their device while nobody uses them.

    awake    storage on the device                     sleep: copy to the host, free the storage
    asleep   storage of 0 bytes, a copy on the host    wake:  allocate the storage, copy back

Only storages change. So parameters, their views, and whoever holds either stay valid: an optimizer, a process group's
shards, or an engine that reads the same weights. A tensor that sleeps must not be read.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from podium.devices import give_back_memory, host_copy


class Offload:
    """Tensors that sleep and wake together. They begin awake.

    On a CPU, memory that torch cannot resize, such as that of a mapped file, stays where it is.

    Args:
        kept: Returns the tensors. They have the same bits after :meth:`wake` as before :meth:`sleep`.
        dropped: Returns tensors whose values are arbitrary after :meth:`wake`.
    """

    def __init__(self, kept: Callable[[], Iterable[Tensor]], dropped: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._kept, self._dropped = kept, dropped
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        self.awake = True

    def sleep(self) -> None:
        """Copy the tensors to the host, and free what they take on their device. Idempotent."""
        if not self.awake:
            return
        self.awake = False
        kept = _storages(self._kept())
        dropped = {address: storage for address, storage in _storages(self._dropped()).items() if address not in kept}
        for storage in (*kept.values(), *dropped.values()):
            copy = host_copy(_bytes(storage)) if storage.data_ptr() in kept else None
            self._away.append((storage, storage.nbytes(), copy))
        for storage, _, _ in self._away:  # when all copies are made
            storage.resize_(0)
        for device in {storage.device for storage, _, _ in self._away}:
            give_back_memory(device)

    def wake(self) -> None:
        """Bring the tensors back to their device. Idempotent."""
        if self.awake:
            return
        for storage, nbytes, copy in self._away:
            storage.resize_(nbytes)
            if copy is not None:
                _bytes(storage).copy_(copy)
        self._away = []
        self.awake = True


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of tensors, or of this rank's shards, by their addresses."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = cast(Tensor, cast(Any, tensor).to_local()) if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage.resizable():
            storages[storage.data_ptr()] = storage
    return storages


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(cast(Any, storage))
