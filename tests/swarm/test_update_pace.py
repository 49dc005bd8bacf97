"""When many nodes say something at once, what they say waits for a moment; one alone cannot slow it down."""

from __future__ import annotations

from swarmllm.swarm.records.update_pace import (
    COUNTS_AGAIN_S,
    MANY_WITHIN_S,
    MANY_WRITERS,
    UPDATES_WAIT_S,
    WRITERS_MAX,
    UpdatePace,
)

from .dht.swarm_of import contacts

WRITERS = [contact.node_id for contact in contacts(60, seed=5)]


def test_updates_of_many_nodes_wait_and_those_of_few_do_not() -> None:
    pace, rare_s = UpdatePace(), MANY_WITHIN_S / MANY_WRITERS * 1.5
    assert [pace.may_wait_s(who, at * rare_s) for at, who in enumerate(WRITERS)] == [0.0] * len(WRITERS)
    now = len(WRITERS) * rare_s + COUNTS_AGAIN_S
    waits_s = [pace.may_wait_s(who, now + at / 1000) for at, who in enumerate(WRITERS)]
    assert waits_s == sorted(waits_s)
    assert 1 <= waits_s.count(0.0) <= MANY_WRITERS
    assert set(waits_s) == {0.0, UPDATES_WAIT_S}
    assert pace.may_wait_s(WRITERS[0], now + 1.0) == UPDATES_WAIT_S, "it spoke just now, as did the others"
    assert pace.may_wait_s(WRITERS[0], now + 10 * MANY_WITHIN_S) == 0.0


def test_a_node_that_speaks_again_and_again_counts_once() -> None:
    pace = UpdatePace()
    said = [pace.may_wait_s(WRITERS[at % 3], at / 100) for at in range(1000)]
    assert said == [0.0] * 1000
    assert pace.may_wait_s(WRITERS[3], 9.999) == 0.0


def test_few_writers_are_remembered() -> None:
    pace = UpdatePace()
    for at, contact in enumerate(contacts(WRITERS_MAX + 50, seed=6)):
        pace.may_wait_s(contact.node_id, at / 1000)
    assert len(pace._counted) == WRITERS_MAX
    pace._counted.tidy(0.1 + COUNTS_AGAIN_S)
    assert 0 < len(pace._counted) < WRITERS_MAX
    pace._counted.tidy(10.0 + COUNTS_AGAIN_S)
    assert len(pace._counted) == 0
