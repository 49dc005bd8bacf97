"""Who keeps a place where there are too many: rules, and waves of strangers."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.membership.peer_lists import PeerLists
from swarmllm.swarm.peers.connection_limits import (
    ADMIT_ALL,
    Candidate,
    Standing,
    Standings,
    network_of,
    who_gives_way,
    who_makes_room,
)
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm_proto.identifiers import NodeId

NETWORKS = st.sampled_from(["", "a", "b", "c"])
GUESTS = st.lists(
    st.builds(Candidate, st.just(""), st.sampled_from(Standing), NETWORKS, st.integers(1, 3)), min_size=1
)


def numbered(guests: list[Candidate]) -> list[Candidate]:
    return [Candidate(str(i), g.standing, g.network, g.n_connections) for i, g in enumerate(guests)]


@given(GUESTS)
def test_nobody_goes_while_one_is_there_of_whom_less_is_known(guests: list[Candidate]) -> None:
    here = numbered(guests)
    gone = here[int(who_gives_way(here))]
    assert gone.standing == min(each.standing for each in here)


@given(GUESTS, NETWORKS)
def test_strangers_of_one_network_do_not_push_out_those_of_a_smaller_one(
    guests: list[Candidate], attackers: str
) -> None:
    """As long as there is one of theirs."""
    strangers = [
        Candidate(g.node_id, Standing.STRANGER, g.network, g.n_connections) for g in numbered(guests)
    ]
    of_each = {n: sum(g.n_connections for g in strangers if g.network == n) for n in ["", "a", "b", "c"]}
    wave = [Candidate(f"name {i}", Standing.STRANGER, attackers) for i in range(max(of_each.values()) + 1)]
    # The newest of them all, so not even those who were there from their network go.
    assert who_gives_way([*strangers, *wave]) == wave[-1].node_id


def test_a_flood_of_names_keeps_neither_members_nor_newcomers_out() -> None:
    n_places = 30
    honest = [Candidate(f"honest {i}", Standing.STRANGER, f"home {i}") for i in range(10)]
    friends = [Candidate(f"friend {i}", Standing.PROVEN, "net 0") for i in range(5)]
    here, names = [*honest[:5], *friends[:2]], count()

    def come(guest: Candidate) -> None:
        here.append(guest)
        if len(here) > n_places:
            gone = who_gives_way(here)
            here[:] = [each for each in here if each.node_id != gone]

    for turn in range(2000):
        come(Candidate(f"name {next(names)}", Standing.STRANGER, f"net {turn % 3}"))
        if turn == 1000:
            for late in (*honest[5:], *friends[2:]):
                come(late)
    assert {g.node_id for g in here} >= {g.node_id for g in (*honest, *friends)}
    assert len(here) == n_places


def test_without_a_network_who_has_most_gives_way_and_the_modest_stay() -> None:
    n_of_each = {"modest": 2, "greedy": 6, "idle": 0}
    assert who_makes_room(n_of_each, "new", 9, ADMIT_ALL.standing) is None
    assert who_makes_room(n_of_each, "new", 8, ADMIT_ALL.standing) == "greedy"
    assert who_makes_room(n_of_each, "greedy", 8, ADMIT_ALL.standing) == "greedy"
    passing = {"idle": Standing.PASSING, "modest": Standing.PASSING}
    assert who_makes_room(n_of_each, "new", 8, lambda n: passing.get(n, Standing.STRANGER)) == "modest"
    known = {"greedy": Standing.NAMED, "modest": Standing.REMEMBERED}
    assert who_makes_room(n_of_each, "new", 8, lambda n: known.get(n, Standing.STRANGER)) == "new"


def test_who_is_denied_is_not_let_in_whatever_it_has_earned() -> None:
    denied, other = node_id_named("denied"), node_id_named("other")
    standings = Standings(lists=PeerLists(deny=frozenset({denied})))
    assert [standings.lets_in(each) for each in (denied, other)] == [False, True]


def test_what_is_known_of_a_node() -> None:
    trust = Trust()
    for each in ("a", "b"):
        trust.note(NodeId(each), TrustEvent.SERVED)
    standings = Standings({"a"}, {"a", "b", "c"}, trust)
    assert [standings.standing(NodeId(each)) for each in "abcd"] == [
        Standing.NAMED,
        Standing.PROVEN,
        Standing.REMEMBERED,
        Standing.STRANGER,
    ]


@pytest.mark.parametrize(
    ("ip", "network"),
    [
        ("8.8.8.8", "8.8.8.0/24"),
        ("::ffff:8.8.8.8", "8.8.8.0/24"),
        ("2a00:1450:4001:82a::200e", "2a00:1450:4001::/48"),
        ("127.0.0.1", "127.0.0.1"),
        ("192.168.1.7", "192.168.1.7"),
        ("fe80::1%eth0", "fe80::1"),
        ("fd00::7", "fd00::7"),
        ("", ""),
    ],
)
def test_networks_are_those_of_the_internet_and_neighbours_stand_for_themselves(
    ip: str, network: str
) -> None:
    assert network_of(ip) == network
