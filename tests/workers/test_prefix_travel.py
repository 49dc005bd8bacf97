"""KV of a prompt's beginning from one worker to another, in slices, and what a check of it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes, kept_root
from swarmllm_proto.ipc.kv import CheckPrefix, LookUpPrefix, PrefixChecked, PrefixLookedUp
from swarmllm_proto.tensors import decode_tensor, encode_tensor
from swarmllm_workers.cache.prefixes import token_name
from swarmllm_workers.engine.kv_state import BadState, layers_of, read_state, rows_apart, rows_in_order
from swarmllm_workers.engine.segment import Span

from .client import GREEDY
from .test_batching import Room, open_room  # noqa: F401
from .test_kv_state import open_family

OpenRoom = Callable[..., Room]
B = BLOCK_TOKENS
MODEL = "ab" * 32
N_LAYERS = 4
TOKENS = np.random.default_rng(3).integers(0, 250, 4 * B + 30).astype(np.int32)
SETTINGS: dict[str, Any] = {"n_ctx": 1024, "model_id": MODEL, "tell_prefixes": True}


def names(tokens: np.ndarray, key: str = "", n_layers: int = N_LAYERS) -> bytes:
    return b"".join(extend_block_hashes(kept_root(key, MODEL, n_layers), tokens))


def send(room: Room, message: ipc.DaemonMessage, payload: bytes = b"") -> tuple[Any, bytes]:
    """The call's answer."""
    room.n_calls += 1
    n_sent = len(room.sent)
    room.handlers.handle(msgspec.structs.replace(message, id=room.n_calls), memoryview(payload))
    room.run()
    (answer,) = [each for each in room.sent[n_sent:] if each[0].id == room.n_calls]
    return answer


def export(room: Room, named: bytes, first: int, n_rows: int, *, rounded: bool = False) -> bytes:
    message = ipc.ExportPrefixSnapshot(
        id=0,
        start=0,
        end=room.handlers.state.engine().n_layers,
        first_row=first,
        n_rows=n_rows,
        kv_type="q8_0" if rounded else msgspec.UNSET,
    )
    answer, data = send(room, message, named)
    assert isinstance(answer, ipc.PrefixSnapshotResponse)
    assert (answer.n_blocks > 0) == (len(data) > 0)
    return data


def import_message(named: bytes, parts: list[bytes], n_layers: int = N_LAYERS) -> ipc.ImportPrefixSnapshot:
    digest = blake3(b"".join(blake3(part).digest() for part in parts)).hexdigest()
    return ipc.ImportPrefixSnapshot(
        id=0,
        start=0,
        end=n_layers,
        n_blocks=len(named) // 32,
        sizes=tuple(map(len, parts)),
        digest=digest,
        from_peer=True,
    )


def bring(room: Room, named: bytes, parts: list[bytes]) -> Any:
    return send(room, import_message(named, parts), named + b"".join(parts))[0]


def check(room: Room, tokens: np.ndarray, *blocks: int) -> Any:
    end = room.handlers.state.engine().n_layers
    message = CheckPrefix(id=0, request_id="check", start=0, end=end, blocks=blocks)
    return send(room, message, b"".join(encode_tensor(tokens)))[0]


def n_known(room: Room, named: bytes) -> int:
    end = room.handlers.state.engine().n_layers
    answer = send(room, LookUpPrefix(id=0, start=0, end=end), named)[0]
    assert isinstance(answer, PrefixLookedUp)
    return answer.n_blocks


def done(room: Room, name: str) -> ipc.GenerateDone:
    (message,) = [m for m, _ in room.sent if isinstance(m, ipc.GenerateDone) and m.request_id == name]
    return message


def n_told(room: Room) -> int:
    room.handlers.pause_ms()
    told = [m for m, _ in room.sent if isinstance(m, ipc.PrefixManifestUpdate)]
    return len(told[-1].n_blocks) if told else 0


@pytest.fixture
def holder(open_room: OpenRoom) -> Room:  # noqa: F811
    """It has computed the prompt."""
    room = open_room("llama", (0, N_LAYERS), **SETTINGS)
    room.generate(TOKENS, "first")
    room.run()
    return room


