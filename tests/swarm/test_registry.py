"""What a node makes of the records it hears."""

from __future__ import annotations

import pytest
import trio.testing

from swarmllm.models.layers import LayerRange
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.records.registry import Holder, Registry
from swarmllm.swarm.records.registry_feed import follow_router
from swarmllm_proto.codec import encode_record
from swarmllm_proto.errors import BadMessage, ProtocolError
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce

MODEL = "a" * 64
OTHER = "b" * 64


def announce(
    *ranges: tuple[int, int], model_id: str = MODEL, name: str = "guide", n_layers: int = 8
) -> ShardAnnounce:
    return ShardAnnounce(model_id=model_id, name=name, n_layers=n_layers, ranges=ranges)


def record(node_id: str, *models: ShardAnnounce) -> bytes:
    return encode_record(NodeRecord(node_id=node_id, models=models))


def test_holders_are_the_connected_nodes_and_oneself_in_order() -> None:
    registry = Registry("me")
    registry.apply("me", record("me", announce((4, 8))))
    registry.apply("near", record("near", announce((0, 4), (6, 8))))
    registry.apply("gone", record("gone", announce((0, 8))))
    registry.set_connected({"near"})
    assert registry.holders(MODEL) == [
        Holder(LayerRange(0, 4), "near"),
        Holder(LayerRange(4, 8), "me"),
        Holder(LayerRange(6, 8), "near"),
    ]
    registry.set_connected({"near", "gone"})
    assert Holder(LayerRange(0, 8), "gone") in registry.holders(MODEL)
    assert registry.holders(OTHER) == []


def test_what_a_node_offers_that_is_not_trusted_does_not_count() -> None:
    registry = Registry("me", lambda node_id: node_id == "friend")
    registry.set_connected({"friend", "liar"})
    for node_id in ("me", "friend", "liar"):
        registry.apply(node_id, record(node_id, announce((0, 8), name=node_id)))
    assert [holder.node_id for holder in registry.holders(MODEL)] == ["friend", "me"]
    assert registry.working_nodes().keys() == {"me", "friend"}
    assert registry.nodes().keys() == {"me", "friend", "liar"}


def test_a_newer_record_replaces_what_a_node_held() -> None:
    registry = Registry("me")
    registry.set_connected({"near"})
    registry.apply("near", record("near", announce((0, 4))))
    registry.apply("near", record("near", announce((4, 8), model_id=OTHER)))
    assert registry.holders(MODEL) == []
    assert registry.holders(OTHER) == [Holder(LayerRange(4, 8), "near")]
    registry.forget("near")
    assert registry.holders(OTHER) == []
    assert registry.node("near") is None


def test_an_unreadable_record_is_refused_and_the_last_good_one_stays() -> None:
    registry = Registry("me")
    registry.set_connected({"near"})
    registry.apply("near", record("near", announce((0, 4))))
    for content in (b"\xc1", b"", record("near", announce((0, 8)))[:-1]):
        with pytest.raises(ProtocolError):
            registry.apply("near", content)
    assert registry.holders(MODEL) == [Holder(LayerRange(0, 4), "near")]


def test_one_may_not_write_anothers_record() -> None:
    registry = Registry("me")
    with pytest.raises(BadMessage, match="may not write"):
        registry.apply("thief", record("victim", announce((0, 4))))
    assert registry.node("victim") is None


def test_models_are_named_by_most_holders_but_by_oneself_first() -> None:
    registry = Registry("me")
    registry.set_connected({"x", "y", "z"})
    registry.apply("x", record("x", announce((0, 4), name="guide")))
    registry.apply("y", record("y", announce((4, 8), name="guide")))
    registry.apply("z", record("z", announce((0, 12), name="liar", n_layers=12)))
    model = registry.models()[MODEL]
    assert (model.name, model.n_layers) == ("guide", 8)
    assert [holder.node_id for holder in model.holders] == ["x", "y"]
    registry.apply("me", record("me", announce((0, 4), name="mine")))
    assert registry.models()[MODEL].name == "mine"


async def test_the_registry_follows_its_router() -> None:
    async with InMemoryNetwork() as network:
        me, near = network.add("me"), network.add("near")
        await near.publish(record("near", announce((0, 4))))
        registry = Registry("me")
        await network.nursery.start(follow_router, registry, me)
        assert registry.holders(MODEL) == [Holder(LayerRange(0, 4), "near")]
        await near.publish(b"\xc1 unreadable")
        await near.publish(record("near", announce((0, 8))))
        await trio.testing.wait_all_tasks_blocked()
        assert registry.holders(MODEL) == [Holder(LayerRange(0, 8), "near")]
        network.kill("near")
        await trio.testing.wait_all_tasks_blocked()
        assert registry.holders(MODEL) == []
        assert registry.node("near") is not None
