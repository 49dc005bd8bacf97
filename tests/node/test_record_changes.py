"""What of its load and speed a node tells, and whether in a record or by itself."""

from __future__ import annotations

import msgspec
import pytest

from swarmllm.node.announcing.capability import steady
from swarmllm.node.announcing.record_changes import SETTLED_S, RecordChanges
from swarmllm_proto.swarm import NetworkCoordinate, NodeCapability, ObservedLatency, ObservedLink

MODEL_ID = "a" * 64


def capability(decode_s: float = 0.001, rtt_s: float = 0.02, **counts: int) -> NodeCapability:
    return NodeCapability(
        observed_latencies=(ObservedLatency(model_id=MODEL_ID, decode_s=decode_s),),
        observed_links=(ObservedLink(node_id="b", rtt_s=rtt_s),),
        **counts,
    )


def in_step() -> RecordChanges:
    changes = RecordChanges()
    changes.record_published(capability())
    return changes


@pytest.mark.parametrize(
    ("new", "means"),
    [
        (capability(), "nothing"),
        (capability(free_kv_tokens=900), "nothing"),
        (capability(stage_requests=1), "load"),
        (capability(active_requests=1, free_kv_tokens=900), "load"),
        (capability(decode_s=0.01), "speeds"),
        (capability(decode_s=0.01, stage_requests=1), "speeds"),
        (capability(max_requests=4), "record"),
        (capability(decode_s=0.01, max_requests=4), "record"),
    ],
)
def test_load_alone_goes_without_a_record(new: NodeCapability, means: str) -> None:
    assert in_step().of_work(new) == means
    assert in_step().of_all(new, 1.0) == means


def test_where_a_node_is_goes_with_a_record_at_an_unhurried_look_only() -> None:
    moved = msgspec.structs.replace(
        capability(),
        coordinate=NetworkCoordinate(position_s=(0.1, 0.0, 0.0), height_s=0.001, error=0.1),
    )
    assert in_step().of_work(moved) == "nothing"
    assert in_step().of_all(moved, 1.0) == "record"
    assert in_step().of_work(capability(rtt_s=0.2)) == "nothing"
    assert in_step().of_all(capability(rtt_s=0.2), 1.0) == "links"
    assert in_step().of_all(capability(rtt_s=0.2, stage_requests=1), 1.0) == "links", "and the load"


def test_details_that_were_told_are_no_news_and_the_load_still_is() -> None:
    changes = in_step()
    new = capability(decode_s=0.01, rtt_s=0.2, stage_requests=1)
    changes.details_published(new)
    assert changes.of_all(new, 1.0) == "load"
    assert changes.of_all(capability(), 2.0) == "speeds"


def test_what_is_about_the_same_is_told_as_it_was() -> None:
    old = capability(decode_s=0.0010, rtt_s=0.020)
    assert steady(old, capability(decode_s=0.0011, rtt_s=0.021)) == old
    assert steady(old, capability(decode_s=0.0011, rtt_s=0.040)) == capability(rtt_s=0.040)
    assert steady(old, capability(decode_s=0.0020, rtt_s=0.021)) == capability(decode_s=0.0020)
    assert steady(old, capability(stage_requests=3)).stage_requests == 3


def test_what_has_been_told_is_no_news() -> None:
    changes = in_step()
    busy = capability(stage_requests=3, free_kv_tokens=70)
    changes.load_published(busy, 1.0)
    assert changes.of_work(busy) == "nothing"
    assert changes.told.free_kv_tokens == 70
    assert changes.of_work(capability()) == "load", "the record alone does not say so any more"


def test_a_load_that_stays_is_put_into_the_record() -> None:
    changes = in_step()
    busy = capability(stage_requests=3)
    changes.load_published(busy, 10.0)
    assert changes.of_all(busy, 9.0 + SETTLED_S) == "nothing"
    assert changes.of_all(capability(stage_requests=4), 10.0 + SETTLED_S) == "load"
    assert changes.of_all(busy, 10.0 + SETTLED_S) == "settled"
    changes.record_published(busy)
    assert changes.of_all(busy, 11.0 + SETTLED_S) == "nothing"


def test_a_load_that_is_again_what_the_record_says_is_not() -> None:
    changes = in_step()
    changes.load_published(capability(stage_requests=3), 10.0)
    changes.load_published(capability(), 11.0)
    assert changes.of_all(capability(), 12.0 + SETTLED_S) == "nothing"


def test_a_load_that_has_settled_is_told_once() -> None:
    """Where it is in no record that everybody hears."""
    changes, busy = in_step(), capability(stage_requests=3)
    changes.load_published(busy, 0.0)
    assert changes.of_all(busy, SETTLED_S) == "settled"
    changes.load_settled()
    assert changes.of_all(busy, 2 * SETTLED_S) == "nothing"
    changes.load_published(capability(), 3 * SETTLED_S)
    assert changes.of_all(capability(), 4 * SETTLED_S) == "settled"
