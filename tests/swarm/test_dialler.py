"""Whom to dial and when."""

from __future__ import annotations

import itertools
import random

import pytest
import trio
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery import dialler as dialler_module
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import (
    ADDRESSES_PER_NODE,
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    CANDIDATES_MAX,
    DIALS_FIRST,
    DIALS_MAX,
    DOUBT_FIRST_S,
    DOUBT_MAX_S,
    EAGER_PEERS,
    EAGER_PEERS_SLOW,
    GATHER_FROM,
    GATHER_S,
    GATHER_UNHURRIED_S,
    HOLD_BACK_S,
    LET_GO_S,
    PEERS_MAX,
    QUICK_S,
    REDIAL_FULL_S,
    REDIAL_S,
    REDIAL_SHARE,
    SLOW_S,
    UNHURRIED_MAX_S,
    UNHURRIED_S,
    UNHURRIED_SHARE,
    DialCandidate,
    Dialler,
)
from swarmllm.swarm.peers.connection_limits import Standings
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId

HERE = [Address("192.0.2.1", 8810)]
THERE = [Address("192.0.2.2", 8810)]


def dialler() -> Dialler:
    return Dialler("me", random.Random(0))


def names(due: tuple[list[tuple[str, list[Address]]], float]) -> list[str]:
    return [node_id for node_id, _ in due[0]]


def test_the_smaller_id_dials_at_once_and_the_larger_holds_back() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    d.suggest("ann", HERE, now=0.0)
    ready, next_s = d.due(0.0, set())
    assert ready == [("zoe", HERE)]
    assert next_s == HOLD_BACK_S
    assert names(d.due(HOLD_BACK_S, set())) == ["ann"]


def test_oneself_and_the_connected_are_never_dialled() -> None:
    d = dialler()
    d.suggest("me", HERE, now=0.0)
    d.suggest("zoe", HERE, now=0.0)
    assert names(d.due(0.0, {"zoe"})) == []
    assert names(d.due(0.0, set())) == ["zoe"]


def test_a_failing_node_is_tried_ever_more_rarely_but_for_ever() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    now, waits = 0.0, []
    for _ in range(12):
        assert names(d.due(now, set())) == ["zoe"]
        assert names(d.due(now, set())) == []
        d.dialled("zoe", now, succeeded=False)
        _, next_s = d.due(now, set())
        waits.append(next_s - now)
        now = next_s
    assert waits[0] <= 2 * BACKOFF_FIRST_S
    assert all(BACKOFF_MAX_S / 2 <= wait <= BACKOFF_MAX_S for wait in waits[-4:])


def test_hearsay_is_given_up_after_some_failures_and_better_words_keep_it() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0, max_failures=2)
    d.suggest("zed", HERE, now=0.0, max_failures=2)
    d.suggest("zed", HERE, now=0.0, max_failures=3)
    for now in (0.0, 100.0):
        assert names(d.due(now, set())) == ["zoe", "zed"]
        d.dialled("zoe", now, succeeded=False)
        d.dialled("zed", now, succeeded=False)
    assert names(d.due(200.0, set())) == ["zed"]
    d.suggest("zoe", HERE, now=200.0, max_failures=2)
    assert names(d.due(200.0, set())) == ["zoe"]


def test_news_of_an_address_starts_the_back_off_afresh() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    for _ in range(8):
        d.due(1000.0, set())
        d.dialled("zoe", 1000.0, succeeded=False)
    d.suggest("zoe", HERE, now=1000.0)
    assert d.due(1000.0, set())[1] > 1000.0 + HOLD_BACK_S
    d.suggest("zoe", THERE, now=1000.0)
    assert d.due(1000.0 + HOLD_BACK_S, set())[0] == [("zoe", [*THERE, *HERE])]