@pytest.fixture
def asker(open_room: OpenRoom) -> Room:  # noqa: F811
    return open_room("llama", (0, N_LAYERS), **SETTINGS)


def slices(room: Room, n_blocks: int, size: int = 100) -> list[bytes]:
    named, n_rows = names(TOKENS[: n_blocks * B]), n_blocks * B
    return [export(room, named, at, min(size, n_rows - at)) for at in range(0, n_rows, size)]


def test_the_same_prompt_elsewhere_runs_only_what_follows_and_gives_the_same_text(
    holder: Room, asker: Room
) -> None:
    named = names(TOKENS[: 4 * B])
    assert n_known(asker, named) == 0
    assert bring(asker, named, slices(holder, 4)).n_blocks == 4
    assert n_known(asker, named) == 4
    asker.generate(TOKENS, "again")
    asker.run()
    assert done(asker, "again").n_cached_tokens == 4 * B
    assert asker.tokens("again") == holder.tokens("first")


def test_logits_over_rows_from_another_worker_are_those_of_a_cold_one_bit_for_bit(
    holder: Room,
    asker: Room,
    open_room: OpenRoom,  # noqa: F811
) -> None:
    """Same chunks in the same cells, as within one worker."""
    bring(asker, names(TOKENS[: 4 * B]), slices(holder, 4))
    cold = open_room("llama", (0, N_LAYERS), **SETTINGS)
    logits = []
    for room in (asker, cold):
        engine = room.handlers.state.engine()
        route, slot = engine.route("r", 0, N_LAYERS), engine.take_slot("r")
        n = engine.reuse("r", route, TOKENS)
        for at in range(n, 4 * B, 2 * B):
            engine.run(route, [Span(slot, at, TOKENS[at : at + 2 * B], "none")])
        logits.append(engine.run(route, [Span(slot, 4 * B, TOKENS[4 * B :], "logits")])[0].copy())
        assert n == (4 * B if room is asker else 0)
    np.testing.assert_array_equal(*logits)


def test_a_prompt_that_goes_on_otherwise_takes_the_common_blocks(holder: Room, asker: Room) -> None:
    bring(asker, names(TOKENS[: 2 * B]), slices(holder, 2))
    other = np.concatenate([TOKENS[: 2 * B], TOKENS[:B]])
    asker.generate(other, "other")
    asker.run()
    assert done(asker, "other").n_cached_tokens == 2 * B


def test_rows_from_elsewhere_are_neither_told_of_nor_given_on_before_a_check(
    holder: Room, asker: Room
) -> None:
    tokens = TOKENS[: 4 * B]
    bring(asker, names(tokens), slices(holder, 4))
    asker.generate(TOKENS, "again")
    asker.run()
    assert n_told(asker) == 0
    assert export(asker, names(tokens), 0, 10) == b""
    answer = check(asker, tokens, 1, 3)
    assert isinstance(answer, PrefixChecked)
    assert answer.outcome in ("equal", "close")
    assert n_told(asker) == 4
    assert export(asker, names(tokens), 0, 10) == export(holder, names(tokens), 0, 10)


def test_checked_work_takes_no_rows_from_elsewhere(holder: Room, asker: Room) -> None:
    bring(asker, names(TOKENS[: 4 * B]), slices(holder, 4))
    asker.call(ipc.Generate, TOKENS, request_id="audit", sampling=GREEDY, own_kv=True)
    asker.run()
    assert done(asker, "audit").n_cached_tokens == 0
    assert asker.tokens("audit") == holder.tokens("first")
    # What it computed itself may be told.
    assert n_told(asker) == 4


@pytest.mark.parametrize("block", [0, 2])
def test_wrong_rows_are_found_and_all_that_rests_on_them_is_dropped(
    holder: Room,
    asker: Room,
    open_room: OpenRoom,  # noqa: F811
    block: int,
) -> None:
    """The liar computes another prompt and calls its rows by this one's name."""
    liar = open_room("llama", (0, N_LAYERS), **SETTINGS)
    other = TOKENS.copy()
    other[block * B : (block + 1) * B] = TOKENS[:B][::-1]
    liar.generate(other, "lie")
    liar.run()
    named = names(other[: 4 * B])
    lies = [export(liar, named, at, B) for at in range(0, 4 * B, B)]
    asked = names(TOKENS[: 4 * B])
    assert bring(asker, asked, lies).n_blocks == 4
    asker.generate(TOKENS, "again")
    asker.run()
    assert check(asker, TOKENS[: 4 * B], block, 3).outcome == "wrong"
    assert n_known(asker, asked) == 0
    assert n_told(asker) == 0
    asker.generate(TOKENS, "anew")
    asker.run()
    assert done(asker, "anew").n_cached_tokens == 0
    assert asker.tokens("anew") == holder.tokens("first")


