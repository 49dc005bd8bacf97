"""KV of a prompt's beginning between workers that keep it as different types, or have other kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import llama_cpp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.common.shapes import Shape, build
from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_proto.ipc.kv import LookUpPrefix
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.kv_layout import KvLayout, kv_encoding, kv_layout, turned
from swarmllm_workers.engine.kv_state import BadState, converted, read_state, rows_apart
from swarmllm_workers.engine.segment_file import n_layers_of
from swarmllm_workers.gguf_file import open_source
from swarmllm_workers.kernels import row_attention
from swarmllm_workers.schedule import check_work

from .blueprint import write
from .families import FAMILIES
from .test_batching import Room, open_room  # noqa: F401
from .test_prefix_travel import (
    SETTINGS,
    TOKENS,
    B,
    OpenRoom,
    check,
    done,
    export,
    import_message,
    n_known,
    n_told,
    names,
    send,
)

FORMATS: dict[str, dict[str, Any]] = {
    "f16": {"kv_type": "f16", "flash_attention": "on"},
    "f16, V transposed": {"kv_type": "f16", "flash_attention": "off"},
    "q8_0": {"kv_type": "q8_0", "flash_attention": "on"},
}
LAYERS = (0, 12)
BEGINNING = TOKENS[: 4 * B]
NAMES = names(BEGINNING, n_layers=LAYERS[1])


def filled(open_room: OpenRoom, **settings: Any) -> Room:  # noqa: F811
    room = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **settings)
    room.generate(TOKENS, "first")
    room.run()
    return room


def bring_other(room: Room, parts: list[bytes]) -> Any:
    message = msgspec.structs.replace(import_message(NAMES, parts, LAYERS[1]), other_format=True)
    return send(room, message, NAMES + b"".join(parts))[0]


def slices(room: Room, *, rounded: bool = False) -> list[bytes]:
    return [export(room, NAMES, at, B, rounded=rounded) for at in range(0, 4 * B, B)]


@pytest.mark.parametrize(("given", "taken"), [*product(FORMATS, FORMATS)])
def test_rows_of_another_format_serve_requests_and_nobody_else(
    open_room: OpenRoom,  # noqa: F811
    given: str,
    taken: str,
) -> None:
    parts = slices(filled(open_room, **FORMATS[given]))
    asker = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **FORMATS[taken])
    assert bring_other(asker, parts).n_blocks == 4
    for name in ("again", "once more"):
        asker.generate(TOKENS, name)
        asker.run()
        assert done(asker, name).n_cached_tokens >= 4 * B
        assert done(asker, name).other_format is True
        # Right rows stay rows of another format.
        if name == "again":
            assert check(asker, BEGINNING, 1, 3).outcome in ("equal", "close")
    assert n_told(asker) == 0
    assert slices(asker) == [b""] * 4
    # What the worker computes itself is its own.
    asker.call(ipc.Generate, TOKENS, request_id="own", own_kv=True, sampling=ipc.Sampling(max_tokens=1))
    asker.run()
    assert done(asker, "own").n_cached_tokens == 0
    assert done(asker, "own").other_format is msgspec.UNSET
    assert n_told(asker) > 0


def test_rows_of_another_format_are_those_of_the_prompt(open_room: OpenRoom) -> None:  # noqa: F811
    """A check finds other rows, and so it finds them after they were converted."""
    liar = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **FORMATS["q8_0"])
    other = TOKENS.copy()
    other[B : 2 * B] = TOKENS[:B][::-1]
    liar.generate(other, "lie")
    liar.run()
    named = names(other[: 4 * B], n_layers=LAYERS[1])
    lies = [export(liar, named, at, B) for at in range(0, 4 * B, B)]
    asker = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **FORMATS["f16"])
    assert bring_other(asker, lies).n_blocks == 4
    assert check(asker, BEGINNING, 1, 3).outcome == "wrong"
    assert n_known(asker, NAMES) == 0


@pytest.mark.parametrize(
    ("apart", "other_format", "same_format"), [(0.07, "close", "wrong"), (0.11, "wrong", "wrong")]
)
def test_rows_of_another_format_may_be_further_from_those_that_are_computed(
    open_room: OpenRoom,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    apart: float,
    other_format: str,
    same_format: str,
) -> None:
    parts = slices(filled(open_room, **FORMATS["f16"]))
    monkeypatch.setattr(check_work, "rows_apart", lambda *_: apart)
    asker = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **FORMATS["f16"])
    assert bring_other(asker, parts).n_blocks == 4
    assert check(asker, BEGINNING, 1, 3).outcome == other_format
    asker = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **FORMATS["f16"])
    assert send(asker, import_message(NAMES, parts, LAYERS[1]), NAMES + b"".join(parts))[0].n_blocks == 4
    assert check(asker, BEGINNING, 1, 3).outcome == same_format


def test_own_rows_stay_beside_longer_ones_of_another_format(open_room: OpenRoom) -> None:  # noqa: F811
    asker = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **FORMATS["f16"])
    short = TOKENS[: 2 * B + 1]
    asker.generate(short, "own")
    asker.run()
    n_own = n_told(asker)
    assert n_own == 2
    assert bring_other(asker, slices(filled(open_room, **FORMATS["q8_0"]))).n_blocks == 4
    for name, tokens in (("long", TOKENS), ("short", short)):
        asker.generate(tokens, name)
        asker.run()
    assert (done(asker, "long").n_cached_tokens, done(asker, "long").other_format) == (4 * B, True)
    assert done(asker, "short").n_cached_tokens == 2 * B
    assert done(asker, "short").other_format is msgspec.UNSET
    assert n_told(asker) == n_own


def test_rows_are_rounded_for_those_who_want_it(open_room: OpenRoom) -> None:  # noqa: F811
    plain, q8_0 = filled(open_room, **FORMATS["f16"]), filled(open_room, **FORMATS["q8_0"])
    whole, rounded = slices(plain), slices(plain, rounded=True)
    assert 0.5 < sum(map(len, rounded)) / sum(map(len, whole)) < 0.6
    asker = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **FORMATS["f16"])
    assert bring_other(asker, rounded).n_blocks == 4
    assert check(asker, BEGINNING, 0, 3).outcome == "close"
    # What is kept so is given as it is.
    assert slices(q8_0, rounded=True) == slices(q8_0)


def test_a_worker_says_what_it_can_convert_to(open_room: OpenRoom) -> None:  # noqa: F811
    for settings in FORMATS.values():
        room = open_room(GUIDE_PATH, LAYERS, **SETTINGS, **settings)
        looked_up = send(room, LookUpPrefix(id=0, start=0, end=LAYERS[1]), NAMES)[0]
        assert looked_up.kv_type == settings["kv_type"]


GUIDE = open_source(GUIDE_PATH)
FUSED = EngineSettings(flash_attention="on")


@pytest.mark.parametrize(
    ("text", "turns"), [("", True), ("0", True), ("x1", True), ("1", False), (" 01", False)]
)
def test_what_libllama_reads_of_its_variable_counts(
    monkeypatch: pytest.MonkeyPatch, text: str, turns: bool
) -> None:
    """`LLAMA_ATTN_ROT_DISABLE`: nodes of which only one has set it convert nothing."""
    as_it_comes = kv_encoding.__wrapped__()
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", text)
    layout = kv_layout(GUIDE, FUSED)
    assert layout is not None
    assert ((layout.k_turned, layout.v_turned) != (0, 0)) == turns
    assert (kv_encoding.__wrapped__() == as_it_comes) == turns


def test_what_is_not_known_is_not_converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_gpu = EngineSettings(flash_attention="auto", n_gpu_layers=1)
    assert (kv_layout(GUIDE, on_gpu) is None) == row_attention.is_installed()
    monkeypatch.setattr(llama_cpp, "__version__", "0.0.1")
    assert kv_layout(GUIDE, FUSED) is None


@pytest.mark.parametrize("attention", ["auto", "on", "off"])
@pytest.mark.parametrize("family", ["llama-3.1", "gemma", "qwen3-moe", "baichuan 13b", "deepseek-v3"])
def test_the_layout_is_that_in_which_libllama_writes(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
    family: str,
    attention: str,
) -> None:
    path = write(tmp_path / "m.gguf", FAMILIES[family])
    room = open_room(path, (0, n_layers_of(open_source(path))), flash_attention=attention, **SETTINGS)
    engine = room.handlers.state.engine()
    room.generate(TOKENS % engine.n_vocab, "first")
    room.run()
    given = export(room, names(BEGINNING % engine.n_vocab, n_layers=engine.n_layers), 0, B)
    assert given
    if engine.kv_layout is None:
        assert family == "deepseek-v3", "it keeps latent vectors"
    else:
        assert converted(given, engine.kv_layout) == given
        other = replace(engine.kv_layout, is_transposed=not engine.kv_layout.is_transposed)
        assert converted(given, other) != given


TURNED = {"k_turned": 64, "v_turned": 32}


@pytest.mark.parametrize(("n_heads", "turned_by"), [(2, (64, 64)), (3, (128, 64)), (4, (0, 0))])
def test_keys_and_values_are_turned_as_libllama_does(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
    n_heads: int,
    turned_by: tuple[int, int],
) -> None:
    """Heads of 192, 128 and 96."""
    shape = Shape(n_layers=2, n_embd=384, n_heads=n_heads, n_kv_heads=1, n_ff=64, n_vocab=512)
    path, named = build(shape, tmp_path / "m.gguf"), names(BEGINNING, n_layers=2)
    given: list[bytes] = []
    for format_ in ("f16", "q8_0"):
        room = open_room(path, (0, 2), **SETTINGS, **FORMATS[format_])
        layout = room.handlers.state.engine().kv_layout
        assert layout is not None
        assert (layout.k_turned, layout.v_turned) == turned_by
        room.generate(TOKENS, "first")
        room.run()
        given.append(export(room, named, 0, B))
    f16, q8_0 = given
    assert 0 < rows_apart(converted(q8_0, replace(layout, is_q8_0=False)), f16) < 0.02
    assert 0 < rows_apart(converted(f16, layout), q8_0) < 0.02
    assert rows_apart(converted(f16, KvLayout(is_q8_0=True)), q8_0) > 1 or not any(turned_by)


def test_the_transform_is_that_of_the_matrix() -> None:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    numbers = np.random.default_rng(2).standard_normal((5, 192)).astype(np.float32)
    expected = (numbers.reshape(-1, 64) @ matrix / 8).reshape(5, 192)
    np.testing.assert_allclose(turned(numbers, 64), expected, atol=1e-5)


LAYOUTS = [
    KvLayout(**TURNED),
    KvLayout(is_transposed=True, **TURNED),
    KvLayout(is_q8_0=True, **TURNED),
    KvLayout(is_q8_0=True),
]


def state(numbers: np.ndarray) -> bytes:
    """One layer; `numbers` f32 [n, 64] as K, and as V, in f16."""
    cells = np.zeros(len(numbers), [("position", "<i4"), ("n", "<u4"), ("sequence", "<i4")])
    cells["position"], cells["n"] = np.arange(len(numbers)), 1
    pair = lambda *of: np.array(of, "<u4").tobytes()  # noqa: E731
    rows = np.array([1], "<i4").tobytes() + np.array([128], "<u8").tobytes() + numbers.astype("<f2").tobytes()
    return pair(7, 0) + pair(1, len(numbers)) + cells.tobytes() + pair(0, 1) + rows + rows


@given(st.integers(1, 40), st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_any_layout_holds_the_same_rows(n_rows: int, scale: float, seed: int) -> None:
    numbers = np.random.default_rng(seed).standard_normal((n_rows, 64)).astype(np.float32) * scale
    before = state(numbers)
    for layout in LAYOUTS:
        there = converted(before, layout)
        assert read_state(there).n_rows == n_rows
        assert converted(there, layout) == there
        back = converted(there, replace(layout, is_q8_0=False, is_transposed=False))
        if layout.is_q8_0:
            assert rows_apart(back, before) < 0.01
        else:
            assert back == before


@pytest.mark.parametrize("width", [1, 2, 4, 64, 128])
def test_runs_are_multiplied_by_the_walsh_hadamard_matrix(width: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    numbers = np.random.default_rng(0).integers(-8, 9, (5, 3 * width)).astype(np.float32)
    expected = (numbers.reshape(-1, width) @ matrix * width**-0.5).reshape(numbers.shape)
    before = numbers.copy()
    assert np.allclose(turned(numbers, width), expected, atol=1e-4)
    assert np.array_equal(numbers, before), "what it is given stays as it is"
    assert np.allclose(turned(turned(numbers, width), width), numbers, atol=1e-4)


def test_numbers_that_a_layout_cannot_hold_are_refused() -> None:
    fitting = converted(state(np.full((2, 64), 60_000, np.float32)), KvLayout(is_q8_0=True))
    too_large = bytearray(fitting)
    # The scale of a block: 65504, of which 127 are more than f16 holds.
    at = len(fitting) - 34
    too_large[at : at + 2] = np.array([65504], "<f2").tobytes()
    with pytest.raises(BadState):
        converted(bytes(too_large), KvLayout())
    with pytest.raises(BadState):
        converted(bytes(too_large[:-1]), KvLayout(is_q8_0=True))