def test_a_lost_node_is_sought_at_once_and_one_that_said_goodbye_later() -> None:
    for on_purpose in (False, True):
        d = dialler()
        d.suggest("zoe", HERE, now=0.0)
        d.due(0.0, set())
        d.dialled("zoe", 0.0, succeeded=True)
        d.lost("zoe", 100.0, on_purpose=on_purpose)
        _, next_s = d.due(100.0, set())
        assert (next_s - 100.0 > 1.0) is on_purpose


def test_a_lost_node_is_not_spoken_of_until_it_is_heard_of_or_connected() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    assert not d.is_lost("zoe", 0.0)
    d.lost("zoe", 100.0, on_purpose=False)
    assert d.is_lost("zoe", 99.0)
    assert d.is_lost("zoe", 100.0 + DOUBT_FIRST_S), "that may have been under way"
    assert not d.is_lost("zoe", 103.0)
    d.answered("zoe")
    assert not d.is_lost("zoe", 99.0)


def test_what_the_settings_name_is_never_given_up() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0, is_permanent=True)
    d.suggest("zac", HERE, now=0.0)
    d.forget("zoe")
    d.forget("zac")
    assert names(d.due(0.0, set())) == ["zoe"]


def test_dials_and_peers_are_bounded() -> None:
    d = dialler()
    for number in range(50):
        d.suggest(f"z{number}", HERE, now=0.0)
    first = names(d.due(0.0, set()))
    assert len(first) == DIALS_FIRST
    assert names(d.due(0.0, set())) == []
    full = {f"peer {number}" for number in range(PEERS_MAX)}
    d.dialled(first[0], 0.0, succeeded=True)
    assert names(d.due(100.0, full)) == []
    assert len(names(d.due(100.0, set()))) == 2


def dial_all_due(
    d: Dialler, now: float, took_s: float, *, succeeded: bool = True, unanswered: bool = False
) -> int:
    """How many dials were due at once; each is over after `took_s`."""
    due = names(d.due(now, set()))
    for node_id in due:
        d.dialled(node_id, now + took_s, succeeded=succeeded, unanswered=unanswered)
    return len(due)


def test_quick_dials_make_room_for_more_and_slow_ones_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EAGER_PEERS", "EAGER_PEERS_SLOW"):
        monkeypatch.setattr(dialler_module, name, DIALS_MAX)
    d = dialler()
    for number in range(200):
        d.suggest(f"z{number}", HERE, now=0.0)
    assert [dial_all_due(d, 0.0, QUICK_S) for _ in range(4)] == [
        DIALS_FIRST,
        2 * DIALS_FIRST,
        DIALS_MAX,
        DIALS_MAX,
    ]
    assert [dial_all_due(d, 0.0, SLOW_S) for _ in range(3)] == [DIALS_MAX, 1, 1]
    assert [dial_all_due(d, 0.0, QUICK_S) for _ in range(2)] == [1, 2]
    dial_all_due(d, 0.0, SLOW_S, succeeded=False)
    assert dial_all_due(d, 0.0, SLOW_S, succeeded=False, unanswered=True) == 4
    assert dial_all_due(d, 0.0, QUICK_S) == 1


async def test_running_it_dials_until_everybody_is_connected(autojump_clock: MockClock) -> None:
    d = Dialler("me", random.Random(0), peers_max=20)
    connected: set[str] = set()
    attempts: dict[str, int] = {}

    async def dial(node_id: str, addresses: list[Address]) -> None:
        attempts[node_id] = attempts.get(node_id, 0) + 1
        await trio.sleep(0.1)
        if attempts[node_id] < 4:
            raise NodeUnreachable("not yet")
        connected.add(node_id)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(d.run, dial, lambda: connected)
        await trio.sleep(1)
        for number in range(20):
            d.suggest(f"z{number}", HERE, trio.current_time())
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert connected == {f"z{number}" for number in range(20)}
    assert set(attempts.values()) == {4}