def test_a_request_that_runs_on_wrong_rows_leaves_nothing_behind(holder: Room, asker: Room) -> None:
    named = names(TOKENS[: 4 * B])
    bring(asker, named, slices(holder, 4))
    engine = asker.handlers.state.engine()
    asker.generate(TOKENS, "running")
    asker.handlers.step()
    engine.prefixes.judge(token_name(engine.root, TOKENS[: 4 * B]), is_right=False)
    asker.run()
    assert done(asker, "running").n_cached_tokens == 4 * B
    assert len(engine.prefixes) == 0


def test_rows_that_left_their_cells_still_travel_and_can_be_checked(holder: Room, asker: Room) -> None:
    named = names(TOKENS[: 4 * B])
    before = slices(holder, 4)
    for room in (holder, asker):
        if room is asker:
            bring(asker, named, before)
        engine = room.handlers.state.engine()
        engine.prefixes.make_room(engine.layers.segments, 1024)
        assert all(kept.sequence is None for kept in engine.prefixes)
    assert slices(holder, 4) == before
    assert check(asker, TOKENS[: 4 * B], 0, 3).outcome in ("equal", "close")


@pytest.mark.parametrize("damage", ["digest", "order", "missing", "nan", "layout", "short"])
def test_what_is_not_these_rows_is_refused(
    holder: Room,
    asker: Room,
    open_room: OpenRoom,  # noqa: F811
    damage: str,
) -> None:
    named, parts = names(TOKENS[: 4 * B]), slices(holder, 4)
    if damage == "order":
        parts = parts[::-1]
    elif damage == "missing":
        parts = parts[:-1]
    elif damage == "short":
        parts[0] = parts[0][:-1]
    elif damage == "nan":
        parts[0] = parts[0][:-2] + np.array([np.nan], "<f2").tobytes()
    elif damage == "layout":
        # Fused attention keeps V the other way round.
        other = open_room("llama", (0, N_LAYERS), flash_attention="on", **SETTINGS)
        other.generate(TOKENS, "r")
        other.run()
        parts = slices(other, 4)
    if damage == "digest":
        message = ipc.ImportPrefixSnapshot(
            id=0,
            start=0,
            end=N_LAYERS,
            n_blocks=4,
            sizes=tuple(map(len, parts)),
            digest="0" * 64,
            from_peer=True,
        )
        answer = send(asker, message, named + b"".join(parts))[0]
    else:
        answer = bring(asker, named, parts)
    assert isinstance(answer, ipc.Error)
    assert answer.kind in ("bad_tensor", "bad_message")
    assert n_known(asker, named) == 0
    asker.generate(TOKENS, "cold")
    asker.run()
    assert asker.tokens("cold") == holder.tokens("first")


@pytest.mark.parametrize("family", ["gemma-3", "mamba"])
def test_models_with_windows_or_recurrent_state_take_no_part(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
    family: str,
) -> None:
    room = open_family(open_room, tmp_path, family)
    n_layers = room.handlers.state.engine().n_layers
    answer = send(room, LookUpPrefix(id=0, start=0, end=n_layers), names(TOKENS))[0]
    assert (answer.n_blocks, answer.row_bytes, answer.kv_format) == (0, 0, "")


def test_names_are_keyed_in_a_private_swarm(open_room: OpenRoom) -> None:  # noqa: F811
    key = "cd" * 32
    room = open_room("llama", (0, N_LAYERS), prefix_key=key, **SETTINGS)
    room.generate(TOKENS, "first")
    room.run()
    assert n_known(room, names(TOKENS[: 4 * B])) == 0
    assert n_known(room, names(TOKENS[: 4 * B], key)) == 4


