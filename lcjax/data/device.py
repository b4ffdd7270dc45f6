"""Batches on the devices before they are asked for."""

import collections
from typing import Any, NamedTuple

import jax

from lcjax.data.loader import Loader
from lcjax.data.rows import Batch
from lcjax.errors import InputError
from lcjax.sharding import batch_sharding


class _Sent(NamedTuple):
    local: Batch
    arrays: dict[str, jax.Array]
    state: dict[str, Any]  # of the loader after it


class DeviceLoader:
    """The batches of `loader` as global arrays over `mesh`, `ahead` of them on their way.

    Copies to a device run beside its computation, so with one batch ahead a step never waits for
    its data; each batch ahead takes its bytes on the devices. States are those of the loader, as
    if nothing was read ahead.
    """

    def __init__(self, loader: Loader, mesh: jax.sharding.Mesh, *, ahead: int = 1):
        if ahead < 0:
            raise InputError(f"ahead={ahead} must be 0 or more: batches sent before their turn")
        self._loader, self._sharding, self._ahead = loader, batch_sharding(mesh), ahead
        self._sent: collections.deque[_Sent] = collections.deque()
        self._state = loader.get_state()
        self.local: Batch = {}  # of the batch given last, the rows of this process

    def __iter__(self) -> "DeviceLoader":
        return self

    def __next__(self) -> dict[str, jax.Array]:
        self._fill(1)
        if not self._sent:
            raise StopIteration
        self.local, arrays, self._state = self._sent.popleft()
        self._fill(self._ahead)
        return arrays

    def _fill(self, count: int) -> None:
        while len(self._sent) < count and (local := next(self._loader, None)) is not None:
            arrays = {
                name: jax.make_array_from_process_local_data(self._sharding, value)
                for name, value in local.items()
            }
            self._sent.append(_Sent(local, arrays, self._loader.get_state()))

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._loader.set_state(state)
        self._sent.clear()
        self._state = state

    def close(self) -> None:
        self._sent.clear()
        self._loader.close()
