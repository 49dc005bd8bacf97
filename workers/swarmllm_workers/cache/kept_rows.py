"""Keeps rows of requests that are over, by blocks, as long as their KV may be used again.

A request that goes on with KV of an earlier one brings no rows of its own for that part. Without them nobody
could check what its stages made of the rest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from swarmllm_proto.blocks import BLOCK_TOKENS

BlockKey = tuple[str, bytes]
"""Who gave the name, and the chained hash of all tokens up to the block's end."""


class KeptRows:
    """Rows by layer boundary and block, f32 [BLOCK_TOKENS, n_embd] each. The least recently used block is
    evicted first."""

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._blocks: OrderedDict[tuple[int, BlockKey], tuple[float, np.ndarray]] = OrderedDict()
        self.n_bytes = 0

    def put(self, boundary: int, key: BlockKey, rows: np.ndarray) -> None:
        self._drop(boundary, key)
        self._blocks[boundary, key] = time.monotonic(), rows
        self.n_bytes += rows.nbytes
        self.shrink(self._max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Evict blocks until the rest take at most so many bytes."""
        while self._blocks and self.n_bytes > max_bytes:
            self._drop(*next(iter(self._blocks)))

    def read(self, boundary: int, keys: Sequence[BlockKey], position: int, n_rows: int) -> np.ndarray | None:
        """The rows, f32 [n_rows, n_embd]. None: some of them are not kept. `keys`: of all blocks from
        position 0 on."""
        first, last = position // BLOCK_TOKENS, (position + n_rows - 1) // BLOCK_TOKENS
        wanted = [(boundary, key) for key in keys[first : last + 1]]
        if len(wanted) != last + 1 - first or not all(each in self._blocks for each in wanted):
            return None
        start = position - first * BLOCK_TOKENS
        return np.concatenate([self._blocks[each][1] for each in wanted])[start : start + n_rows]

    def has(self, boundary: int, keys: Sequence[BlockKey], n_rows: int) -> bool:
        """Whether the first `n_rows` rows are kept. `keys`: of all blocks from position 0 on."""
        wanted = keys[: -(-n_rows // BLOCK_TOKENS)]
        return len(wanted) * BLOCK_TOKENS >= n_rows and all((boundary, key) in self._blocks for key in wanted)

    def touch(self, boundary: int, key: BlockKey) -> None:
        """Mark the rows as used: the KV of their blocks was used again."""
        if (found := self._blocks.get((boundary, key))) is not None:
            self._blocks[boundary, key] = time.monotonic(), found[1]
            self._blocks.move_to_end((boundary, key))

    def next_expiry_s(self) -> float | None:
        """Seconds until a block expires, None where there is none."""
        if not self._blocks:
            return None
        return max(0.0, self._first_used_at + self._ttl_s - time.monotonic())

    def expire(self) -> None:
        while self._blocks and self._first_used_at + self._ttl_s <= time.monotonic():
            self._drop(*next(iter(self._blocks)))

    @property
    def _first_used_at(self) -> float:
        return next(iter(self._blocks.values()))[0]

    def _drop(self, boundary: int, key: BlockKey) -> None:
        if (found := self._blocks.pop((boundary, key), None)) is not None:
            self.n_bytes -= found[1].nbytes