def test_strangers_on_every_place_do_not_keep_it_from_dialling_whom_it_knows() -> None:
    known = {"friend", "zed", "zoe"}

    standings = Standings(remembered=known)
    d = Dialler("me", random.Random(0), 2, standings)
    for node_id in ("zoe", "stranger", "zed"):
        d.suggest(node_id, HERE, now=0.0)
    assert names(d.due(HOLD_BACK_S, {"a", "b", "c"})) == ["zoe", "zed"]
    d = Dialler("me", random.Random(0), 2, standings)
    d.suggest("zoe", HERE, now=0.0)
    assert names(d.due(HOLD_BACK_S, {"a", "friend"})) == ["zoe"]
    d = Dialler("me", random.Random(0), 2, standings)
    d.suggest("zoe", HERE, now=0.0)
    assert names(d.due(HOLD_BACK_S, {"zed", "friend"})) == []


class Kept:
    """A dialler, and what it keeps of one node."""

    def __init__(self, node_id: str = "zoe", **suggested: object) -> None:
        self.candidates: Parts[DialCandidate] = Parts.alone()
        self.d = Dialler("me", random.Random(0), peers=self.candidates)
        self.node_id = node_id
        self.suggest(HERE, 0.0, **suggested)

    def suggest(self, addresses: list[Address], now: float, **how: object) -> None:
        self.d.suggest(self.node_id, addresses, now, **how)  # type: ignore[arg-type]

    def fail(self, now: float, n: int = 1) -> None:
        for _ in range(n):
            self.d.dialled(self.node_id, now, succeeded=False)

    @property
    def it(self) -> DialCandidate:
        found = self.candidates.get(self.node_id)
        assert found is not None
        return found


def test_the_newest_addresses_come_first_and_are_bounded() -> None:
    kept = Kept()
    kept.suggest([*THERE, *THERE, *HERE], 1.0)
    assert kept.it.addresses == [*THERE, *HERE]
    kept.suggest(HERE, 2.0)
    assert kept.it.addresses == [*HERE, *THERE]
    many = [Address("192.0.2.3", port) for port in range(1, ADDRESSES_PER_NODE)]
    kept.suggest(many, 3.0)
    assert kept.it.addresses == [*many, *HERE]


def test_known_addresses_are_no_reason_to_hurry_and_a_new_one_is_no_reason_to_wait() -> None:
    kept = Kept()
    kept.fail(0.0, 9)
    due_at_s = kept.it.due_at_s
    assert due_at_s > HOLD_BACK_S
    kept.suggest(HERE, 1.0)
    assert (kept.it.n_failures, kept.it.due_at_s) == (9, due_at_s)
    kept.suggest([*HERE, *THERE], 1.0)
    assert (kept.it.n_failures, kept.it.due_at_s) == (0, 1.0 + HOLD_BACK_S)
    kept.suggest([Address("192.0.2.9", 1)], 2.0)
    assert kept.it.due_at_s == 1.0 + HOLD_BACK_S


def test_the_longest_patience_counts_and_a_lasting_one_stays_lasting() -> None:
    kept = Kept(max_failures=3)
    kept.suggest(HERE, 0.0, max_failures=5)
    kept.suggest(HERE, 0.0, max_failures=2)
    kept.fail(0.0, 4)
    assert kept.it.n_failures == 4
    kept.fail(0.0)
    assert list(kept.candidates) == []
    kept = Kept(max_failures=1, is_permanent=True)
    kept.suggest(HERE, 0.0)
    kept.fail(0.0, 3)
    assert kept.it.n_failures == 3
    kept.d.forget("zoe")
    assert kept.it.is_permanent


def test_one_of_the_settings_is_dialled_at_once_and_first() -> None:
    d = dialler()
    for number in range(9):
        d.suggest(f"zoe{number}", HERE, now=0.0)
    d.suggest("ann", HERE, now=0.0, is_permanent=True)
    assert names(d.due(0.0, set()))[0] == "ann"