STAGE = (1, 3)
STAGE_NAMES = bytes(range(32)) + bytes(range(1, 33)) + bytes(range(2, 34)) + bytes(range(3, 35))
"""As an origin gives them."""


def forward(room: Room, request_id: str, layers: tuple[int, int], position: int, rows: np.ndarray) -> Any:
    """f32, what the layers give; the request has its name before it begins."""
    where = {"start": layers[0], "end": layers[1]}
    named = send(room, ipc.PrefixFetchProbe(id=0, request_id=request_id, scope="o", **where), STAGE_NAMES)[0]
    room.call(ipc.Forward, rows, request_id=request_id, position=position, want="hidden", **where)
    room.run()
    (data,) = [data for m, data in room.sent if isinstance(m, ipc.LayerResult) and m.id == room.n_calls]
    return named.n_blocks, decode_tensor(memoryview(data))


def of_stage(room: Room, held: tuple[int, int], layers: tuple[int, int], scope: str = "o") -> list[bytes]:
    found = []
    for at in range(0, 4 * B, B):
        message = ipc.ExportPrefixSnapshot(
            id=0, start=held[0], end=held[1], scope=scope, first_row=at, n_rows=B, layers=layers
        )
        found.append(send(room, message, STAGE_NAMES)[1])
    return found


@pytest.mark.parametrize("held", [STAGE, (0, 3)])
def test_a_stage_goes_on_with_rows_of_a_stage_of_the_same_layers_or_of_more(
    open_room: OpenRoom,  # noqa: F811
    held: tuple[int, int],
) -> None:
    giving = open_room("llama", held, **SETTINGS)
    cold = open_room("llama", STAGE, **SETTINGS)
    taking = open_room("llama", (0, N_LAYERS), **SETTINGS)
    rows = np.random.default_rng(5).standard_normal((4 * B + 5, 64)).astype(np.float32)
    entering = rows
    if held[0] == 0:
        entering = forward(taking, "before", (0, 1), 0, rows)[1]
    assert forward(giving, "r", held, 0, rows)[0] == 0
    expected = forward(cold, "r", STAGE, 0, entering)[1]
    for room in (giving, cold):
        room.call(ipc.ReleaseRequestKv, request_id="r")
    parts = of_stage(giving, held, STAGE)
    assert parts == of_stage(cold, STAGE, STAGE)
    assert of_stage(giving, held, STAGE, scope="another origin") == [b""] * 4
    looked_up = send(taking, LookUpPrefix(id=0, start=1, end=3, scope="o", cuts=True), STAGE_NAMES)[0]
    assert looked_up.n_blocks == 0
    assert abs(looked_up.row_bytes * B / len(parts[0]) - 1) < 0.1
    message = ipc.ImportPrefixSnapshot(
        id=0,
        start=1,
        end=3,
        scope="o",
        n_blocks=4,
        sizes=tuple(map(len, parts)),
        digest=blake3(b"".join(blake3(part).digest() for part in parts)).hexdigest(),
        from_peer=True,
    )
    assert send(taking, message, STAGE_NAMES + b"".join(parts))[0].n_blocks == 4
    n_blocks, result = forward(taking, "again", STAGE, 4 * B, entering[4 * B :])
    assert n_blocks == 4
    np.testing.assert_allclose(result, expected[4 * B :], rtol=1e-4, atol=1e-4)
    taking.call(ipc.ReleaseRequestKv, request_id="again")
    # It computed none of it, and nobody can check it.
    assert of_stage(taking, STAGE, STAGE) == [b""] * 4
    assert n_told(taking) == 0


