"""Untruths are drawn for every message type, well-formed ones and others, and the same for the same seed."""

from __future__ import annotations

import math

import msgspec
import pytest

from bench.lies import SEED, lie_of, router_lie_of
from bench.lying.message_types import INSIDE, TOLD, all_message_types, types_within
from bench.lying.swarm import guide_world
from bench.lying.untruths import ADDRESSES, HONEST, OWN, drawn, encoded, filled, wire_values
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm_proto import swarm as messages
from swarmllm_proto.swarm import ObservedLatency


def test_lies_are_told_of_every_message_type() -> None:
    told = {each for kind in TOLD for each in types_within(kind)}
    assert all_message_types() - told - INSIDE == set()


def test_a_message_type_that_nobody_tells_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class News(msgspec.Struct):
        node_id: str

    News.__module__ = messages.__name__
    monkeypatch.setattr(messages, "News", News, raising=False)
    assert News in all_message_types()


@pytest.mark.parametrize("kind", TOLD, ids=lambda kind: kind.__name__)
def test_most_untruths_are_well_formed_and_some_are_not(kind: type) -> None:
    names = {OWN: node_id_named("self")}
    names |= {name: node_id_named(f"honest{n}") for n, name in enumerate(HONEST)}
    names |= {address: f"/ip4/192.0.2.{n + 1}/tcp/4001" for n, address in enumerate(ADDRESSES)}
    n_read, n_refused = 0, 0
    for batch in range(16):
        for value in drawn(wire_values(kind, guide_world()), SEED + batch, 60):
            try:
                msgspec.msgpack.decode(encoded(filled(value, names)), type=kind)
                n_read += 1
            except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
                n_refused += 1
        if n_read > 10 and n_refused:
            break
    assert n_read > 10
    assert n_refused > 0


def test_numbers_stand_at_their_limits_and_beyond() -> None:
    seen = {
        value.get("decode_s")
        for value in drawn(wire_values(ObservedLatency, guide_world()), SEED, 400)
        if isinstance(value, dict) and isinstance(value.get("decode_s"), float)
    }
    assert {0.0, 1e9, 1e-300} <= seen
    assert any(math.isnan(each) or math.isinf(each) for each in seen)


def test_a_lie_is_the_same_whenever_it_is_told() -> None:
    first = (repr(lie_of(SEED, 17)), repr(router_lie_of(SEED, 17)))
    for other in (40, 50):  # as many batches as are remembered
        lie_of(SEED, other)
        router_lie_of(SEED, other)
    assert first == (repr(lie_of(SEED, 17)), repr(router_lie_of(SEED, 17)))
    assert first != (repr(lie_of(SEED + 1, 17)), repr(router_lie_of(SEED + 1, 17)))