def test_names_are_bounded_but_for_those_of_the_settings() -> None:
    kept = Kept()
    for number in range(CANDIDATES_MAX):
        kept.d.suggest(f"z{number}", HERE, now=0.0)
    assert len(kept.candidates) == CANDIDATES_MAX
    kept.d.suggest("named", HERE, now=0.0, is_permanent=True)
    assert len(kept.candidates) == CANDIDATES_MAX + 1
    kept.suggest(THERE, 0.0)
    assert kept.it.addresses == [*THERE, *HERE], "who is known is spoken of"


@pytest.mark.parametrize(("on_purpose", "least_s"), [(False, 0.25), (True, 2.0)])
def test_a_lost_node_waits_for_as_long_as_after_so_many_failures(on_purpose: bool, least_s: float) -> None:
    waits_s = []
    for seed in range(50):
        d = Dialler("me", random.Random(seed))
        d.suggest("zoe", HERE, now=0.0)
        d.lost("zoe", 100.0, on_purpose=on_purpose)
        waits_s.append(d.due(100.0, set())[1] - 100.0)
    assert least_s <= min(waits_s) < 1.2 * least_s
    assert 1.8 * least_s < max(waits_s) <= 2 * least_s
    assert BACKOFF_FIRST_S == 0.5


def test_one_that_is_let_go_lives_and_is_left_alone_for_a_while() -> None:
    kept = Kept()
    kept.d.answered("zoe")
    kept.d.let_go("zoe", 10.0)
    assert kept.d.due(10.0, set()) == ([], 10.0 + LET_GO_S)
    assert kept.d.is_tried("zoe")
    assert kept.d.may_answer_from_s("zoe", 0.0) < 10.0
    assert names(kept.d.due(10.0 + LET_GO_S, set())) == ["zoe"]


def test_a_node_that_is_doubted_is_not_counted_on_for_a_moment_and_is_not_lost() -> None:
    kept = Kept()
    kept.d.answered("zoe")
    kept.d.doubt("zoe", 10.0)
    assert not kept.d.is_tried("zoe")
    assert not kept.d.is_lost("zoe", 0.0)
    assert kept.d.may_answer_from_s("zoe", 0.0) >= 10.0 + DOUBT_FIRST_S
    assert kept.d.may_answer_from_s("zoe", 0.0) < 10.1 + DOUBT_FIRST_S
    kept.fail(20.0, 40)
    assert kept.d.may_answer_from_s("zoe", 0.0) >= 20.0 + DOUBT_MAX_S
    assert kept.d.may_answer_from_s("zoe", 0.0) < 20.1 + DOUBT_MAX_S
    kept.d.dialled("zoe", 21.0, succeeded=True)
    assert kept.d.may_answer_from_s("zoe", 0.0) < 21.0


def test_of_a_stranger_nothing_is_known_and_nothing_is_kept() -> None:
    kept = Kept()
    d = kept.d
    for change in (d.let_go, d.doubt):
        change("nobody", 1.0)
    d.lost("nobody", 1.0, on_purpose=False)
    d.answered("nobody")
    d.forget("nobody")
    d.dialled("nobody", 1.0, succeeded=True)
    assert list(kept.candidates) == ["zoe"]
    assert not d.is_lost("nobody", 0.0)
    assert not d.is_tried("nobody")
    assert d.may_answer_from_s("nobody", 9.0) >= 9.0


