"""Prompts that begin like an earlier one get its rows (test_kept_prefixes.py: the index of them)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.tensors import decode_tensor
from swarmllm_workers.cache.prefixes import Name, token_name
from swarmllm_workers.engine.operation import complete
from swarmllm_workers.engine.segment import Span

from .blueprint import write
from .client import GREEDY
from .families import FAMILIES
from .test_batching import PROMPT, Room, batches, guide_prompts, open_room  # noqa: F401
from .test_exactness import GUIDE
from .test_kv_state import open_family

OpenRoom = Callable[..., Room]
B = BLOCK_TOKENS
TOKENS = np.random.default_rng(1).integers(0, 250, 6 * B).astype(np.int32)


def done(room: Room, name: str) -> ipc.GenerateDone:
    (message,) = [m for m, _ in room.sent if isinstance(m, ipc.GenerateDone) and m.request_id == name]
    return message


def test_same_prompt_again_runs_only_its_last_token(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
) -> None:
    room = open_room("llama", (0, 4), n_ctx=1024)
    prompt = TOKENS[: 2 * B]
    room.generate(prompt, "first")
    room.run()
    batches.clear()
    room.generate(prompt, "again")
    room.run()
    # It is run again for its logits.
    assert batches[0] == [1]
    assert done(room, "first").n_cached_tokens == 0
    assert done(room, "again").n_cached_tokens == 2 * B - 1
    assert done(room, "again").n_prompt_tokens == 2 * B


LARGE = 64


def ask_behind(room: Room, n_rest: int, name: str, batches: list[list[int]]) -> list[list[int]]:  # noqa: F811
    """The batches of a prompt that goes on for so many tokens behind three kept blocks."""
    batches.clear()
    prompt = np.append(TOKENS[: 3 * B], np.arange(n_rest, dtype=np.int32))
    room.generate(prompt, name, GREEDY)
    room.run()
    assert done(room, name).n_cached_tokens == 3 * B
    return list(batches)


@pytest.mark.parametrize(
    ("n_rest", "n_rows"), [(1, 1), (19, 19), (20, LARGE), (63, LARGE), (64, 64), (70, LARGE)]
)
def test_a_short_rest_of_a_prompt_is_computed_with_rows_before_it_where_that_takes_less(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
    n_rest: int,
    n_rows: int,
) -> None:
    room = open_room("llama", (0, 4), n_ctx=1024)
    plain = open_room("llama", (0, 4), n_ctx=1024)
    for each, large_batch_from, n_first in ((plain, LARGE, min(n_rest, LARGE)), (room, 20, n_rows)):
        each.generate(TOKENS[: 3 * B], "kept", GREEDY)
        each.run()
        each.handlers.state.engine().large_batch_from = large_batch_from
        assert ask_behind(each, n_rest, "behind", batches)[0] == [n_first]
    assert room.tokens("behind") == plain.tokens("behind")


def test_no_rows_are_computed_again_beside_others_nor_where_there_is_no_room(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = open_room("llama", (0, 4), n_ctx=1024)
    room.generate(TOKENS[: 3 * B], "kept", GREEDY)
    room.run()
    engine = room.handlers.state.engine()
    engine.large_batch_from = 20
    assert ask_behind(room, 30, "alone", batches)[0] == [LARGE]
    other = engine.route("other", 0, 4)
    engine.run(other, [Span(engine.take_slot("other"), 0, TOKENS[:10], "none")])
    assert ask_behind(room, 30, "beside", batches)[0] == [30]
    engine.release("other")
    route = engine.route("r", 0, 4)
    position = engine.reuse("r", route, TOKENS[: 3 * B + 30])
    assert position == 3 * B
    for n_free, begin in ((LARGE - 1, position), (LARGE, 2 * B + 30)):
        monkeypatch.setattr(engine.prefixes, "make_room", lambda where, n_rows, n=n_free: n)
        assert engine.begin_large_batch("r", route, position, 3 * B + 30) == begin
        assert engine.n_rows("r", 0, 4) == begin


def test_other_kept_rows_make_room_for_a_large_batch(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
) -> None:
    room = open_room("llama", (0, 4), n_ctx=512, n_prefixes=2)
    engine = room.handlers.state.engine()
    engine.large_batch_from = 20
    for name, prompt in (("other", TOKENS[::-1][: 5 * B]), ("kept", TOKENS[: 3 * B])):
        room.generate(np.ascontiguousarray(prompt), name, ipc.Sampling(temperature=0.0, max_tokens=1))
        room.run()
    assert engine.prefixes.n_free(engine.route("r", 0, 4).segments) < LARGE
    assert ask_behind(room, 30, "behind", batches)[0] == [LARGE]


def test_rows_of_a_window_are_not_computed_again(open_room: OpenRoom) -> None:  # noqa: F811
    """Those before them may be gone."""
    room = open_room("gemma3", (0, 12), n_ctx=1024)
    engine = room.handlers.state.engine()
    engine.large_batch_from = 20
    room.generate(TOKENS[: 3 * B], "kept", GREEDY)
    room.run()
    route = engine.route("r", 0, engine.n_layers)
    engine.make_room(route, 1024)
    assert engine.reuse("r", route, TOKENS[: 3 * B + 30]) == 3 * B
    assert engine.begin_large_batch("r", route, 3 * B, 3 * B + 30) == 3 * B


WHOSE = {
    "this node's": {},
    "one node's": {"own_kv": True, "clients_of": "node-a"},
    "another one's": {"own_kv": True, "clients_of": "node-b"},
    "nobody's": {"own_kv": True},
}
"""Whose client asks, as a Generate says it."""


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("first", WHOSE)
@pytest.mark.parametrize("second", WHOSE)
def test_clients_of_one_node_share_every_token_and_others_whole_blocks(
    open_room: OpenRoom,  # noqa: F811
    first: str,
    second: str,
    is_running: bool,
) -> None:
    """Of prompts that go on otherwise in the middle of a block."""
    room = open_room("llama", (0, 4), n_ctx=1024)
    system = TOKENS[: 2 * B + 30]
    endless = ipc.Sampling(temperature=0.0, max_tokens=300, ignore_eos=True)
    for name, whose, question in (("first", first, 7), ("second", second, 9)):
        prompt = np.append(system, np.full(20, question, np.int32))
        sampling = endless if name == "first" and is_running else GREEDY
        room.call(ipc.Generate, prompt, request_id=name, sampling=sampling, **WHOSE[whose])
        room.run(4 if sampling is endless else 10_000)
    room.run()
    by_token = first == second != "nobody's"
    assert done(room, "second").n_cached_tokens == (len(system) if by_token else 2 * B)


def test_rows_of_each_nodes_clients_stay_beside_those_of_others(open_room: OpenRoom) -> None:  # noqa: F811
    """Each finds the tail behind the last whole block from its second request on, whoever asked between."""
    room = open_room("llama", (0, 4), n_ctx=2048)
    system, found = TOKENS[: 2 * B + 30], []
    for i, whose in enumerate([*WHOSE, *WHOSE, *reversed(WHOSE)]):
        prompt = np.append(system, np.full(5, 5 + i, np.int32))
        sampling = ipc.Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
        room.call(ipc.Generate, prompt, request_id=f"{i}", sampling=sampling, **WHOSE[whose])
        room.run()
        found.append(done(room, f"{i}").n_cached_tokens)
    whole, every = 2 * B, len(system)
    assert found == [0, whole, whole, whole, every, every, every, whole, whole, every, every, every]


@pytest.mark.slow
def test_text_after_a_reused_prefix_is_that_of_a_fresh_worker(open_room: OpenRoom) -> None:  # noqa: F811
    """A second turn that begins with the whole first one."""
    room = open_room(GUIDE, (0, 12), n_ctx=1024)
    fresh = open_room(GUIDE, (0, 12), n_ctx=1024, n_prefixes=0)
    prompt = guide_prompts(room)[0]
    room.generate(prompt, "one", ipc.Sampling(temperature=0.0, max_tokens=80, ignore_eos=True))
    room.run()
    second = np.concatenate([prompt, room.tokens("one"), guide_prompts(room)[1]]).astype(np.int32)
    for each in (room, fresh):
        each.generate(second, "two", ipc.Sampling(temperature=0.0, max_tokens=24))
        each.run()
    assert done(room, "two").n_cached_tokens >= B
    assert done(fresh, "two").n_cached_tokens == 0
    assert room.tokens("two") == fresh.tokens("two")


@pytest.mark.slow
def test_logits_over_reused_rows_are_those_of_a_fresh_worker_bit_for_bit(open_room: OpenRoom) -> None:  # noqa: F811
    """The kept chunk lies in the same cells, and the one behind it elsewhere: the rows that were generated
    are kept, too. Fused attention does not mind, plain attention would add up in another order."""
    settings = {"n_ctx": 1024, "flash_attention": "on"}
    room, fresh = (open_room(GUIDE, (0, 12), **settings) for _ in range(2))
    tokens = np.resize(guide_prompts(room)[0], 2 * B + 20)
    room.generate(tokens, "kept", GREEDY)
    room.run()
    results = []
    for each in (room, fresh):
        engine = each.handlers.state.engine()
        route, slot = engine.route("r", 0, 12), engine.take_slot("r")
        n = engine.reuse("r", route, tokens, own_kv=True, clients_of=None)
        if each is room:
            assert n == 2 * B
        else:
            assert n == 0
            engine.run(route, [Span(slot, 0, tokens[: 2 * B], "none")])
        results.append(engine.run(route, [Span(slot, 2 * B, tokens[2 * B :], "logits")])[0].copy())
    np.testing.assert_array_equal(results[0], results[1])


def test_kept_rows_give_way_to_requests_that_need_the_room(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=256)
    for i in range(3):
        room.generate(np.roll(TOKENS, 50 * i)[: 2 * B + 30], str(i))
        room.run()
    room.generate(TOKENS[-180:], "large")
    data = TOKENS[:30]
    room.call(ipc.Forward, data, request_id="f", start=0, end=4, position=0, want="none")
    room.run()
    assert not room.errors()


def test_kept_rows_go_when_layers_are_unloaded_or_cut(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=1024)
    prompt = TOKENS[: 2 * B]
    room.generate(prompt, "first")
    room.run()
    rows = np.zeros((2, 64), np.float32)
    room.call(ipc.Forward, rows, request_id="f", start=1, end=3, position=0, want="hidden")
    room.run()
    engine = room.handlers.state.engine()
    assert len(engine.layers.segments) == 3
    assert sum(segment.n_rows for segment in engine.layers.segments) == 2
    room.generate(prompt, "again")
    room.run()
    assert done(room, "again").n_cached_tokens == 0
    room.generate(prompt, "through segments")
    room.run()
    assert done(room, "through segments").n_cached_tokens == 2 * B - 1
    room.call(ipc.Unload, start=0, end=1)
    room.call(ipc.Load, start=0, end=1)
    room.generate(prompt, "reloaded")
    room.run()
    assert done(room, "reloaded").n_cached_tokens == 0
    assert not room.errors()


def test_nothing_is_kept_where_it_is_turned_off(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=1024, n_prefixes=0)
    for name in ("first", "again"):
        room.generate(np.resize(PROMPT, 3 * B), name)
        room.run()
    assert done(room, "again").n_cached_tokens == 0
    assert all(segment.n_rows == 0 for segment in room.handlers.state.engine().layers.segments)


def test_a_prompt_shares_cells_with_a_running_one_to_the_last_token(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
) -> None:
    """`n` answers: the others have all of the prompt but the row whose logits they want."""
    room = open_room("llama", (0, 4), n_ctx=256, n_slots=8)
    prompt = TOKENS[:200]
    room.generate(prompt, "first")
    room.run(2)
    batches.clear()
    for i in range(5):
        room.generate(prompt, str(i))
    room.run()
    assert batches[0] == [1] * 6
    assert [done(room, str(i)).n_cached_tokens for i in range(5)] == [199] * 5
    assert not room.errors()  # 6 x 200 rows in 256 cells
    assert len({tuple(room.tokens(name)) for name in ("first", *map(str, range(5)))}) == 1


@pytest.mark.slow
def test_next_turn_of_a_session_computes_only_what_is_new(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
) -> None:
    room = open_room(GUIDE, (0, 12), n_ctx=1024)
    fresh = open_room(GUIDE, (0, 12), n_ctx=1024, n_prefixes=0)
    first, second = guide_prompts(room)[:2]
    sampling = ipc.Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)
    room.call(ipc.Generate, first, request_id="one", session_id="talk", sampling=sampling)
    room.run()
    # The last token was sampled, not run.
    known = np.concatenate([first, room.tokens("one")[:-1]]).astype(np.int32)
    prompt = np.concatenate([known, room.tokens("one")[-1:], second]).astype(np.int32)
    batches.clear()
    room.call(ipc.Generate, prompt, request_id="two", session_id="talk", sampling=GREEDY)
    room.run()
    assert batches[0] == [len(prompt) - len(known)]
    assert done(room, "two").n_cached_tokens == len(known)
    fresh.generate(prompt, "two")
    fresh.run()
    assert room.tokens("two") == fresh.tokens("two")


@pytest.mark.parametrize("family", ["llama-3.1", "gemma-3", "deepseek-v3", "gpt-oss"])
def test_rows_that_had_to_leave_their_cells_come_back_the_same(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
    family: str,
) -> None:
    """Through host memory: the logits are those of the cells they were in, to rounding."""
    room = open_family(open_room, tmp_path, family)
    engine = room.handlers.state.engine()
    tokens = TOKENS[: 3 * B] % engine.n_vocab
    room.generate(tokens, "kept", GREEDY)
    room.run()
    logits = []
    for n_free in (0, 1024):  # from cells, then from host memory
        route, slot = engine.route("r", 0, engine.n_layers), engine.take_slot("r")
        engine.make_room(route, n_free)
        assert (engine.prefixes.n_bytes > 0) == bool(n_free)
        prompt = np.append(tokens, 7).astype(np.int32)
        assert engine.reuse("r", route, prompt) == 3 * B
        (result,) = engine.run(route, [Span(slot, 3 * B, prompt[3 * B :], "logits")])
        logits.append(result.copy())
        engine.release("r")
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


def test_a_window_that_is_cut_off_is_never_taken_for_the_whole(open_room: OpenRoom) -> None:  # noqa: F811
    """gemma3's bytes hold the last rows of its windowed layers only."""
    room = open_room("gemma3", (0, 12), n_ctx=1024)
    engine = room.handlers.state.engine()
    room.generate(TOKENS[: 3 * B], "kept", GREEDY)
    room.run()
    route = engine.route("r", 0, engine.n_layers)
    engine.make_room(route, 1024)
    assert engine.reuse("r", route, TOKENS[: 2 * B]) == 0
    assert engine.reuse("r", route, TOKENS[: 3 * B + 5]) == 3 * B


