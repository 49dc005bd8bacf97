"""Routing table, providers and lookups: bounded whatever comes, and right where it matters."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.messages import (
    Contact,
    DhtMessageKind,
    Message,
    name_key,
    node_key,
    node_place,
    place,
)
from swarmllm.swarm.discovery.dht.serving import DhtCore, DhtNode
from swarmllm.swarm.discovery.dht.table import (
    ASKED_MAX,
    BUCKET_SIZE,
    CONTACTS_MAX,
    EXPIRY_S,
    KEYS_MAX,
    KEYS_PER_NODE,
    N_CLOSEST,
    PARALLEL,
    PROVIDERS_PER_KEY,
    STALE_S,
    Lookup,
    ProviderBook,
    RoutingTable,
)
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import NodeId

from .swarm_of import HERE, contacts

ME = contacts(1, seed=99)[0].node_id
KEY = name_key("guide")


def test_the_table_finds_what_is_nearest_of_all_it_holds() -> None:
    table = RoutingTable(ME)
    held = [contact for contact in contacts(500) if table.answered(contact, 0.0)]
    assert len(table) == len(held)
    by_distance = sorted(held, key=lambda contact: node_place(contact.node_id) ^ place(KEY))
    assert table.closest(place(KEY)) == by_distance[:BUCKET_SIZE]


def test_the_table_holds_as_many_far_nodes_as_near_ones() -> None:
    table = RoutingTable(ME)
    held = [contact for contact in contacts(3000) if table.answered(contact, 0.0)]
    shared = Counter(256 - (node_place(each.node_id) ^ node_place(ME)).bit_length() for each in held)
    assert [shared[n_bits] for n_bits in range(5)] == [BUCKET_SIZE] * 5


def test_newcomers_push_nobody_out_until_one_falls_silent() -> None:
    table = RoutingTable(ME)
    everybody = contacts(3000)
    first = [contact for contact in everybody if table.answered(contact, 0.0)]
    assert BUCKET_SIZE < len(first) < CONTACTS_MAX
    for contact in contacts(3000, seed=1):
        table.answered(contact, STALE_S / 2)
    assert all(contact.node_id in table for contact in first)
    late = next(c for c in everybody if c.node_id not in table)
    assert table.answered(late, STALE_S)
    assert sum(contact.node_id not in table for contact in first) == 1


def test_a_node_that_fails_is_forgotten_and_this_one_is_never_in() -> None:
    table = RoutingTable(ME)
    (other,) = contacts(1)
    assert not table.answered(Contact(ME, HERE), 0.0)
    assert table.answered(other, 0.0)
    table.failed(other.node_id)
    table.failed("never there")
    assert len(table) == 0


def test_addresses_once_known_are_kept_and_renewed() -> None:
    table = RoutingTable(ME)
    (other,) = contacts(1)
    elsewhere = Contact(other.node_id, (Address("192.0.2.9", 1),))
    table.answered(other, 0.0)
    table.answered(Contact(other.node_id), 1.0)
    assert table.closest(0) == [other]
    table.answered(elsewhere, 2.0)
    assert table.closest(0) == [elsewhere]


def test_providers_expire_unless_they_say_it_again() -> None:
    book = ProviderBook()
    one, other = contacts(2)
    assert book.add(KEY, one, 0.0)
    assert book.add(KEY, other, 0.0)
    assert book.add(KEY, one, EXPIRY_S / 2)
    assert book.find(KEY, EXPIRY_S / 2) == [one, other]
    assert book.find(KEY, EXPIRY_S) == [one]
    book.expire(EXPIRY_S)
    assert len(book) == 1
    book.expire(2 * EXPIRY_S)
    assert len(book) == 0
    assert repr(book) == "<ProviderBook 0 keys>"


def test_a_node_of_which_everything_was_forgotten_may_provide_again() -> None:
    peers: Parts[int] = Parts.alone()
    book = ProviderBook(peers)
    (one,) = contacts(1)
    book.add(KEY, one, 0.0)
    peers.drop(one.node_id)
    book.expire(EXPIRY_S)
    assert peers.get(one.node_id) is None
    assert len(book) == 0


def test_neither_one_node_nor_one_key_nor_all_together_fill_the_book() -> None:
    book = ProviderBook()
    source = random.Random(0)
    one, *others = contacts(PROVIDERS_PER_KEY + 20)
    assert sum(book.add(source.randbytes(34), one, 0.0) for _ in range(KEYS_PER_NODE + 50)) == KEYS_PER_NODE
    assert sum(book.add(KEY, other, 0.0) for other in others) == PROVIDERS_PER_KEY
    for other in contacts(60, seed=2):
        for _ in range(KEYS_PER_NODE):
            book.add(source.randbytes(34), other, 0.0)
    assert repr(book) == f"<ProviderBook {KEYS_MAX} keys>"
    assert book.find(KEY, 0.0)[0] in others


class Known(DhtNode):
    """A node that knows where these are."""

    def __init__(self, addresses: Mapping[str, tuple[Address, ...]]) -> None:
        self._addresses = addresses

    def addresses_of(self, node_id: NodeId) -> tuple[Address, ...]:
        return self._addresses.get(node_id, ())


class Web:
    """Nodes that each know the nearest to themselves, and answer."""

    def __init__(self, n: int) -> None:
        self.nodes = contacts(n)
        self.cores: dict[str, DhtCore] = {}
        for contact in self.nodes:
            core = DhtCore(contact.node_id, Known(dict.fromkeys((each.node_id for each in self.nodes), HERE)))
            for other in self.nodes:
                core.table.answered(other, 0.0)
            self.cores[contact.node_id] = core

    def search(self, start: Contact, message: Message, dead: set[str] = frozenset()) -> Lookup:  # type: ignore[assignment]
        lookup = Lookup(place(message.key), ME, [start])
        while not lookup.is_over:
            asked = list(iter(lookup.next, None))
            assert 0 < len(asked) <= PARALLEL
            for contact in asked:
                if contact.node_id in dead:
                    lookup.failed(contact.node_id)
                    continue
                answer = self.cores[contact.node_id].answer(ME, message, 0.0)
                assert answer is not None
                lookup.answered(contact.node_id, answer.closer)
        return lookup


@pytest.mark.slow
def test_a_lookup_finds_the_nearest_of_three_hundred_from_any_start() -> None:
    web = Web(300)
    nearest = sorted(web.nodes, key=lambda contact: node_place(contact.node_id) ^ place(KEY))
    for start in web.nodes[:5]:
        found = web.search(start, Message(DhtMessageKind.FIND_NODE, KEY))
        assert set(found.closest()[:5]) == set(nearest[:5])
        assert found.n_asked <= ASKED_MAX
    dead = {contact.node_id for contact in nearest[:5]}
    found = web.search(web.nodes[0], Message(DhtMessageKind.FIND_NODE, KEY), dead)
    assert found.closest()[0] == nearest[5]


def test_answers_full_of_invented_nodes_end_a_lookup_all_the_same() -> None:
    source = random.Random(3)
    lookup = Lookup(place(KEY), ME, contacts(1))
    n_asked = 0
    while not lookup.is_over:
        for contact in list(iter(lookup.next, None)):
            n_asked += 1
            lookup.answered(contact.node_id, contacts(100, seed=source.randrange(2**32)))
    assert N_CLOSEST <= n_asked <= ASKED_MAX


def test_a_lookup_asks_neither_itself_nor_anybody_twice() -> None:
    (one,) = contacts(1)
    lookup = Lookup(place(KEY), ME, [one, Contact(ME, HERE)])
    assert lookup.next() == one
    assert lookup.next() is None
    assert not lookup.is_over
    lookup.failed(one.node_id)
    assert lookup.is_over
    lookup = Lookup(place(KEY), ME, [one])
    lookup.next()
    lookup.answered(one.node_id, [one, Contact(ME, HERE)])
    assert lookup.is_over
    assert lookup.closest() == [one]


def core(*others: Contact) -> DhtCore:
    made = DhtCore(ME, Known({ME: HERE}))
    for other in others:
        made.table.answered(other, 0.0)
    return made


def test_a_node_speaks_for_itself_alone() -> None:
    asker, liar, victim = contacts(3)
    it = core()
    statement = Message(DhtMessageKind.ADD_PROVIDER, KEY, providers=(liar, victim))
    assert it.answer(liar.node_id, statement, 0.0) is None
    answer = it.answer(asker.node_id, Message(DhtMessageKind.GET_PROVIDERS, KEY), 0.0)
    assert answer is not None
    assert answer.providers == (liar,)


def test_it_tells_what_it_has_itself_and_never_the_asker_of_itself() -> None:
    asker, other = contacts(2)
    it = core(asker, other)
    it.provided = {KEY}
    it.answer(asker.node_id, Message(DhtMessageKind.ADD_PROVIDER, KEY, providers=(asker,)), 0.0)
    answer = it.answer(asker.node_id, Message(DhtMessageKind.GET_PROVIDERS, KEY), 0.0)
    assert answer == Message(DhtMessageKind.GET_PROVIDERS, KEY, (other,), (Contact(ME, HERE),))
    nodes = it.answer(asker.node_id, Message(DhtMessageKind.FIND_NODE, node_key(other.node_id)), 0.0)
    assert nodes is not None
    assert nodes.closer == (other,)


def test_signed_addresses_win_over_hearsay() -> None:
    (other,) = contacts(1)
    signed = (Address("198.51.100.1", 8810),)
    it = DhtCore(ME, Known({other.node_id: signed}))
    it.answer(other.node_id, Message(DhtMessageKind.ADD_PROVIDER, KEY, providers=(other,)), 0.0)
    assert it.providers.find(KEY, 0.0) == [Contact(other.node_id, signed)]


@pytest.mark.parametrize(
    "kind",
    [
        DhtMessageKind.FIND_NODE,
        DhtMessageKind.GET_PROVIDERS,
        DhtMessageKind.ADD_PROVIDER,
        DhtMessageKind.GET_VALUE,
    ],
)
def test_a_question_about_nothing_is_refused(kind: DhtMessageKind) -> None:
    with pytest.raises(BadMessage):
        core().answer(contacts(1)[0].node_id, Message(kind), 0.0)


def test_values_are_not_kept() -> None:
    it, asker = core(), contacts(1)[0].node_id
    with pytest.raises(BadMessage):
        it.answer(asker, Message(DhtMessageKind.PUT_VALUE, KEY), 0.0)
    assert it.answer(asker, Message(DhtMessageKind.PING), 0.0) == Message(DhtMessageKind.PING)


@given(st.lists(st.tuples(st.sampled_from(["next", "answered", "failed"]), st.integers(0, 99)), max_size=300))
def test_a_lookup_counts_whom_it_has_asked_and_asks_nobody_else_at_once(steps: list[tuple[str, int]]) -> None:
    lookup = Lookup(place(KEY), ME, contacts(5))
    asked: list[str] = []
    under_way: list[str] = []
    answered: set[str] = set()
    for step, n in steps:
        if step == "next":
            contact = lookup.next()
            if contact is not None:
                asked.append(contact.node_id)
                under_way.append(contact.node_id)
        elif under_way:
            node_id = under_way.pop(n % len(under_way))
            if step == "answered":
                lookup.answered(node_id, contacts(40, seed=n))
                answered.add(node_id)
            else:
                lookup.failed(node_id)
        assert lookup.n_asked == len(asked) == len(set(asked)) <= ASKED_MAX
        assert len(under_way) <= PARALLEL
        assert {contact.node_id for contact in lookup.closest()} <= answered
        assert len(lookup.closest()) == min(len(answered), N_CLOSEST)
        if under_way:
            assert not lookup.is_over