def test_rows_of_a_request_that_runs_or_is_held_travel_too(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", STAGE, **SETTINGS)
    rows = np.random.default_rng(6).standard_normal((4 * B, 64)).astype(np.float32)
    forward(room, "r", STAGE, 0, rows[: 3 * B + 1])
    # Not all of the rows that have a name are computed.
    assert of_stage(room, STAGE, STAGE) == [b""] * 4
    room.call(
        ipc.Forward, rows[3 * B + 1 :], request_id="r", position=3 * B + 1, start=1, end=3, want="hidden"
    )
    room.run()
    running = of_stage(room, STAGE, STAGE)
    assert all(running)
    assert of_stage(room, STAGE, STAGE, scope="another origin") == [b""] * 4
    room.call(ipc.HoldRequest, request_id="r", hold_s=60.0)
    assert of_stage(room, STAGE, STAGE) == running
    room.call(ipc.ReleaseRequestKv, request_id="r")
    assert of_stage(room, STAGE, STAGE) == running


def test_looking_up_cuts_no_segments_unless_it_is_wanted(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, N_LAYERS), **SETTINGS)
    layers = room.handlers.state.engine().layers
    assert send(room, LookUpPrefix(id=0, start=1, end=3, scope="o"), STAGE_NAMES)[0].row_bytes == 0
    assert len(layers.segments) == 1
    found = send(room, LookUpPrefix(id=0, start=1, end=3, scope="o", cuts=True), STAGE_NAMES)[0]
    whole = send(room, LookUpPrefix(id=0, start=0, end=1, scope="o"), STAGE_NAMES)[0]
    assert found.row_bytes == 2 * whole.row_bytes > 0


def test_layers_of_a_state_are_those_of_a_state_of_these_layers() -> None:
    data = state_of(0, 9)
    assert layers_of(data, 2, 0, 2) == data
    one, other = layers_of(data, 2, 0, 1), layers_of(data, 2, 1, 2)
    assert read_state(one).n_rows == 9
    assert len(one) == len(other)
    assert one != other
    with pytest.raises(BadState):
        layers_of(data, 3, 0, 1)


@given(st.lists(st.integers(1, 4 * B - 1), max_size=6))
def test_slices_of_any_size_follow_each_other(cuts: list[int]) -> None:
    ends = [*sorted(set(cuts)), 4 * B]
    parts = [state_of(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    assert rows_in_order(parts) == [end - first for first, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    "spans",
    [[(1, 9)], [(0, 4), (5, 9)], [(0, 4), (3, 9)], [(4, 9), (0, 4)], [(0, 4), (0, 4)]],
    ids=["not from 0 on", "a gap", "a row twice", "another order", "a slice twice"],
)
def test_slices_that_do_not_follow_each_other_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(BadState, match="follow"):
        rows_in_order([state_of(*span) for span in spans])


def test_slices_of_different_layouts_are_refused() -> None:
    with pytest.raises(BadState, match="layouts"):
        rows_in_order([state_of(0, 4), layers_of(state_of(4, 9), 2, 0, 1)])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65504.0, -65504.0, 6e-8, -0.0])
def test_only_numbers_that_are_none_are_refused(value: float) -> None:
    data = state_of(0, 9)
    data = data.replace(np.array([3], "<f2").tobytes(), np.array([value], "<f2").tobytes(), 1)
    if np.isfinite(value):
        assert rows_in_order([data]) == [9]
    else:
        with pytest.raises(BadState, match="NaN"):
            rows_in_order([data])


def test_rows_are_as_far_apart_as_they_differ() -> None:
    assert 0 < rows_apart(state_of(0, 8), state_of(0, 8, scale=1.001)) < 0.01
    assert rows_apart(state_of(0, 8), state_of(0, 8, scale=-1)) == 2
    with pytest.raises(BadState):
        rows_apart(state_of(0, 8), state_of(1, 9))


def state_of(first: int, end: int, *, scale: float = 1.0) -> bytes:
    """Two layers: K of 3 values in a row, V transposed."""
    positions = np.arange(first, end)
    cells = np.zeros(len(positions), [("position", "<i4"), ("n", "<u4"), ("sequence", "<i4")])
    cells["position"], cells["n"] = positions, 1
    numbers = lambda *of: np.array(of, "<u4").tobytes()  # noqa: E731
    parts = [numbers(7, 0), numbers(1, len(positions)), cells.tobytes(), numbers(1, 2)]
    for layer in range(2):
        keys = (positions[:, None] + np.arange(1, 4) + layer) * scale
        parts += [
            np.array([1], "<i4").tobytes(),
            np.array([6], "<u8").tobytes(),
            keys.astype("<f2").tobytes(),
        ]
    for layer in range(2):
        values = ((positions[:, None] + np.arange(2, 5) + layer) * scale).T
        parts += [numbers(1, 2, 3), np.ascontiguousarray(values).astype("<f2").tobytes()]
    return b"".join(parts)
