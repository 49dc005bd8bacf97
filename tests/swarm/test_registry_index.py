"""The registry's index: it always says what counting everything anew would say, and costs no more than what
changed."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_trust import FakeTrust
from hypothesis import given, settings
from hypothesis import strategies as st
from node_ids import A, B, C, node_id_named

from swarmllm.models.layers import LayerRange
from swarmllm.swarm.peers.trust import TrustEvent, ignored_event
from swarmllm.swarm.records.model_index import NODE_MODELS_MAX, NODE_RANGES_MAX, Contradiction, ModelIndex
from swarmllm.swarm.records.registry import LISTED_MAX, Registry
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import MODEL_RANGES_MAX, FileAnnounce, NodeRecord, ShardAnnounce

ME, ZOE, LIAR = map(node_id_named, ("me", "zoe", "liar"))

NODES = [ME, A, B, C]
PEERS = [node_id_named(f"peer{number:03}") for number in range(256)]
IDS = ["a" * 64, "b" * 64, "aaaaaa" + "c" * 58]
NAMES = ["guide", "other"]


@st.composite
def records(draw: st.DrawFn) -> tuple[str, NodeRecord]:
    """Also a model twice in one record, and nodes that disagree about names and layers."""
    node_id = draw(st.sampled_from(NODES))
    pairs = st.tuples(st.integers(0, 3), st.integers(4, 8))
    models = [
        ShardAnnounce(
            model_id=draw(st.sampled_from(IDS)),
            name=draw(st.sampled_from(NAMES)),
            n_layers=draw(st.sampled_from([8, 9])),
            ranges=tuple(draw(st.lists(pairs, max_size=3))),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    files = [
        FileAnnounce(
            model_id=draw(st.sampled_from(IDS)),
            name=draw(st.sampled_from(NAMES)),
            n_layers=draw(st.sampled_from([8, 9])),
            layers=((0, 8),),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    nickname = draw(st.sampled_from(["", "nick"]))
    return node_id, NodeRecord(node_id=node_id, nickname=nickname, models=tuple(models), files=tuple(files))


Steps = list[tuple[str, object]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("record"), records()),
        st.tuples(st.just("forget"), st.sampled_from(NODES)),
        st.tuples(st.just("connect"), st.frozensets(st.sampled_from(NODES[1:]))),
        st.tuples(st.just("distrust"), st.frozensets(st.sampled_from(NODES[1:]))),
        st.tuples(st.just("read"), st.sampled_from(IDS)),
    ),
    max_size=25,
)


class Naive:
    """Keeps nothing but what it was told; works everything out anew."""

    def __init__(self) -> None:
        self.records: dict[str, NodeRecord] = {}
        self.connected: frozenset[str] = frozenset()
        self.distrusted: frozenset[str] = frozenset()

    def said(self, model_id: str) -> dict[str, tuple[ShardAnnounce | None, FileAnnounce | None]]:
        said: dict[str, tuple[ShardAnnounce | None, FileAnnounce | None]] = {}
        for node_id, record in self.records.items():
            if node_id != ME and (node_id not in self.connected or node_id in self.distrusted):
                continue
            ready = next((each for each in record.models if each.model_id == model_id), None)
            files = [each for each in record.files if each.model_id == model_id]
            if ready is not None:
                files = [each for each in files if each.n_layers == ready.n_layers]
            if ready or files:
                said[node_id] = ready, next(iter(files), None)
        if ME in said:
            own = layers_of(said[ME])
            said = {node_id: each for node_id, each in said.items() if layers_of(each) == own}
        return said

    def model(self, model_id: str) -> tuple[object, ...] | None:
        said = self.said(model_id)
        if not said:
            return None
        votes: Counter[tuple[str, int]] = Counter()
        for node_id, each in said.items():
            for name in {one.name for one in each if one is not None}:
                votes[name, layers_of(each)] += 1000 if node_id == ME else 1
        (name, n_layers), _ = min(votes.items(), key=lambda vote: (-vote[1], vote[0]))
        held = {
            node_id: {LayerRange(*pair) for pair in ready.ranges if pair[1] <= n_layers}
            for node_id, (ready, _) in said.items()
            if ready is not None
        }
        sources = sorted(node_id for node_id, (_, files) in said.items() if files and node_id != ME)
        return name, n_layers, {node_id: ranges for node_id, ranges in held.items() if ranges}, sources


def layers_of(said: tuple[ShardAnnounce | None, FileAnnounce | None]) -> int:
    first = said[0] or said[1]
    assert first is not None
    return first.n_layers


def shown(registry: Registry, model_id: str) -> tuple[object, ...] | None:
    model = registry.model(model_id)
    if model is None:
        return None
    held = {node_id: set(ranges) for node_id, ranges in model.held.items()}
    return model.name, model.n_layers, held, list(model.sources)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_the_index_says_what_counting_anew_would_say(steps: Steps) -> None:
    naive, registry = Naive(), Registry(ME, FakeTrust(lambda node_id: node_id not in naive.distrusted))
    for kind, what in steps:
        match kind, what:
            case "record", (str(node_id), NodeRecord() as record):
                naive.records[node_id] = record
                registry.apply(node_id, encode_record(record))
            case "forget", str(node_id):
                naive.records.pop(node_id, None)
                registry.forget(node_id)
            case "connect", frozenset() as node_ids:
                naive.connected = node_ids
                registry.set_reachable(node_ids)
            case "distrust", frozenset() as node_ids:
                naive.distrusted = node_ids
            case "read", str(model_id):
                # A read of one model in between must leave nothing stale behind.
                assert shown(registry, model_id) == naive.model(model_id)
    expected = {model_id: said for model_id in IDS if (said := naive.model(model_id)) is not None}
    assert {model_id: shown(registry, model_id) for model_id in registry.models()} == expected
    assert registry.n_models() == len(expected)
    for model_id in IDS:
        said = naive.said(model_id)
        files = {n: given for n, (_, given) in said.items() if given is not None and n != ME}
        assert registry.files(model_id) == files
        ready = {n: {LayerRange(*pair) for pair in held.ranges} for n, (held, _) in said.items() if held}
        found = {n: set(ranges) for n, ranges in registry.held(model_id).items()}
        assert found == {n: ranges for n, ranges in ready.items() if ranges}
        assert model_id not in expected or model_id in {each.model_id for each in registry.named(model_id)}
    for name in NAMES:
        called = {
            model_id
            for model_id in IDS
            if any(each.name == name for both in naive.said(model_id).values() for each in both if each)
        }
        assert called <= {each.model_id for each in registry.named(name)}
        given_so = {
            model_id
            for model_id in IDS
            if any(
                given is not None and given.name == name and node_id != ME
                for node_id, (_, given) in naive.said(model_id).items()
            )
        }
        assert registry.files_named(name).keys() == given_so
    alike = {m for m in IDS if m.startswith("aaaaaa") and registry.files(m)}
    assert registry.files_named("aaaaaa").keys() == alike


def a_model(number: int, *ranges: tuple[int, int]) -> ShardAnnounce:
    return ShardAnnounce(model_id=f"{number:064x}", name=f"m{number}", n_layers=8, ranges=ranges or ((0, 8),))


def flood(registry: Registry, n_peers: int, n_models: int = 256) -> None:
    names = PEERS[:n_peers]
    for number, name in enumerate(names):
        models = tuple(a_model(1000 * (number + 1) + each) for each in range(n_models))
        registry.apply(name, encode_record(NodeRecord(node_id=name, models=models)))
    registry.set_reachable([*registry.reachable(), *names])


def test_a_record_costs_what_differs_from_the_last_one() -> None:
    registry = Registry(ME)
    flood(registry, 32)
    before = registry._index.n_touched
    assert before == 32 * 256
    models = [a_model(1000 + each) for each in range(256)]
    registry.apply(PEERS[0], encode_record(NodeRecord(node_id=PEERS[0], models=tuple(models))))
    assert registry._index.n_touched == before
    version = registry.version
    models[7] = a_model(1007, (0, 4))
    registry.apply(PEERS[0], encode_record(NodeRecord(node_id=PEERS[0], models=tuple(models))))
    assert registry._index.n_touched == before + 2
    assert registry.version > version


def test_what_has_not_changed_is_not_worked_out_again() -> None:
    registry = Registry(ME)
    flood(registry, 2, 3)
    models = registry.models()
    load = NodeRecord(node_id=PEERS[0], sequence=2, models=tuple(a_model(1000 + each) for each in range(3)))
    registry.apply(PEERS[0], encode_record(load))
    again = registry.models()
    assert all(again[m] is models[m] for m in models)
    registry.apply(PEERS[1], encode_record(NodeRecord(node_id=PEERS[1], models=(a_model(2000, (0, 2)),))))
    again = registry.models()
    assert again.keys() == models.keys() - {f"{2001:064x}", f"{2002:064x}"}
    assert all(again[m] is models[m] for m in again if m != f"{2000:064x}")
    assert again[f"{2000:064x}"].holders[0].layers == LayerRange(0, 2)


def test_a_nickname_that_changed_makes_models_new() -> None:
    """Whoever shows holders by name keeps what he made of a model as long as it is the same."""
    registry = Registry(ME)
    flood(registry, 1, 1)
    before = registry.model(f"{1000:064x}")
    named = NodeRecord(node_id=PEERS[0], nickname="x", models=(a_model(1000),))
    registry.apply(PEERS[0], encode_record(named))
    assert registry.model(f"{1000:064x}") is not before


def test_strangers_cannot_push_others_models_out_of_the_list() -> None:
    registry = Registry(ME)
    own = tuple(a_model(each) for each in range(5))
    registry.apply(ME, encode_record(NodeRecord(node_id=ME, models=own)))
    honest = tuple(a_model(100 + each) for each in range(3))
    registry.apply(ZOE, encode_record(NodeRecord(node_id=ZOE, models=honest)))
    registry.set_reachable({ZOE})
    flood(registry, 32)
    listed = registry.models()
    assert len(listed) == LISTED_MAX
    assert {each.model_id for each in (*own, *honest)} <= listed.keys()
    assert registry.n_models() == 5 + 3 + 32 * 256
    assert registry.model(f"{1255:064x}") is not None
    assert len(registry.models(20)) == 20


def test_what_one_node_can_put_into_the_index_is_bounded() -> None:
    registry = Registry(ME)
    ranges = tuple((start, end) for start in range(20) for end in range(start + 1, 21))[:MODEL_RANGES_MAX]
    models = tuple(a_model(each) for each in range(200))
    wide = ShardAnnounce(model_id="f" * 64, name="wide", n_layers=20, ranges=ranges)
    files = tuple(FileAnnounce(model_id=f"{1000 + n:064x}", name="f", n_layers=8) for n in range(256))
    record = NodeRecord(node_id=A, models=(wide, *models), files=files)
    registry.apply(A, encode_record(record))
    registry.set_reachable({A})
    assert registry.n_models() == NODE_MODELS_MAX
    held = registry.held("f" * 64)[A]
    assert len(held) == NODE_RANGES_MAX
    assert LayerRange(0, 20) in held
    assert min(map(len, held)) >= max(
        end - start for start, end in ranges if LayerRange(start, end) not in held
    )


@pytest.mark.parametrize("own_first", [True, False])
def test_who_contradicts_what_a_model_id_fixes_is_ignored_and_blamed(own_first: bool) -> None:
    trust = FakeTrust()
    registry = Registry(ME, trust)
    registry.set_reachable({A, LIAR})
    own = NodeRecord(node_id=ME, files=(FileAnnounce(model_id=IDS[0], name="guide", n_layers=8),))
    honest = NodeRecord(node_id=A, models=(a_model(7), _guide(8)))
    liar = NodeRecord(node_id=LIAR, models=(a_model(7), _guide(1000)))
    for record in (own, honest, liar) if own_first else (honest, liar, own):
        registry.apply(record.node_id, encode_record(record))
    blamed = (LIAR, TrustEvent.BROKE_PROTOCOL, str(Contradiction(LIAR, IDS[0], 1000, 8)))
    assert trust.noted == [blamed]
    assert registry.held(IDS[0]).keys() == {A}
    model = registry.model(IDS[0])
    assert model is not None
    assert model.n_layers == 8
    # The same again is not news.
    liar = NodeRecord(node_id=LIAR, sequence=2, models=liar.models)
    registry.apply(LIAR, encode_record(liar))
    assert len(trust.noted) == 1


def _guide(n_layers: int) -> ShardAnnounce:
    return ShardAnnounce(model_id=IDS[0], name="guide", n_layers=n_layers, ranges=((0, 8),))


def test_other_ranges_and_another_order_are_news() -> None:
    registry = Registry(ME)
    registry.set_reachable({A, B})
    for node_id in (A, B):
        registry.apply(node_id, encode_record(NodeRecord(node_id=node_id, models=(a_model(1), a_model(2)))))
    assert set(registry.held(f"{1:064x}")[A]) == {LayerRange(0, 8)}
    registry.apply(A, encode_record(NodeRecord(node_id=A, models=(a_model(1, (0, 2)), a_model(2)))))
    assert set(registry.held(f"{1:064x}")[A]) == {LayerRange(0, 2)}
    assert registry.listed(1) == [f"{1:064x}"]
    registry.apply(A, encode_record(NodeRecord(node_id=A, models=(a_model(2), a_model(1, (0, 2))))))
    assert registry.listed(1) == [f"{2:064x}"]


def test_a_record_that_comes_again_after_another_one_counts_again() -> None:
    index = ModelIndex(ME, ignored_event)
    one, other = (NodeRecord(node_id=A, models=(a_model(number),)) for number in (1, 2))
    for record in (one, other, one):
        index.put(A, record)
        assert index.records() == {A: record}
        assert list(index.announcers(record.models[0].model_id)) == [A]
        assert len(index) == 1
    index.put(A, None)
    assert (len(index), index.records()) == (0, {})


def test_who_is_trusted_again_counts_at_the_next_read_of_its_model() -> None:
    distrusted = {A}
    registry = Registry(ME, FakeTrust(lambda node_id: node_id not in distrusted))
    registry.set_reachable({A})
    registry.apply(A, encode_record(NodeRecord(node_id=A, models=(a_model(1),))))
    assert registry.model(f"{1:064x}") is None
    distrusted.clear()
    assert registry.held(f"{1:064x}").keys() == {A}


def test_this_nodes_models_are_listed_first() -> None:
    registry = Registry(ME)
    own = tuple(a_model(each) for each in range(5))
    registry.apply(ME, encode_record(NodeRecord(node_id=ME, models=own)))
    flood(registry, 32)
    assert set(registry.listed(5)) == {each.model_id for each in own}
