"""What events do to trust, that time heals, and that it outlives a restart."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import ConfigError
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.membership.peer_lists import PeerLists
from swarmllm.swarm.peers.store import FILE_NAME, PeerStore
from swarmllm.swarm.peers.trust import (
    EFFECTS,
    HALF_LIFE_S,
    KEPT_EVENTS,
    NEUTRAL,
    TrustBook,
    TrustEvent,
    after,
    drifted,
    may_connect,
    may_work,
)
from swarmllm.swarm.peers.trust_keeper import Trust, open_trust

from .conftest import DEADLINE_S

A, B, BARE, DAMAGED, FRIEND, LIAR, NEW, OLD, WHOLE = (
    node_id_named(name) for name in ("a", "b", "bare", "damaged", "friend", "liar", "new", "old", "whole")
)


GOOD = [event for event, effect in EFFECTS.items() if effect.rises]
BAD = [event for event, effect in EFFECTS.items() if effect.keeps < 1]
scores = st.floats(0, 1)


def test_every_event_has_one_effect() -> None:
    assert set(EFFECTS) == set(TrustEvent)
    assert not set(GOOD) & set(BAD)
    assert set(GOOD) | set(BAD) == set(TrustEvent)


@given(score=scores, event=st.sampled_from(list(TrustEvent)))
def test_a_score_stays_in_range_and_moves_the_way_of_the_event(score: float, event: TrustEvent) -> None:
    moved = after(score, event)
    assert 0 <= moved <= 1
    assert moved >= score if event in GOOD else moved <= score


@given(score=scores, elapsed_s=st.floats(0, 1e9), later_s=st.floats(0, 1e9))
def test_a_score_drifts_to_the_middle_and_never_past_it(
    score: float, elapsed_s: float, later_s: float
) -> None:
    now, later = drifted(score, elapsed_s), drifted(score, elapsed_s + later_s)
    assert abs(later - NEUTRAL) <= abs(now - NEUTRAL) <= abs(score - NEUTRAL)
    assert (now - NEUTRAL) * (score - NEUTRAL) >= 0
    assert drifted(score, HALF_LIFE_S) == pytest.approx((score + NEUTRAL) / 2)


def test_trust_is_lost_faster_than_it_is_earned() -> None:
    book = TrustBook()
    assert book.score("a", 0) == NEUTRAL
    for _ in range(100):
        book.note("a", TrustEvent.SERVED, 0)
    earned = book.score("a", 0)
    assert 0.75 < earned < 1
    book.note("a", TrustEvent.WRONG_BYTES, 0)
    assert book.score("a", 0) < NEUTRAL
    assert not may_work(book.note("a", TrustEvent.WRONG_BYTES, 0))


def test_one_lie_of_a_stranger_costs_it_its_work_until_time_has_passed() -> None:
    book = TrustBook()
    assert not may_work(book.note("a", TrustEvent.WRONG_BYTES, 0))
    assert may_work(book.score("a", HALF_LIFE_S))


@pytest.mark.parametrize("event", [TrustEvent.OVERSTATED, TrustEvent.DISPUTED])
@given(score=scores)
def test_where_an_honest_node_may_be_meant_only_merit_is_lost(event: TrustEvent, score: float) -> None:
    assert min(score, NEUTRAL) <= after(score, event) <= score
    assert after(1.0, event) < 1.0


def test_a_few_disconnections_are_no_reason() -> None:
    book = TrustBook()
    for _ in range(10):
        book.note("a", TrustEvent.LOST, 0)
    assert may_work(book.score("a", 0))


def test_one_burst_of_damage_counts_once() -> None:
    book = TrustBook()
    for n in range(10_000):
        score = book.note("a", TrustEvent.BROKE_PROTOCOL, n / 10_000)
        assert score == pytest.approx(book.score("a", n / 10_000), abs=1e-6)
    assert may_work(book.score("a", 1))
    assert book.explain("a", 1).counts == {"broke protocol": 10_000}
    assert len(book.explain("a", 1).recent) == 1


def test_going_on_with_it_costs_the_connection_for_a_while() -> None:
    book = TrustBook()
    for second in range(15):
        assert may_connect(book.score("a", second)) or second > 10
        book.note("a", TrustEvent.BROKE_PROTOCOL, second)
    assert not may_connect(book.score("a", 15))
    assert not may_connect(book.score("a", 3600))
    assert may_connect(book.score("a", 86_400))


def test_what_a_person_said_wins() -> None:
    book = TrustBook(PeerLists(allow=frozenset("a"), deny=frozenset("d")))
    for _ in range(5):
        book.note("a", TrustEvent.WRONG_BYTES, 0)
        book.note("d", TrustEvent.SERVED, 0)
    assert (book.score("a", 0), book.score("d", 0)) == (1, 0)
    assert book.explain("a", 0).listed == "allowed"
    assert (book.explain("d", 0).listed, book.explain("d", 0).may_work) == ("denied", False)
    with pytest.raises(ConfigError, match="both"):
        PeerLists.of(map(node_id_named, "ab"), map(node_id_named, "bc"), only_allowed=False)


@pytest.mark.parametrize(("allow", "deny", "field"), [("x", "", "network.allow"), ("", "x", "network.deny")])
def test_a_list_of_what_are_no_node_ids_is_refused_by_its_setting(allow: str, deny: str, field: str) -> None:
    with pytest.raises(ConfigError, match="not a node id") as refused:
        PeerLists.of(allow, deny, only_allowed=False)
    assert refused.value.field == field


def test_the_explanation_holds_the_newest_events_and_counts_all() -> None:
    book = TrustBook()
    for number in range(KEPT_EVENTS + 5):
        book.note("a", TrustEvent.SERVED, number, f"request {number}")
    explained = book.explain("a", KEPT_EVENTS + 5)
    assert explained.counts == {"served": KEPT_EVENTS + 5}
    assert [e.detail for e in explained.recent][:2] == ["request 24", "request 23"]
    assert len(explained.recent) == KEPT_EVENTS
    assert book.explain("stranger", 0).recent == ()


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(list(TrustEvent))), max_size=40))
def test_a_book_forgets_who_was_touched_longest_ago(events: list[tuple[str, TrustEvent]]) -> None:
    book = TrustBook(nodes_max=3)
    for now, (node_id, event) in enumerate(events):
        book.note(node_id, event, now)
    newest = list(dict.fromkeys(reversed([node_id for node_id, _ in events])))
    assert book.known() == set(newest[:3])


async def test_trust_outlives_a_restart(tmp_path: Path) -> None:
    async with open_trust(tmp_path) as trust:
        trust.note(LIAR, TrustEvent.WRONG_BYTES, "token_embd.weight")
        trust.note(FRIEND, TrustEvent.SERVED)
        before = {node_id: trust.explain(node_id) for node_id in (LIAR, FRIEND)}
    async with open_trust(tmp_path) as trust:
        assert trust.known() == {LIAR, FRIEND}
        assert not trust.may_work(LIAR)
        for node_id, explained in before.items():
            again = trust.explain(node_id)
            assert (again.counts, again.recent) == (explained.counts, explained.recent)
            assert again.score == pytest.approx(explained.score)


async def test_trust_is_saved_while_the_node_runs(tmp_path: Path) -> None:
    store = PeerStore(tmp_path)
    trust = Trust(store=store, clock=lambda: 0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trust.run, 0.01)
        trust.note(A, TrustEvent.FAILED)
        with trio.fail_after(DEADLINE_S):
            # A file, without an event.
            while not (saved := await trio.to_thread.run_sync(store.reputations)):  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert [node_id for node_id, _ in saved] == [A]
        nursery.cancel_scope.cancel()


def test_a_damaged_memory_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    assert PeerStore(tmp_path).reputations() == []
    assert (tmp_path / FILE_NAME).with_suffix(".damaged").exists()


@pytest.mark.parametrize("column", ["score", "at", "counts", "recent"])
def test_a_reputation_that_cannot_be_read_is_forgotten_and_no_other(tmp_path: Path, column: str) -> None:
    store, book = PeerStore(tmp_path), TrustBook()
    for node_id in (DAMAGED, WHOLE):
        book.note(node_id, TrustEvent.SERVED, 1.0)
    store.keep_reputations({n: known for n in book.known() if (known := book.reputation(n))})
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database, database:
        database.execute(f"UPDATE trust SET {column} = ? WHERE node_id = ?", (b"\xff", DAMAGED))
    assert [node_id for node_id, _ in PeerStore(tmp_path).reputations()] == [WHOLE]


def test_an_address_that_cannot_be_read_is_forgotten_and_no_other(tmp_path: Path) -> None:
    store = PeerStore(tmp_path)
    store.keep_peers("", [(DAMAGED, ["/ip4/192.0.2.1/tcp/1"]), (WHOLE, [])], 10)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database, database:
        database.execute("UPDATE peers SET addresses = ? WHERE node_id = ?", (b"\xff", DAMAGED))
    assert store.peers("", since=0) == [(WHOLE, ())]


def test_a_memory_that_is_damaged_further_in_is_set_aside_when_it_is_read(tmp_path: Path) -> None:
    store = PeerStore(tmp_path)
    store.keep_peers("", [(A, [])], 10)
    path = tmp_path / FILE_NAME
    page_bytes = 4096
    path.write_bytes(path.read_bytes()[:page_bytes] + b"\xff" * (path.stat().st_size - page_bytes))
    again = PeerStore(tmp_path)
    assert again.peers("", since=0) == []
    assert path.with_suffix(".damaged").exists()
    again.keep_peers("", [(B, [])], 10)
    assert again.peers("", since=0) == [(B, ())]


def test_peers_are_remembered_with_where_they_were(tmp_path: Path) -> None:
    store = PeerStore(tmp_path)
    store.keep_peers("", [(OLD, ["/ip4/192.0.2.1/tcp/1"])], 10)
    store.keep_peers("", [(NEW, ["/ip4/192.0.2.2/tcp/2", "/ip4/192.0.2.3/tcp/3"]), (BARE, [])], 20)
    assert store.peers("", since=5) == [
        (NEW, ("/ip4/192.0.2.2/tcp/2", "/ip4/192.0.2.3/tcp/3")),
        (BARE, ()),
        (OLD, ("/ip4/192.0.2.1/tcp/1",)),
    ]
    assert [node_id for node_id, _ in store.peers("", since=15)] == [NEW, BARE]
    assert store.peers("another network", since=5) == []


async def test_what_was_kept_is_read_once(tmp_path: Path) -> None:
    """Read again, it would take back what a node has earned since."""
    store = PeerStore(tmp_path)
    before = Trust(store=store, clock=lambda: 1.0)
    before.note(A, TrustEvent.BROKE_PROTOCOL, "test")
    await before.save()
    trust = Trust(store=store, clock=lambda: 1.0)
    await trust.load()
    kept = trust.score(A)
    trust.note(A, GOOD[0], "test")
    earned = trust.score(A)
    assert earned > kept
    await trust.load()
    assert trust.score(A) == earned