async def test_who_wants_a_node_shares_its_dial_with_others_and_hears_how_it_ended() -> None:
    kept = Kept()
    kept.fail(0.0, 9)
    wanted = kept.d.want("zoe", 1.0)
    assert kept.d.want("zoe", 2.0) is wanted
    full = {f"peer {number}" for number in range(PEERS_MAX)}
    assert names(kept.d.due(1.0, full)) == ["zoe"]
    assert names(kept.d.due(1.0, full)) == [], "it is being dialled"
    kept.d.dialled("zoe", 1.5, succeeded=True)
    await wanted.within(1.0, "a test")
    assert names(kept.d.due(1.6, full)) == [], "nobody wants it any more"
    again = kept.d.want("zoe", 2.0)
    assert again is not wanted
    kept.d.due(2.0, full)
    kept.fail(2.5)
    with pytest.raises(NodeUnreachable, match="could not be reached"):
        await again.within(1.0, "a test")
    forgotten = kept.d.want("zoe", 3.0)
    kept.d.forget("zoe")
    with pytest.raises(NodeUnreachable):
        await forgotten.within(1.0, "a test")


def made_one_by_one(took_s: float, until_s: float) -> list[float]:
    """When each connection is begun of a node that knows many others, each of which takes so long."""
    d = Dialler("me", random.Random(0))
    for number in range(40):
        d.suggest(f"peer {number}", HERE, now=0.0)
    connected: set[NodeId] = set()
    begun_s: list[float] = []
    now = 10.0
    while now < until_s and len(connected) < PEERS_MAX:
        dialling, next_s = d.due(now, connected)
        for node_id, _ in dialling:
            d.dialled(node_id, now + took_s, succeeded=True)
            connected.add(NodeId(node_id))
            begun_s.append(now)
        now = now if dialling else min(next_s, now + 1.0)
    return begun_s


def pauses(begun_s: list[float]) -> list[float]:
    return [later - sooner for sooner, later in itertools.pairwise(begun_s[EAGER_PEERS:])]


def test_the_connections_beyond_those_that_gossip_needs_are_made_one_by_one() -> None:
    begun_s = made_one_by_one(0.0, 120.0)
    assert begun_s[:EAGER_PEERS] == [10.0] * EAGER_PEERS
    assert len(pauses(begun_s)) == PEERS_MAX - EAGER_PEERS - 1
    assert min(pauses(begun_s)) >= UNHURRIED_S / 2


def test_where_dials_are_slow_fewer_connections_are_made_at_once() -> None:
    d = Dialler("me", random.Random(0))
    for number in range(40):
        d.suggest(f"peer {number}", HERE, now=0.0)
    connected: set[NodeId] = set()
    for node_id in names(d.due(10.0, connected)):
        d.dialled(node_id, 10.0 + SLOW_S, succeeded=True)
        connected.add(NodeId(node_id))
    assert len(connected) == DIALS_FIRST == EAGER_PEERS_SLOW
    assert len(names(d.due(20.0, connected))) == 1, "the first of those that are made one by one"
    assert names(d.due(20.5, connected)) == []


def test_those_beyond_wait_for_longer_where_dials_are_slow() -> None:
    took_s = UNHURRIED_S
    slow = pauses(made_one_by_one(took_s, 900.0))
    assert len(slow) == PEERS_MAX - EAGER_PEERS - 1
    assert min(slow) >= UNHURRIED_SHARE * took_s / 2
    very_slow = pauses(made_one_by_one(10 * UNHURRIED_MAX_S, 3600.0))
    assert max(very_slow) <= 1.5 * UNHURRIED_MAX_S + 1.0


async def test_who_wants_a_node_need_not_wait_until_records_are_exchanged(autojump_clock: MockClock) -> None:
    kept = Kept()
    kept.d.suggest("zoe", HERE, now=0.0)
    wanted = kept.d.want("zoe", 1.0)
    assert names(kept.d.due(1.0, set())) == ["zoe"]
    kept.d.met("zoe")
    await wanted.within(1.0, "a test")
    assert names(kept.d.due(9.0, set())) == [], "it is being dialled until the dial is over"


def test_a_wanted_node_is_dialled_although_it_is_connected_and_waits_for_no_place() -> None:
    kept = Kept()
    for number in range(9):
        kept.d.suggest(f"z{number}", HERE, now=0.0)
    kept.d.want("zoe", 0.0)
    assert names(kept.d.due(0.0, {"zoe"}))[0] == "zoe"


