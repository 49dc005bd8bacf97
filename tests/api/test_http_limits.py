"""The bookkeeping of places and bytes: never more than allowed, nothing lost, whoever comes and goes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.api.http.limits import (
    ClientByteBudget,
    ConnectionPlace,
    ConnectionPlaces,
    HttpLimits,
    client_of,
    is_loopback_client,
    limits_for,
)

CLIENTS = ["127.0.0.1", "192.0.2.1", "192.0.2.2", "2001:db8::/64"]


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1:2", "2001:db8::/64"),
        ("2001:db8::ffff", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("no address", "unknown"),
    ],
)
def test_an_address_is_a_client(address: str, client: str) -> None:
    assert client_of(address) == client


def test_loopback_clients() -> None:
    assert is_loopback_client("127.0.0.1")
    assert is_loopback_client("::1")
    assert not is_loopback_client("unknown")
    assert not is_loopback_client("192.0.2.1")


@pytest.mark.parametrize("max_body_bytes", [1024, 8 * 2**20, 2**30])
def test_two_of_the_largest_bodies_of_one_client_fit(max_body_bytes: int) -> None:
    limits = limits_for(max_body_bytes)
    assert limits.body_bytes == max_body_bytes
    assert limits.bodies_bytes == max(HttpLimits().bodies_bytes, 4 * max_body_bytes)
    assert limits.bodies_bytes_of_client == limits.bodies_bytes // 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans())))
def test_a_budget_holds_what_it_was_given_and_never_more(moves: list[tuple[str, int, bool]]) -> None:
    budget = ClientByteBudget(100, 70)
    held: Counter[str] = Counter()
    for client, n_bytes, is_taken in moves:
        if not is_taken:
            n_bytes = min(n_bytes, held[client])
            budget.give_back(client, n_bytes)
            held[client] -= n_bytes
            continue
        fits = sum(held.values()) + n_bytes <= 100 and held[client] + n_bytes <= 70
        assert budget.take(client, n_bytes) is fits
        held[client] += n_bytes if fits else 0
        assert budget.n_held == sum(held.values())


def test_a_client_has_its_requests_and_a_connection_without_one_gives_way() -> None:
    places: ConnectionPlaces[int] = ConnectionPlaces(
        HttpLimits(connections=1, connections_of_address=1, requests_of_client=2)
    )
    first = places.enter("192.0.2.1", 1).place
    assert first is not None
    assert [places.begin(first, "192.0.2.1") for _ in range(3)] == [True, True, False]
    assert places.enter("192.0.2.2", 2).place is None
    places.end(first, "192.0.2.1")
    assert [places.begin(first, "192.0.2.1") for _ in range(2)] == [True, False], "only what ended makes room"
    for _ in range(2):
        places.end(first, "192.0.2.1")
    assert places.enter("192.0.2.2", 2).evicted is first


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "begin", "end"]), st.integers(0, 9), st.sampled_from(CLIENTS)
        )
    )
)
def test_places_are_bounded_and_running_requests_keep_theirs(moves: list[tuple[str, int, str]]) -> None:
    limits = HttpLimits(connections=5, connections_of_address=2, requests_of_client=2)
    places: ConnectionPlaces[int] = ConnectionPlaces(limits)
    here: list[ConnectionPlace[int]] = []
    running: dict[ConnectionPlace[int], str] = {}
    for action, index, client in moves:
        chosen = here[index % len(here)] if here else None
        if action == "enter":
            decision = places.enter(client, index)
            if decision.evicted is not None:
                assert decision.evicted not in running
                here.remove(decision.evicted)
            if decision.place is not None:
                here.append(decision.place)
        elif chosen is None:
            continue
        elif action == "leave" and chosen not in running:
            places.leave(chosen)
            places.leave(chosen)
            here.remove(chosen)
        elif action == "begin" and chosen not in running:
            may = Counter(running.values())[client] < 2
            assert places.begin(chosen, client) is may
            if may:
                running[chosen] = client
        elif action == "end" and chosen in running:
            places.end(chosen, running.pop(chosen))
        assert set(places) == set(here)
        assert len(here) <= 5
        of = Counter(place.client for place in here if not is_loopback_client(place.client))
        assert max(of.values(), default=0) <= 2


def test_the_longest_waiting_of_the_most_numerous_gives_way() -> None:
    places: ConnectionPlaces[str] = ConnectionPlaces(HttpLimits(connections=4))
    crowd = [places.enter("192.0.2.1", f"crowd {i}").place for i in range(3)]
    alone = places.enter("192.0.2.2", "alone").place
    assert alone is not None
    decision = places.enter("192.0.2.3", "new")
    assert decision.evicted is crowd[0]
    assert decision.place is not None
    assert crowd[1] is not None
    # A request begins and ends: this connection waits for less long than the other now.
    places.begin(crowd[1], "key")
    places.end(crowd[1], "key")
    assert places.enter("192.0.2.4", "newer").evicted is crowd[2]
    assert len(places) == 4


def test_a_budget_is_used_to_its_last_byte_and_what_is_given_back_is_there_again() -> None:
    budget = ClientByteBudget(100, 70)
    assert budget.take("a", 70)
    assert not budget.take("a", 1)
    assert budget.take("b", 30)
    assert not budget.take("c", 1)
    budget.give_back("a", 20)
    assert not budget.take("b", 41)
    assert not budget.take("a", 21)
    assert budget.take("a", 20)
    assert budget.n_held == 100
    budget.give_back("a", 70)
    budget.give_back("b", 30)
    assert (budget.n_held, dict(budget._held)) == (0, {})


@pytest.mark.parametrize(("client", "n_max"), [("192.0.2.1", 3), ("127.0.0.1", 5)])
def test_an_address_has_all_its_places_and_this_machine_those_of_everybody(client: str, n_max: int) -> None:
    """Every one of them runs a request, so that none gives way."""
    limits = HttpLimits(connections=5, connections_of_address=3, requests_of_client=9)
    places: ConnectionPlaces[int] = ConnectionPlaces(limits)
    entered = []
    for n in range(6):
        place = places.enter(client, n).place
        if place is not None:
            assert places.begin(place, "key")
            entered.append(place)
    assert len(entered) == len(places) == n_max
    for place in entered:
        places.end(place, "key")
        places.leave(place)
    assert (len(places), dict(places._n_of), dict(places._running)) == (0, {}, {})
    assert places.enter(client, 9).evicted is None


def test_an_address_with_all_its_places_takes_its_own_and_no_place_of_others() -> None:
    places: ConnectionPlaces[str] = ConnectionPlaces(HttpLimits(connections=9, connections_of_address=2))
    places.enter("192.0.2.1", "the longest waiting of all")
    own = [places.enter("192.0.2.2", f"own {n}").place for n in range(2)]
    assert places.enter("192.0.2.2", "new").evicted is own[0]
    for place in (own[1], next(each for each in places if each.holder == "new")):
        assert place is not None
        assert places.begin(place, "key")
    assert places.enter("192.0.2.2", "newer").place is None, "both of its places are in use"
