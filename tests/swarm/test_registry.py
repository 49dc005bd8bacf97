"""What a node makes of the records it hears."""

from __future__ import annotations

import pytest
import trio.testing
from fake_trust import FakeTrust
from node_ids import X, Y, Z, node_id_named

from swarmllm.models.layers import LayerRange
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.records.registry import Holder, Registry, follow_router
from swarmllm_proto.codec import encode_record
from swarmllm_proto.errors import BadMessage, ProtocolError
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce

ME, NEAR, GONE, FRIEND, LIAR, THIEF, VICTIM = map(
    node_id_named, ("me", "near", "gone", "friend", "liar", "thief", "victim")
)

MODEL = "a" * 64
OTHER = "b" * 64


def announce(
    *ranges: tuple[int, int], model_id: str = MODEL, name: str = "guide", n_layers: int = 8
) -> ShardAnnounce:
    return ShardAnnounce(model_id=model_id, name=name, n_layers=n_layers, ranges=ranges)


def record(node_id: str, *models: ShardAnnounce) -> bytes:
    return encode_record(NodeRecord(node_id=node_id, models=models))


def test_holders_are_the_connected_nodes_and_oneself_in_order() -> None:
    registry = Registry(ME)
    registry.apply(ME, record(ME, announce((4, 8))))
    registry.apply(NEAR, record(NEAR, announce((0, 4), (6, 8))))
    registry.apply(GONE, record(GONE, announce((0, 8))))
    registry.set_reachable({NEAR})
    assert registry.holders(MODEL) == [
        Holder(LayerRange(0, 4), NEAR),
        Holder(LayerRange(4, 8), ME),
        Holder(LayerRange(6, 8), NEAR),
    ]
    registry.set_reachable({NEAR, GONE})
    assert Holder(LayerRange(0, 8), GONE) in registry.holders(MODEL)
    assert registry.holders(OTHER) == []


def test_what_a_node_offers_that_is_not_trusted_does_not_count() -> None:
    registry = Registry(ME, FakeTrust(lambda node_id: node_id == FRIEND))
    registry.set_reachable({FRIEND, LIAR})
    for node_id in (ME, FRIEND, LIAR):
        registry.apply(node_id, record(node_id, announce((0, 8), name=node_id)))
    assert [holder.node_id for holder in registry.holders(MODEL)] == [FRIEND, ME]
    assert registry.working_nodes().keys() == {ME, FRIEND}
    assert registry.nodes().keys() == {ME, FRIEND, LIAR}


def test_a_newer_record_replaces_what_a_node_held() -> None:
    registry = Registry(ME)
    registry.set_reachable({NEAR})
    registry.apply(NEAR, record(NEAR, announce((0, 4))))
    registry.apply(NEAR, record(NEAR, announce((4, 8), model_id=OTHER)))
    assert registry.holders(MODEL) == []
    assert registry.holders(OTHER) == [Holder(LayerRange(4, 8), NEAR)]
    registry.forget(NEAR)
    assert registry.holders(OTHER) == []
    assert registry.node(NEAR) is None


def test_an_unreadable_record_is_refused_and_the_last_good_one_stays() -> None:
    registry = Registry(ME)
    registry.set_reachable({NEAR})
    registry.apply(NEAR, record(NEAR, announce((0, 4))))
    for content in (b"\xc1", b"", record(NEAR, announce((0, 8)))[:-1]):
        with pytest.raises(ProtocolError):
            registry.apply(NEAR, content)
    assert registry.holders(MODEL) == [Holder(LayerRange(0, 4), NEAR)]


def test_one_may_not_write_anothers_record() -> None:
    registry = Registry(ME)
    with pytest.raises(BadMessage, match="may not write"):
        registry.apply(THIEF, record(VICTIM, announce((0, 4))))
    assert registry.node(VICTIM) is None


def test_models_are_named_by_most_holders_but_by_oneself_first() -> None:
    registry = Registry(ME)
    registry.set_reachable({X, Y, Z})
    registry.apply(X, record(X, announce((0, 4), name="guide")))
    registry.apply(Y, record(Y, announce((4, 8), name="guide")))
    registry.apply(Z, record(Z, announce((0, 12), name="liar", n_layers=12)))
    model = registry.models()[MODEL]
    assert (model.name, model.n_layers) == ("guide", 8)
    assert [holder.node_id for holder in model.holders] == [X, Y]
    registry.apply(ME, record(ME, announce((0, 4), name="mine")))
    assert registry.models()[MODEL].name == "mine"


async def test_the_registry_follows_its_router() -> None:
    async with InMemoryNetwork() as network:
        me, near = network.add(ME), network.add(NEAR)
        await near.publish(record(NEAR, announce((0, 4))))
        registry = Registry(ME)
        await network.nursery.start(follow_router, registry, me)
        assert registry.holders(MODEL) == [Holder(LayerRange(0, 4), NEAR)]
        await near.publish(b"\xc1 unreadable")
        await near.publish(record(NEAR, announce((0, 8))))
        await trio.testing.wait_all_tasks_blocked()
        assert registry.holders(MODEL) == [Holder(LayerRange(0, 8), NEAR)]
        network.kill(NEAR)
        await trio.testing.wait_all_tasks_blocked()
        assert registry.holders(MODEL) == []
        assert registry.node(NEAR) is not None