def test_places_that_are_taken_or_being_taken_are_left_to_those() -> None:
    d = Dialler("me", random.Random(0), peers_max=3)
    for number in range(9):
        d.suggest(f"z{number}", HERE, now=0.0)
    assert len(names(d.due(0.0, {"a", "b"}))) == 1
    assert names(d.due(0.0, {"a", "b"})) == []
    assert len(names(d.due(0.0, {"a"}))) == 1


def test_the_earliest_of_those_that_are_not_due_says_when_to_ask_again() -> None:
    d = dialler()
    for number, now in enumerate((5.0, 2.0, 4.0)):
        d.suggest(f"a{number}", HERE, now)
    assert d.due(4.9, set()) == ([], 2.0 + HOLD_BACK_S)
    assert names(d.due(2.0 + HOLD_BACK_S, set())) == ["a1"]
    assert d.due(2.0 + HOLD_BACK_S, set()) == ([], 4.0 + HOLD_BACK_S)
    d.suggest("b", [], 0.0)
    assert d.due(4.0 + HOLD_BACK_S, {"a2"}) == ([], 5.0 + HOLD_BACK_S)


async def test_it_looks_again_now_and_then_though_nothing_is_said(autojump_clock: MockClock) -> None:
    connected = {"zoe"}
    dialled_at_s: list[float] = []

    async def dial(node_id: str, addresses: list[Address]) -> None:
        dialled_at_s.append(trio.current_time())
        connected.add(node_id)

    d = dialler()
    d.suggest("zoe", HERE, trio.current_time())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(d.run, dial, lambda: connected)
        await trio.sleep(0.1)
        began_s = trio.current_time() - 0.1
        connected.clear()
        await trio.sleep(2 * BACKOFF_MAX_S)
        nursery.cancel_scope.cancel()
    assert dialled_at_s == [pytest.approx(began_s + BACKOFF_MAX_S)]


@pytest.mark.parametrize("n_known", [GATHER_FROM - 2, GATHER_FROM])
@pytest.mark.parametrize(
    ("n_connected", "gather_s"), [(EAGER_PEERS - 1, GATHER_S), (EAGER_PEERS, GATHER_UNHURRIED_S)]
)
async def test_where_many_are_known_news_is_looked_at_together_unless_somebody_waits(
    autojump_clock: MockClock, n_known: int, n_connected: int, gather_s: float
) -> None:
    looked_at_s: list[float] = []
    dialled: list[str] = []

    def connected() -> set[NodeId]:
        looked_at_s.append(trio.current_time())
        return {NodeId(f"there {n}") for n in range(n_connected)}

    async def dial(node_id: str, addresses: list[Address]) -> None:
        dialled.append(node_id)

    d = Dialler(NodeId("me"), random.Random(0), peers_max=n_connected)
    for number in range(n_known):
        d.suggest(f"here {number}", HERE, trio.current_time())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(d.run, dial, connected)
        await trio.sleep(HOLD_BACK_S + 2 * gather_s)
        looked_at_s.clear()
        for _ in range(10):
            d.wake()
            await trio.sleep(gather_s / 20)
        n_looks = len(looked_at_s)
        await trio.sleep(2 * gather_s)
        assert len(looked_at_s) == (1 if n_known >= GATHER_FROM else 10)
        d.wake()
        await trio.sleep(gather_s / 20)
        d.want(NodeId("here 3"), trio.current_time())
        await trio.testing.wait_all_tasks_blocked()
        assert dialled == ["here 3"]
        nursery.cancel_scope.cancel()
    assert n_looks == (0 if n_known >= GATHER_FROM else 10)


