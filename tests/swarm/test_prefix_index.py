"""Who has the KV of which beginning of a prompt, compared with a plain look through all that was said."""

from __future__ import annotations

import pytest
from block_names import block_hashes
from fake_trust import FakeTrust
from hypothesis import given
from hypothesis import strategies as st
from node_ids import N, node_id_named

from swarmllm.node.announcing.announcer import prefix_announcements, within_limits
from swarmllm.swarm.records.prefix_index import NODE_PREFIXES_MAX, PrefixIndex, PrefixMatch
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.swarm import (
    RECORD_RANGES_MAX,
    FileAnnounce,
    KeptPrefix,
    NodeRecord,
    PrefixCacheAnnounce,
    ShardAnnounce,
)

LIAR, ME, NEAR, GONE = map(node_id_named, ("liar", "me", "near", "gone"))

MODEL = "a" * 64
OTHER = "b" * 64


def hashes_of(pattern: int, n_blocks: int, model_id: str = MODEL) -> tuple[bytes, ...]:
    """Of a prompt of blocks of two kinds."""
    tokens = [(pattern >> i) & 1 for i in range(n_blocks) for _ in range(BLOCK_TOKENS)]
    return block_hashes(model_id, 0, 4, tokens)


def announce(*prompts: tuple[int, int], model_id: str = MODEL) -> PrefixCacheAnnounce:
    kept = tuple(KeptPrefix(hashes_of(pattern, n, model_id)[-1], n) for pattern, n in prompts)
    return PrefixCacheAnnounce(model_id=model_id, prefixes=kept)


PROMPTS = st.tuples(st.integers(0, 7), st.integers(1, 3))
SAYINGS = st.tuples(st.integers(0, 4), st.sampled_from([MODEL, OTHER]), st.lists(PROMPTS, max_size=4))


@given(st.lists(SAYINGS, max_size=12), PROMPTS, st.sets(st.integers(0, 4)), st.integers(1, 5))
def test_the_longest_match_is_that_of_a_look_through_everything(
    sayings: list[tuple[int, str, list[tuple[int, int]]]],
    wanted: tuple[int, int],
    trusted: set[int],
    nodes_max: int,
) -> None:
    index, said = PrefixIndex(nodes_max), {}
    for node, model_id, prompts in sayings:
        index.put(f"n{node}", [announce(*prompts, model_id=model_id)])
        said.pop(node, None)
        if prompts and len(said) < nodes_max:
            said[node] = {(model_id, hashes_of(*prompt, model_id)) for prompt in prompts}
    hashes = hashes_of(*wanted)
    best = PrefixMatch()
    for n in range(1, len(hashes) + 1):
        having = {node for node in trusted & said.keys() if (MODEL, hashes[:n]) in said[node]}
        best = PrefixMatch(n, frozenset(f"n{node}" for node in having)) if having else best
    assert index.longest(MODEL, hashes, lambda node_id: int(node_id[1:]) in trusted) == best
    most = {
        f"n{node}": max(n for n in range(1, len(hashes) + 1) if (MODEL, hashes[:n]) in said[node])
        for node in trusted & said.keys()
        if any((MODEL, hashes[:n]) in said[node] for n in range(1, len(hashes) + 1))
    }
    assert index.blocks(MODEL, hashes, lambda node_id: int(node_id[1:]) in trusted) == most
    for model_id in (MODEL, OTHER):
        assert index.has(model_id) == any(each == model_id for of in said.values() for each, _ in of)
    for node in range(5):
        assert index.count(f"n{node}") == len(said.get(node, ()))
        index.forget(f"n{node}")
    assert len(index) == 0
    assert index.longest(MODEL, hashes, lambda _: True) == PrefixMatch()
    assert not index.has(MODEL)


def test_of_one_node_no_more_is_taken_than_it_may_say() -> None:
    index = PrefixIndex()
    flood = [
        PrefixCacheAnnounce(
            model_id=model_id,
            prefixes=tuple(KeptPrefix(bytes([i]) * 32, 1) for i in range(NODE_PREFIXES_MAX)),
        )
        for model_id in (MODEL, OTHER)
    ]
    index.put("loud", flood)
    assert len(index) == NODE_PREFIXES_MAX
    assert index.longest(OTHER, [bytes(32)], lambda _: True) == PrefixMatch()


