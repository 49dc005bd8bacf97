"""Which request owns which sequence of the KV caches."""

from __future__ import annotations

from swarmllm_workers.errors import CallError


class Slots:
    """`n_slots` sequence numbers, handed to request ids. The smallest free number is taken first, so that a
    lone request always finds its rows at the start of the cache."""

    def __init__(self, n_slots: int) -> None:
        self._free = list(range(n_slots))
        self._slots: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        return not self._free

    def get(self, request_id: str) -> int | None:
        return self._slots.get(request_id)

    def take(self, request_id: str) -> int:
        """The request's slot, a new one where it has none. Raises CallError no_slot."""
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                raise CallError(
                    "no_slot", f"all {len(self._slots)} slots are taken by other requests", "request_id"
                )
            slot = self._slots[request_id] = self._free.pop(0)
        return slot

    def rename(self, request_id: str, new_id: str) -> None:
        """The slot, if it has one, is another request's from now on."""
        if (slot := self._slots.pop(request_id, None)) is not None:
            self._slots[new_id] = slot

    def release(self, request_id: str) -> int | None:
        """The slot that became free, or None where the request had none."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._free.sort()
        return slot