def separated(n_lost: int) -> tuple[Dialler, set[NodeId]]:
    """All places are taken, and so many other nodes were lost at second 0."""
    d = Dialler(NodeId("me"), random.Random(0))
    connected = {NodeId(f"here {i}") for i in range(PEERS_MAX)}
    lost = [NodeId(f"lost {i}") for i in range(n_lost)]
    for node_id in (*connected, *lost, NodeId("never connected")):
        d.suggest(node_id, HERE, now=0.0)
    for node_id in lost:
        d.answered(node_id)
        d.lost(node_id, 0.0, on_purpose=False)
    return d, connected


def test_one_lost_node_at_a_time_is_sought_though_all_places_are_taken() -> None:
    """Else two parts of a swarm that were separated for a while would never meet again. Each is dialled once
    soon after it was lost: it may live."""
    n_lost = 20
    d, connected = separated(n_lost)
    sought: list[tuple[float, NodeId]] = []
    for now in range(1, 1500):
        for node_id in names(d.due(float(now), connected)):
            sought.append((float(now), NodeId(node_id)))
            d.dialled(NodeId(node_id), float(now), succeeded=False)
    assert all(node_id.startswith("lost") for _, node_id in sought)
    pauses = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(sought)]
    assert min(pauses) >= REDIAL_S / 2
    firsts = {node_id: at for at, node_id in reversed(sought)}
    assert len(firsts) == n_lost
    assert max(firsts.values()) <= n_lost * 1.5 * REDIAL_S + BACKOFF_MAX_S + REDIAL_FULL_S
    agains = [at for at, node_id in sought if at != firsts[node_id]]
    assert len(agains) > 10
    assert min(later - sooner for sooner, later in itertools.pairwise(agains)) >= REDIAL_FULL_S / 2
    assert max(later - sooner for sooner, later in itertools.pairwise(agains)) <= (
        1.5 * REDIAL_FULL_S + BACKOFF_MAX_S
    )


def test_lost_nodes_are_left_alone_once_they_are_connected_or_none_was_lost() -> None:
    d, connected = separated(1)
    (found,) = names(d.due(40.0, connected))
    d.dialled(NodeId(found), 40.0, succeeded=True)
    d.answered(NodeId(found))
    connected.add(NodeId(found))
    assert names(d.due(300.0, connected)) == []
    d.let_go(NodeId(found), 300.0)
    connected.remove(NodeId(found))
    assert names(d.due(600.0, connected)) == []


def with_one_lost(n_known: int, dial_took_s: float) -> Dialler:
    """So many other nodes are known, and one was lost at second 0, as a dial ended that took so long."""
    d = Dialler(NodeId("me"), random.Random(0))
    d.suggest(NodeId("slow"), HERE, now=-1000.0)
    assert names(d.due(-dial_took_s, set())) == ["slow"]
    d.dialled(NodeId("slow"), 0.0, succeeded=True)
    for node_id in ("lost", *(f"known {i}" for i in range(n_known))):
        d.suggest(NodeId(node_id), HERE, now=-100.0)
    d.answered(NodeId("lost"))
    d.lost(NodeId("lost"), 0.0, on_purpose=False)
    return d


def redials(d: Dialler, n_seconds: int) -> list[float]:
    """When the lost node was dialled, each time for nothing."""
    connected, found = {NodeId(f"here {i}") for i in range(EAGER_PEERS)}, []
    for now in range(1, n_seconds):
        for node_id in names(d.due(float(now), connected)):
            d.dialled(NodeId(node_id), float(now), succeeded=False)
            if node_id == "lost":
                found.append(float(now))
    return found


def test_a_lost_node_is_dialled_soon_though_many_others_are_known() -> None:
    """Its connection may have ended while it lives, and others hear of it once in two minutes."""
    found = redials(with_one_lost(500, 0.0), 300)
    assert found[0] <= 1.5 * REDIAL_S
    assert len(found) >= 300 / (1.5 * (BACKOFF_MAX_S + REDIAL_S))
    assert all(later - sooner >= REDIAL_S / 2 for sooner, later in itertools.pairwise(found))