def test_listed_are_connected_nodes_that_are_trusted_and_never_oneself() -> None:
    distrusted = {LIAR}
    registry = Registry(ME, FakeTrust(lambda node_id: node_id not in distrusted, 0.5), share_min=1.0)
    for node_id in (ME, NEAR, LIAR, GONE):
        record = NodeRecord(node_id=node_id, prefix_caches=(announce((5, 2), (5, 1)),))
        registry.apply(node_id, encode_record(record))
    registry.set_reachable({NEAR, LIAR})
    assert registry.holders_of_prefix(MODEL, hashes_of(5, 3)) == PrefixMatch(2, frozenset({NEAR}))
    assert [registry.n_prefixes(n) for n in (ME, NEAR, LIAR, GONE)] == [0, 2, 0, 0]
    distrusted.clear()
    assert registry.holders_of_prefix(MODEL, hashes_of(5, 3)).node_ids == {NEAR, LIAR}
    registry.apply(NEAR, encode_record(NodeRecord(node_id=NEAR, prefix_caches=(announce((5, 1)),))))
    assert registry.holders_of_prefix(MODEL, hashes_of(5, 3)).node_ids == {LIAR}
    registry.forget(LIAR)
    assert registry.holders_of_prefix(MODEL, hashes_of(5, 3)) == PrefixMatch(1, frozenset({NEAR}))
    assert registry.holders_of_prefix(OTHER, hashes_of(5, 3)) == PrefixMatch()


@pytest.mark.parametrize(
    ("caches", "field"),
    [
        ((PrefixCacheAnnounce(model_id=MODEL, prefixes=(KeptPrefix(bytes(31), 1),)),), "prefix_caches"),
        ((PrefixCacheAnnounce(model_id=MODEL, prefixes=(KeptPrefix(bytes(32), 0),)),), "prefix_caches"),
        ((PrefixCacheAnnounce(model_id="a", prefixes=()),), "model_id"),
        ((PrefixCacheAnnounce(model_id=MODEL, prefixes=(KeptPrefix(bytes(32), 1),) * 65),), "prefixes"),
        ((PrefixCacheAnnounce(model_id=MODEL, prefixes=()),) * 9, "prefix_caches"),
    ],
    ids=["short hash", "no block", "no model", "too many", "too many models"],
)
def test_an_announcement_that_is_wrong_is_refused_by_its_field(
    caches: tuple[PrefixCacheAnnounce, ...], field: str
) -> None:
    with pytest.raises(BadMessage, match=field):
        decode_record(encode_record(NodeRecord(node_id=N, prefix_caches=caches)))


@given(st.lists(st.tuples(st.integers(0, 80), st.booleans()), max_size=12))
def test_what_is_told_fits_what_is_taken_and_is_of_whole_models(models: list[tuple[int, bool]]) -> None:
    kept, ready = {}, []
    for i, (n_kept, is_whole) in enumerate(models):
        model_id = f"{i:064x}"
        kept[model_id] = tuple(KeptPrefix(bytes([j]) * 32, 1) for j in range(n_kept))
        ranges = ((0, 4),) if is_whole else ((0, 2), (3, 4))
        ready.append(ShardAnnounce(model_id=model_id, name="m", n_layers=4, ranges=ranges))
    told = prefix_announcements(kept, ready)
    n_wanted = sum(1 for n_kept, is_whole in models if n_kept and is_whole)
    assert len(told) == min(8, n_wanted)
    assert sum(len(each.prefixes) for each in told) <= NODE_PREFIXES_MAX
    for each in told:
        assert models[int(each.model_id, 16)][1]
        assert each.prefixes == kept[each.model_id][: len(each.prefixes)] != ()
    assert decode_record(encode_record(NodeRecord(node_id=N, prefix_caches=told))).prefix_caches == told


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64), st.integers(0, 64)), max_size=300),
    st.lists(st.integers(0, 64), max_size=300),
)
def test_a_node_tells_no_more_ranges_than_others_read(
    models: list[tuple[int, int, int]], files: list[int]
) -> None:
    def pairs(n: int) -> tuple[tuple[int, int], ...]:
        return tuple((2 * each, 2 * each + 1) for each in range(n))

    ready = [
        ShardAnnounce(
            model_id=f"{i:064x}", name="m", n_layers=200, ranges=pairs(a), loading=pairs(b), pinned=pairs(c)
        )
        for i, (a, b, c) in enumerate(models)
    ]
    held = [
        FileAnnounce(model_id=f"{i:064x}", name="m", n_layers=200, layers=pairs(n))
        for i, n in enumerate(files)
    ]
    told, told_files = within_limits(ready, held)
    record = NodeRecord(node_id=N, models=told, files=told_files)
    assert decode_record(encode_record(record)) == record
    if sum(a + b + c for a, b, c in models[:256]) + sum(files[:256]) <= RECORD_RANGES_MAX:
        assert (told, told_files) == (tuple(ready[:256]), tuple(held[:256]))
