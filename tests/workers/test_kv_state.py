"""The bytes of a KV: what libllama writes is understood, what is not that is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto import ipc
from swarmllm_workers.engine.kv_state import BadState, read_state

from .blueprint import write
from .client import GREEDY
from .families import FAMILIES
from .test_batching import Room, open_room  # noqa: F401

OpenRoom = Callable[..., Room]
TOKENS = np.random.default_rng(2).integers(0, 250, 100).astype(np.int32)
N_ROWS = len(TOKENS) + GREEDY.max_tokens - 1
"""Of a generation's prompt and answer; the last token is not run."""


def open_family(open_room: OpenRoom, folder: Path, name: str) -> Room:  # noqa: F811
    """The whole of one of the families' models."""
    room = open_room(write(folder / f"{name}.gguf", FAMILIES[name]), n_ctx=1024)
    room.call(ipc.Load, start=0, end=room.handlers.state.engine().n_layers)
    assert not room.errors()
    return room


def saved(room: Room) -> bytes:
    """The KV that is kept of a finished generation: all rows, with sliding windows whole blocks."""
    room.generate(TOKENS % room.handlers.state.engine().n_vocab, "r", GREEDY)
    room.run()
    engine = room.handlers.state.engine()
    (segment,) = engine.layers.segments
    (kept,) = engine.prefixes
    assert kept.sequence is not None
    return bytes(segment.save(kept.sequence))


@pytest.mark.parametrize(
    ("name", "n_rows", "n_min"),
    [("llama-3.1", N_ROWS, 0), ("deepseek-v3", N_ROWS, 0), ("gemma-3", 64, 64), ("gpt-oss", 64, 64)],
)
def test_what_libllama_writes_is_read_to_the_last_byte(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
    name: str,
    n_rows: int,
    n_min: int,
) -> None:
    state = read_state(saved(open_family(open_room, tmp_path, name)))
    assert (state.n_rows, state.n_min) == (n_rows, n_min)


def test_positions_in_several_dimensions_are_not_understood(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
) -> None:
    with pytest.raises(BadState):
        read_state(saved(open_family(open_room, tmp_path, "qwen2.5-vl")))


@pytest.fixture(scope="module")
def state(make_model: Callable[[str], object], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    room = Room(make_model("llama"), tmp_path_factory.mktemp("state"), (0, 4), n_ctx=256)  # type: ignore[arg-type]
    try:
        return saved(room)
    finally:
        room.handlers.close()


def test_nan_is_found_wherever_it_is(state: bytes) -> None:
    for at in (-2, len(state) // 2 // 2 * 2, 1000):
        damaged = bytearray(state)
        damaged[at : at + 2 or None] = np.float16(np.nan).tobytes()
        if at == -2:
            with pytest.raises(BadState, match="NaN"):
                read_state(bytes(damaged))
        else:
            try_read(bytes(damaged))


def try_read(data: bytes) -> None:
    with contextlib.suppress(BadState):
        read_state(data)


@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(state: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(state) - 1))
    with pytest.raises(BadState):
        read_state(state[:cut])
    at = data.draw(st.integers(0, min(len(state), 900) - 1))
    damaged = bytearray(state)
    damaged[at] ^= data.draw(st.integers(1, 255))
    try_read(bytes(damaged))


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_be_refused(data: bytes) -> None:
    with pytest.raises(BadState):
        read_state(data)