def test_lost_nodes_are_dialled_one_after_the_other() -> None:
    d, connected = separated(20)
    for each in list(connected)[EAGER_PEERS:]:
        connected.remove(each)
    n_dialled = 0
    for now in range(1, 100):
        for node_id in names(d.due(float(now), connected)):
            n_dialled += node_id.startswith("lost")
            d.dialled(NodeId(node_id), float(now), succeeded=False)
    assert n_dialled <= 100 / (0.5 * REDIAL_S) + 100 / (0.5 * UNHURRIED_S)


def test_lost_nodes_that_answer_nothing_hold_one_dial_up_and_not_all() -> None:
    d = with_one_lost(500, 0.0)
    for name in ("lost 2", "lost 3"):
        d.suggest(NodeId(name), HERE, now=-100.0)
        d.answered(NodeId(name))
        d.lost(NodeId(name), 0.0, on_purpose=False)
    connected, n_lost, n_known = {NodeId(f"here {i}") for i in range(EAGER_PEERS)}, 0, 0
    for now in range(1, 60):
        for node_id in names(d.due(float(now), connected)):
            if node_id.startswith("lost"):
                n_lost += 1
            else:
                n_known += 1
                d.dialled(NodeId(node_id), float(now), succeeded=False)
    assert n_lost == 1
    assert n_known >= 60 / (1.5 * UNHURRIED_S) - 1


def test_one_that_is_drawn_by_lot_is_enough() -> None:
    d, connected = separated(20)
    connected.pop()
    assert len(names(d.due(60.0, connected))) == 1


def test_where_dials_are_slow_lost_nodes_are_dialled_more_rarely() -> None:
    took_s = 4.0
    found = redials(with_one_lost(500, took_s), 600)
    pauses = [later - sooner for sooner, later in itertools.pairwise(found)]
    assert min(pauses) >= 0.5 * REDIAL_SHARE * took_s


def test_a_very_slow_dial_does_not_leave_lost_nodes_alone_for_longer_than_a_full_node_does() -> None:
    found = redials(with_one_lost(500, 500.0), 1200)
    pauses = [later - sooner for sooner, later in itertools.pairwise(found)]
    assert len(pauses) > 10
    assert max(pauses) <= 1.5 * REDIAL_FULL_S + BACKOFF_MAX_S


@pytest.mark.parametrize("n_connected", [EAGER_PEERS, PEERS_MAX])
def test_it_is_asked_again_when_the_next_lost_node_may_be_dialled(n_connected: int) -> None:
    d, connected = separated(20)
    kept = set(sorted(connected)[:n_connected])
    now = 1.0
    for _ in range(30):
        ready, next_s = d.due(now, kept)
        for node_id in names((ready, next_s)):
            d.dialled(NodeId(node_id), now, succeeded=False)
        # The places that are free are filled, one by one, at moments of their own.
        assert now < next_s <= now + 1.5 * (REDIAL_S if n_connected < PEERS_MAX else REDIAL_FULL_S)
        now = next_s


def test_doubts_end_with_a_new_address_and_begin_anew_with_a_goodbye() -> None:
    d = dialler()
    d.suggest("zoe", HERE, now=0.0)
    for _ in range(5):
        d.dialled("zoe", 10.0, succeeded=False)
    assert d.may_answer_from_s("zoe", 10.0) > 10.0 + 2 * DOUBT_FIRST_S
    d.suggest("zoe", THERE, now=11.0)
    assert d.may_answer_from_s("zoe", 11.0) == 10.0 + DOUBT_FIRST_S
    d.answered("zoe")
    d.lost("zoe", 20.0, on_purpose=True)
    assert d.may_answer_from_s("zoe", 30.0) > 20.0 + 4 * DOUBT_FIRST_S, "heartbeats may still be under way"
