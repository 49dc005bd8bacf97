"""What a share would come to, worked out from records: it is what the nodes then do, and who is left out."""

from __future__ import annotations

import msgspec
import pytest
from node_ids import A, B, C
from placing_members import ENTRY, LAYER_BYTES

from swarmllm.models import LayerRange, covers
from swarmllm.node.placing.plan import plan_of
from swarmllm.node.sharing.share_plan import SharePlan, plan_share
from swarmllm.node.sharing.sharing import no_room
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import (
    FileAnnounce,
    NodeCapability,
    NodeRecord,
    ObservedLatency,
    ObservedLink,
    ShardAnnounce,
)

MANIFEST = ENTRY.manifest


def member(
    node_id: NodeId, n_layers: int, *accepts: str, disk: int | None = None, decode_s: float = 0.001
) -> NodeRecord:
    latency = ObservedLatency(model_id=ENTRY.model_id, decode_s=decode_s, prefill_s=decode_s)
    capability = NodeCapability(
        placing_free_bytes=n_layers * LAYER_BYTES,
        observed_latencies=(latency,),
        accepts_shares_of=accepts,
    )
    if disk is not None:
        capability = msgspec.structs.replace(capability, placing_free_disk_bytes=disk * LAYER_BYTES)
    return NodeRecord(node_id=node_id, capability=capability)


def plan(*records: NodeRecord, own_layers: int = 4) -> SharePlan:
    """As A would see it, which has the file."""
    whole = FileAnnounce(model_id=ENTRY.model_id, name="m", n_layers=12, layers=((0, 12),))
    own = NodeRecord(node_id=A, files=(whole,))
    said = {record.node_id: record for record in (own, *records)}
    return plan_share(MANIFEST, A, said, None, (own_layers * LAYER_BYTES, 0))


def test_those_that_accept_take_part_within_their_room_and_fetch_what_they_lack() -> None:
    found = plan(member(B, 4, "members"), member(C, 5, A))
    layers = {part.node_id: part.layers for part in found.parts}
    assert found.is_complete
    assert covers([each for ranges in layers.values() for each in ranges], LayerRange(0, 12))
    assert {part.node_id: part.fetch_bytes == part.n_bytes for part in found.parts} == {
        A: False,
        B: True,
        C: True,
    }
    assert next(part for part in found.parts if part.node_id == A).fetch_bytes == 0
    assert found.tokens_per_s is not None
    # 12 layers of a millisecond each, and what the hops take besides.
    assert 1 < found.tokens_per_s < 1 / 0.012
    assert found.refusing == ()


@pytest.mark.parametrize("accepts", [(), (C,)])
def test_who_does_not_accept_is_named_and_given_nothing(accepts: tuple[str, ...]) -> None:
    found = plan(member(B, 12, *accepts))
    assert not found.is_complete
    assert found.refusing == (B,)
    assert [part.node_id for part in found.parts] == [A]
    assert found.tokens_per_s is None
    said = no_room("m", found)
    assert said.startswith("m takes 12.6 MB and the node that takes part has 4.2 MB left for it. More room:")
    assert "1 connected node does not accept what this one shares (auto_manage.accept" in said


def test_a_node_is_given_no_more_than_its_disk_takes() -> None:
    assert plan(member(B, 12, "members", disk=12), own_layers=0).is_complete
    short = plan(member(B, 12, "members", disk=11), own_layers=0)
    assert not short.is_complete
    # The memory would do, and the text must not say that 12.6 MB are less than 12.6 MB.
    assert "left for it, but not so that each layer fits" in no_room("m", short)


def test_the_transfer_takes_as_long_as_the_one_line_of_this_node_needs() -> None:
    links = (ObservedLink(node_id=A, rtt_s=0.001, bytes_per_s=float(LAYER_BYTES)),)

    def linked(record: NodeRecord) -> NodeRecord:
        capability = msgspec.structs.replace(record.capability, observed_links=links)
        return msgspec.structs.replace(record, capability=capability)

    found = plan(linked(member(B, 6, "members")), linked(member(C, 6, "members")), own_layers=0)
    assert found.is_transfer_measured
    assert found.transfer_s == pytest.approx(12.0)
    assert not plan(member(B, 12, "members"), own_layers=0).is_transfer_measured


def fetched(node_id: NodeId, *layers: tuple[int, int], decode_s: float, n_room: int = 12) -> NodeRecord:
    """It has fetched `layers`, and has memory and disk for `n_room` of them and of others."""
    n_left = n_room - sum(end - start for start, end in layers)
    said = member(node_id, n_room, "members", disk=n_left, decode_s=decode_s)
    files = FileAnnounce(model_id=ENTRY.model_id, name="m", n_layers=12, layers=layers)
    capability = msgspec.structs.replace(said.capability, placed_models=(ENTRY.model_id,))
    return msgspec.structs.replace(said, files=(files,), capability=capability)


def loading(record: NodeRecord, *layers: tuple[int, int]) -> NodeRecord:
    """It says so, and that they take of its memory."""
    room = record.capability.placing_free_bytes - sum(end - start for start, end in layers) * LAYER_BYTES
    capability = msgspec.structs.replace(record.capability, placing_free_bytes=room)
    models = (ShardAnnounce(model_id=ENTRY.model_id, name="m", n_layers=12, ranges=(), loading=layers),)
    return msgspec.structs.replace(record, models=models, capability=capability)


def test_who_has_fetched_a_part_for_itself_holds_that_though_speeds_have_changed() -> None:
    def targets(*layers: tuple[tuple[int, int], ...]) -> list[tuple[LayerRange, ...]]:
        nodes = [
            fetched(node, *held, decode_s=s)
            for node, held, s in zip((A, B), layers, (0.001, 0.004), strict=True)
        ]
        found = plan_of(MANIFEST, {record.node_id: record for record in nodes}, 1)
        return [found.targets[node_id] for node_id in (A, B)]

    assert targets(((0, 3),), ((3, 12),)) == [(LayerRange(0, 3),), (LayerRange(3, 12),)]
    # A file that is here whole says nothing of what is to be held.
    assert targets(((0, 12),), ()) == targets((), ())


def test_what_others_have_fetched_counts_also_while_the_first_one_loads() -> None:
    """Each has room for five layers. If C's four were forgotten as soon as B loads, the quick C would be
    asked for others too, which its disk could not take beside them."""
    nodes = (
        fetched(A, (8, 12), decode_s=0.004, n_room=5),
        loading(fetched(B, (0, 4), decode_s=0.004, n_room=5), (0, 2)),
        fetched(C, (4, 8), decode_s=0.001, n_room=5),
    )
    found = plan_of(MANIFEST, {record.node_id: record for record in nodes}, 1)
    assert [found.targets[node_id] for node_id in (A, B, C)] == [
        (LayerRange(8, 12),),
        (LayerRange(0, 4),),
        (LayerRange(4, 8),),
    ]
