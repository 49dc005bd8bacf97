"""How much kept KV a worker reads at once for another node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from swarmllm_proto.ipc import ExportPrefixSnapshot, PrefixSnapshotResponse
from swarmllm_proto.limits import PREFIX_KV_MAX, PREFIX_READ_MAX
from swarmllm_workers.server.kv_handlers import PrefixHandlers

N_LAYERS = 80
LAYER_BYTES = 1024
"""Of a row."""


@pytest.mark.parametrize(
    ("layers", "n_rows", "is_read"),
    [
        ((0, 80), PREFIX_KV_MAX // (80 * LAYER_BYTES), True),
        ((0, 80), PREFIX_KV_MAX // (80 * LAYER_BYTES) + 1, False),
        ((8, 18), PREFIX_KV_MAX // (10 * LAYER_BYTES), True),
        ((8, 18), PREFIX_KV_MAX // (10 * LAYER_BYTES) + 1, False),
        ((8, 9), PREFIX_READ_MAX // (80 * LAYER_BYTES), True),
        ((8, 9), PREFIX_READ_MAX // (80 * LAYER_BYTES) + 1, False),
    ],
)
def test_rows_of_some_layers_are_read_where_those_of_all_are_not_too_many(
    layers: tuple[int, int], n_rows: int, *, is_read: bool
) -> None:
    """One layer of 80 would have 80 times as much copied within a step as is given."""
    read: list[int] = []
    engine: Any = SimpleNamespace(
        layers=SimpleNamespace(find_segments=lambda start, end: ("all",)),
        footprint=SimpleNamespace(row_bytes=lambda start, end: (end - start) * LAYER_BYTES),
        prefixes=SimpleNamespace(export_rows=lambda where, name, first, n: read.append(n)),
        kv_layout=None,
    )
    state: Any = SimpleNamespace(
        engine=lambda: engine,
        parsing=SimpleNamespace(begin=lambda *work: None),
        fail=lambda: None,
        send=lambda *answer: None,
    )
    message = ExportPrefixSnapshot(id=1, start=0, end=N_LAYERS, first_row=0, n_rows=n_rows, layers=layers)
    PrefixHandlers(state)._export(message, memoryview(bytes(32)))
    assert read == ([n_rows] if is_read else [])


@pytest.mark.parametrize(
    ("fields", "is_at_once"),
    [({}, True), ({"layers": (8, 18)}, False), ({"kv_type": "q8_0"}, False)],
    ids=["as it is", "some layers", "rounded"],
)
def test_a_slice_that_goes_as_it_is_kept_waits_for_no_other_step(
    fields: dict[str, Any], *, is_at_once: bool
) -> None:
    """A node that computes would give a single slice per step otherwise, and time is up for who asks."""
    begun: list[Any] = []
    told: list[tuple[PrefixSnapshotResponse, list[bytes]]] = []
    engine: Any = SimpleNamespace(
        layers=SimpleNamespace(find_segments=lambda start, end: ("all",)),
        footprint=SimpleNamespace(row_bytes=lambda start, end: (end - start) * LAYER_BYTES),
        prefixes=SimpleNamespace(export_rows=lambda where, name, first, n: bytes([first] * n)),
        kv_layout=None,
    )
    state: Any = SimpleNamespace(
        engine=lambda: engine,
        parsing=SimpleNamespace(begin=lambda operation, *rest: begun.append(operation)),
        fail=lambda: None,
        send=lambda *answer: told.append(answer),
    )
    for first_row in (0, 8):
        message = ExportPrefixSnapshot(
            id=1 + first_row, start=0, end=N_LAYERS, first_row=first_row, n_rows=8, **fields
        )
        PrefixHandlers(state)._export(message, memoryview(bytes(32)))
    assert (len(told), len(begun)) == ((2, 0) if is_at_once else (0, 2))
    for (answer, rows), first_row in zip(told, (0, 8), strict=False):
        data = bytes([first_row] * 8)
        assert (answer.id, answer.n_blocks, answer.sizes, rows) == (1 + first_row, 1, (8,), [data])
        assert answer.digest == blake3(data).hexdigest()