def test_one_segment_without_its_window_is_enough_to_need_all_rows(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Of three segments the middle one attends to everything: its bytes could be used from any row on."""
    family = FAMILIES["olmo-3"]
    keys = {**family.keys, "attention.sliding_window_pattern": [True, False, False, True, False]}
    path = write(tmp_path / "olmo-3.gguf", replace(family, keys=keys))
    room = open_room(path, (0, 2), (2, 3), (3, 5), n_ctx=1024)
    engine = room.handlers.state.engine()
    tokens = TOKENS % engine.n_vocab
    room.generate(tokens[: 3 * B], "kept", GREEDY)
    room.run()
    route = engine.route("r", 0, engine.n_layers)
    assert len(route.segments) == 3
    engine.make_room(route, 1024)
    assert [kept.sequence for kept in engine.prefixes] == [None]
    assert engine.reuse("r", route, tokens[: 2 * B]) == 0
    assert engine.reuse("r", route, tokens[: 3 * B + 5]) == 3 * B


def test_exporting_one_prefix_leaves_every_other_one_in_its_cells(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=1024, n_prefixes=3)
    engine = room.handlers.state.engine()
    for i in range(3):
        room.generate(TOKENS[2 * i * B : 2 * (i + 1) * B], str(i), GREEDY)
        room.run()
    kept = [(each.sequence, each.n_rows) for each in engine.prefixes]
    assert len(kept) == 3
    assert None not in {sequence for sequence, _ in kept}
    route = engine.route("r", 0, 4)
    # Less than is kept: it is put together in cells of its own.
    name = Name(token_name(engine.root, TOKENS[:B]).hashes)
    exported = complete(engine.prefixes.exporting(route.segments, name))
    assert exported is not None
    assert exported[0] == 1
    for segment in route.segments:
        assert [(sequence, segment.lengths[sequence]) for sequence, _ in kept] == kept


def test_no_host_memory_means_that_rows_are_dropped(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=1024, prefix_max_bytes=0)
    engine = room.handlers.state.engine()
    room.generate(TOKENS[: 2 * B], "kept", GREEDY)
    room.run()
    engine.make_room(engine.route("r", 0, 4), 1024)
    assert len(engine.prefixes) == 0
    assert engine.prefixes.n_bytes == 0


@pytest.mark.parametrize("family", ["mamba-2", "qwen3-next"])
def test_nothing_is_kept_of_recurrent_state(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
    family: str,
) -> None:
    room = open_family(open_room, tmp_path, family)
    tokens = TOKENS[: 2 * B] % room.handlers.state.engine().n_vocab
    for name in ("first", "again"):
        room.call(ipc.Generate, tokens, request_id=name, session_id="talk", sampling=GREEDY)
        room.run()
    assert done(room, "again").n_cached_tokens == 0
    assert room.tokens("again") == room.tokens("first")
    assert not room.errors()


def test_expired_rows_go_while_the_worker_sleeps(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=1024, prefix_ttl_s=0.0)
    room.generate(TOKENS[: 2 * B], "kept", GREEDY)
    room.run()
    engine = room.handlers.state.engine()
    assert len(engine.prefixes) == 1
    assert room.handlers.pause_ms() is not None
    assert len(engine.prefixes) == 0
    assert all(segment.n_rows == 0 for segment in engine.layers.segments)


def test_rows_that_lack_their_window_are_never_shared_below_where_they_began(open_room: OpenRoom) -> None:  # noqa: F811
    """gemma3, through host memory and back: neither the running request nor what is kept of it serves a
    prompt that shares less than came back."""
    room = open_room("gemma3", (0, 12), n_ctx=1024)
    engine = room.handlers.state.engine()
    tokens = TOKENS[: 5 * B]
    room.generate(tokens[: 3 * B], "kept", GREEDY)
    room.run()
    route = engine.route("r", 0, engine.n_layers)
    engine.make_room(route, 1024)
    room.generate(tokens, "came back", GREEDY)
    room.run(1)
    other = np.concatenate([tokens[: 2 * B], TOKENS[-B:]])
    assert engine.reuse("r", route, other) == 0
    engine.release("r")
    room.run()
    assert done(room, "came back").n_cached_tokens == 3 * B
    assert engine.reuse("s", engine.route("s", 0, engine.n_layers), other) == 0
    engine.release("s")
    assert engine.reuse("t", engine.route("t", 0, engine.n_layers), tokens) == 4 * B
    name = Name(token_name(engine.root, tokens).hashes)
    assert engine.prefixes.name("u", route.segments, name) == 0


NAMES = b"".join(bytes([i]) * 32 for i in range(3))


def probe(room: Room, request_id: str, names: bytes = NAMES, scope: str = "", **fields: Any) -> int | str:
    """Blocks that the request has, or the kind of the refusal."""
    fields = {"start": 0, "end": 4} | fields
    room.handlers.handle(
        ipc.PrefixFetchProbe(id=7, request_id=request_id, scope=scope, **fields), memoryview(names)
    )
    answer = room.sent[-1][0]
    return answer.kind if isinstance(answer, ipc.Error) else int(answer.n_blocks)


def forward(room: Room, name: str, rows: np.ndarray, position: int = 0, **fields: Any) -> None:
    room.call(
        ipc.Forward,
        rows,
        request_id=name,
        position=position,
        **({"start": 0, "end": 2, "want": "hidden"} | fields),
    )
    room.run()


def test_a_stage_keeps_rows_under_the_names_it_was_given(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
) -> None:
    """As a chain does it: names, rows, the end; then another request with the same beginning."""
    room = open_room("llama", (0, 2), n_ctx=1024)
    engine = room.handlers.state.engine()
    rows = np.random.default_rng(3).standard_normal((3 * B, engine.n_embd)).astype(np.float32)
    stage = {"start": 0, "end": 2}
    assert probe(room, "a", **stage) == 0
    forward(room, "a", rows[: 2 * B + 10])
    assert probe(room, "b", **stage) == 2, "a running request's rows are shared, too"
    room.call(ipc.CancelRequest, request_id="b")
    room.call(ipc.CancelRequest, request_id="a")
    assert probe(room, "c", scope="another origin", **stage) == 0
    assert probe(room, "d", NAMES[:32], **stage) == 1
    assert probe(room, "e", NAMES[32:], **stage) == 0
    assert probe(room, "f", **stage) == 2
    batches.clear()
    forward(room, "f", rows[2 * B : 2 * B + 20], 2 * B)
    assert batches == [[20]]
    # In a worker of its own: beside other cells, batches of 64 rows and more have other bits.
    alone = open_room("llama", (0, 2), n_ctx=1024)
    forward(alone, "g", rows[: 2 * B + 20])
    again, fresh = (
        decode_tensor(memoryview(next(p for m, p in reversed(each.sent) if isinstance(m, ipc.LayerResult))))
        for each in (room, alone)
    )
    np.testing.assert_array_equal(again, fresh[2 * B :])
    assert not room.errors()


def test_names_that_come_at_the_end_name_what_was_generated_too(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 2), n_ctx=1024)
    rows = np.zeros((2 * B + 5, room.handlers.state.engine().n_embd), np.float32)
    stage = {"start": 0, "end": 2}
    assert probe(room, "a", NAMES[:32], **stage) == 0
    forward(room, "a", rows)
    assert probe(room, "a", **stage) == 2
    room.call(ipc.CancelRequest, request_id="a")
    assert probe(room, "b", **stage) == 2


@pytest.mark.parametrize("family", ["llama-3.1", "gemma-3", "deepseek-v3"])
def test_kept_kv_goes_to_another_worker_and_back(
    open_room: OpenRoom,  # noqa: F811
    tmp_path: Path,
    family: str,
) -> None:
    """Narrowed to the blocks that were asked for; what arrives continues as the original does."""
    rooms = [open_family(open_room, tmp_path, family) for _ in range(2)]
    engines = [room.handlers.state.engine() for room in rooms]
    stage = {"start": 0, "end": engines[0].n_layers}
    tokens = TOKENS[: 3 * B + 1] % engines[0].n_vocab
    assert probe(rooms[0], "a", **stage) == 0
    forward(rooms[0], "a", tokens[: 3 * B], want="none", **stage)
    rooms[0].call(ipc.CancelRequest, request_id="a")
    rooms[0].handlers.handle(ipc.ExportPrefixSnapshot(id=1, **stage), memoryview(NAMES[:64]))
    response, data = rooms[0].sent[-1]
    assert (response.n_blocks, sum(response.sizes)) == (2, len(data))
    message = ipc.ImportPrefixSnapshot(
        id=1, n_blocks=2, sizes=response.sizes, digest=response.digest, **stage
    )
    rooms[1].handlers.handle(message, memoryview(NAMES[:64] + data))
    assert rooms[1].sent[-1][0].n_blocks == 2
    logits = []
    for room, engine in zip(rooms, engines, strict=True):
        route, slot = engine.route("r", **stage), engine.take_slot("r")
        name = Name((NAMES[:32], NAMES[32:64]))
        if room is rooms[1]:
            assert engine.prefixes.reuse("r", route.segments, name, 2 * B) == 2 * B
        else:
            engine.run(route, [Span(slot, 0, tokens[: 2 * B], "none")])
        logits.append(engine.run(route, [Span(slot, 2 * B, tokens[2 * B :], "logits")])[0].copy())
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-3)
    for damaged in (
        {"digest": "0" * 64},
        {"sizes": (*response.sizes[:-1], response.sizes[-1] - 1)},
        {"n_blocks": 3},
    ):
        rooms[1].handlers.handle(msgspec.structs.replace(message, **damaged), memoryview(NAMES[:64] + data))
        assert rooms[1].sent[-1][0].kind == "bad_message"
    rooms[1].handlers.handle(msgspec.structs.replace(message, n_blocks=1), memoryview(NAMES[:32] + data))
    assert rooms[1].sent[-1][0].kind == "bad_tensor", "two blocks under one name"


def test_nothing_is_exported_where_nothing_is_kept(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=256)
    room.handlers.handle(ipc.ExportPrefixSnapshot(id=1, start=0, end=4), memoryview(NAMES))
    assert (room.sent[-1][0].n_blocks, room.sent[-1][1]) == (0, b"")
    assert probe(room, "a", NAMES[:33]) == "bad_message"
    assert probe(room, "a", start=0, end=5) == "cannot_cut"
