"""Computes blocks of KV again that another node gave, and compares.

A block is computed over the rows before it as they came, so every block that is right is right given those:
the node that chooses which blocks are looked at cannot be told beforehand where a lie would go unseen.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.ipc import CheckPrefix
from swarmllm_proto.ipc.kv import CheckOutcome, PrefixChecked
from swarmllm_workers.cache.prefixes import Buffer, token_name
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.kv_state import BadState, rows_apart
from swarmllm_workers.engine.ranges import Route
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.errors import CallError
from swarmllm_workers.schedule.owner_shares import OWN
from swarmllm_workers.schedule.work import Send

TOLERANCE: Final = 0.05
"""Mean over the rows of a block, of K or V of one layer: length of the difference / length. Other kernels and
batches round otherwise; rows of another text are about 1.4 away."""
OTHER_FORMAT_TOLERANCE: Final = 0.1
"""The same for rows that came in another format: of a model with random weights, those that were kept as f16
were 0.059 from those of a node that keeps q8_0."""


class CheckPrefixWork:
    """One block after the other; answered by PrefixChecked."""

    can_restart = False
    has_tokens = True
    wants_alone = True
    rows_of_piece = 0
    is_decode = False
    goes_around = False
    is_parked = False

    def __init__(self, message: CheckPrefix, tokens: np.ndarray, engine: Engine, send: Send) -> None:
        """`tokens`: of all blocks that came. Raises CallError bad_message for blocks that are not among
        them."""
        self._name = token_name(engine.root, tokens)
        if len(tokens) != len(self._name.hashes) * BLOCK_TOKENS or not len(tokens):
            raise CallError("bad_message", f"{len(tokens)} tokens are no whole blocks", "payload")
        if max(message.blocks) >= len(self._name.hashes):
            raise CallError("bad_message", f"there are {len(self._name.hashes)} blocks", "blocks")
        self.call_id = message.id
        self.request_id = message.request_id
        self.is_finished = False
        self.arrived_at = time.perf_counter()
        self.layers = message.start, message.end
        self.owner = OWN
        self._tokens = tokens
        self._blocks = list(message.blocks)
        self._engine = engine
        self._send = send
        self._came: Buffer | None = None
        """The rows of the first of `_blocks` as they came; None: it has not begun."""
        self._position = 0
        self._n_running = 0
        self._is_equal = True
        self._tolerance = TOLERANCE

    @property
    def _route(self) -> Route | None:
        return self._engine.known_route(self.request_id, *self.layers)

    def begin(self) -> None:
        if self._came is not None:
            return
        route, end = self._route, (self._blocks[0] + 1) * BLOCK_TOKENS
        assert route is not None  # its turn has come
        segments = route.segments
        # Rows that lie in segments which were cut since are not found.
        if not self._engine.prefixes.lend(self.request_id, segments, self._name, end):
            raise CallError("no_room", "the rows to check are not kept any more", "request_id")
        if self._engine.prefixes.is_of_other_format(self.request_id):
            self._tolerance = OTHER_FORMAT_TOLERANCE
        slot = self._engine.take_slot(self.request_id)
        self._came = segments[0].save_rows(slot, end - BLOCK_TOKENS, end)
        self._position = end - BLOCK_TOKENS
        self._engine.empty(self.request_id, self._position)

    @property
    def n_waiting(self) -> int:
        return (self._blocks[0] + 1) * BLOCK_TOKENS - self._position if self._came is not None else 1

    def look_ahead(self, n_rows_max: int) -> None:
        pass

    def next_span(self, n_rows: int) -> Span:
        end = min(self._position + n_rows, (self._blocks[0] + 1) * BLOCK_TOKENS)
        data = self._tokens[self._position : end]
        self._n_running = len(data)
        return Span(self._engine.take_slot(self.request_id), self._position, data, "none")

    def decode_step(self, route: Route) -> Span | None:
        return None

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        self._position += self._n_running
        end = (self._blocks[0] + 1) * BLOCK_TOKENS
        if self._position < end:
            return
        route = self._route
        assert route is not None
        assert self._came is not None
        slot = self._engine.take_slot(self.request_id)
        try:
            apart = rows_apart(route.segments[0].save_rows(slot, end - BLOCK_TOKENS, end), self._came)
        except BadState:
            apart = float("inf")
        if not apart <= self._tolerance:
            self._judge(is_right=False)
            self._end("wrong")
            return
        self._is_equal &= apart == 0
        self._engine.empty(self.request_id)
        self._came = None
        self._blocks.pop(0)
        if not self._blocks:
            self._judge(is_right=True)
            self._end("equal" if self._is_equal else "close")

    def go_on(self) -> None:
        pass

    def restart(self) -> None:
        raise AssertionError("a check does not begin again")

    def cancel(self) -> None:
        self._end("gone")

    def _judge(self, *, is_right: bool) -> None:
        self._engine.prefixes.judge(self._name, is_right=is_right)

    def _end(self, outcome: CheckOutcome) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        self._send(PrefixChecked(id=self.call_id, outcome=outcome))
        self._engine.release(self.request_id)
