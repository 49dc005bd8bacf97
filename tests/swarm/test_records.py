"""Envelopes and the book they are kept in: who may write what, which is the newest, and when it is
forgotten."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from gossip_reader import ValidGossip
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.secp256k1 import create_new_key_pair as create_secp256k1_key_pair
from libp2p.peer.id import ID

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.libp2p.gossip import AUDIENCE_MAX, HEALTH, MODELS, Gossip
from swarmllm.swarm.membership.identity import Identity, verify
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.records.envelope_book import (
    EXPIRY_NODES,
    EXPIRY_S,
    GOES_ROUND_S,
    Digest,
    EnvelopeBook,
    VerifyOnce,
    expiry_s,
)
from swarmllm.swarm.records.exchange import KIND_DIGESTS, RecordExchange
from swarmllm.swarm.records.spread import _FETCHES_MAX as FETCHES_MAX
from swarmllm.swarm.records.spread import (
    HEARTBEAT_MAX_S,
    HEARTBEAT_S,
    HEARTBEAT_WAITS_S,
    HEARTBEATS_PER_S,
    LOAD_WAITS_S,
    RecordSpread,
    heartbeat_interval_s,
)
from swarmllm.swarm.records.update_pace import UPDATES_WAIT_S
from swarmllm.swarm.router import UnreadableRequest
from swarmllm_proto.envelope import (
    ADDRESSES_MAX,
    AUDIENCE_BYTES,
    ENVELOPE_MAX,
    Envelope,
    Heartbeat,
    seal,
    unseal,
)
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import RECORD_MAX

from .handlers import Listener


def new_identity(number: int) -> Identity:
    key_pair = create_new_key_pair(number.to_bytes(2, "big") * 16)
    return Identity(str(ID.from_pubkey(key_pair.public_key)), key_pair)


ME, OTHER, THIRD = (new_identity(number) for number in (1, 2, 3))


def envelope(
    writer: Identity, sequence: int = 0, started_at_ms: int = 1000, record: bytes = b"record"
) -> bytes:
    return seal(
        Envelope(node_id=writer.node_id, started_at_ms=started_at_ms, sequence=sequence, record=record),
        writer.sign,
    )


def book(owner: Identity = ME, **options: int) -> EnvelopeBook:
    return EnvelopeBook(owner.node_id, verify, **options)


def test_an_envelope_comes_out_as_it_went_in() -> None:
    written = Envelope(
        node_id=ME.node_id,
        started_at_ms=1,
        sequence=2,
        addresses=("/ip4/192.0.2.1/tcp/8810",),
        data_addresses=("/ip4/192.0.2.1/tcp/8811",),
        record=bytes(RECORD_MAX),
    )
    sealed = seal(written, ME.sign)
    assert len(sealed) <= ENVELOPE_MAX
    assert unseal(sealed, Envelope, verify) == written


def test_nobody_can_write_for_another() -> None:
    stolen = Envelope(node_id=OTHER.node_id, started_at_ms=1, sequence=1, record=b"forged")
    with pytest.raises(BadMessage, match="signature"):
        unseal(seal(stolen, ME.sign), Envelope, verify)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_noticed(position: int, flip: int) -> None:
    sealed = bytearray(envelope(ME))
    sealed[position % len(sealed)] ^= flip
    with pytest.raises(BadMessage):
        unseal(bytes(sealed), Envelope, verify)


@given(st.binary(max_size=400))
def test_noise_is_refused_as_a_bad_message(noise: bytes) -> None:
    for kind in (Envelope, Heartbeat):
        with pytest.raises(BadMessage):
            unseal(noise, kind, verify)


def test_a_heartbeats_signature_does_not_pass_for_an_envelopes() -> None:
    heartbeat = Heartbeat(node_id=ME.node_id, started_at_ms=1, sequence=1, beat=1)
    assert unseal(seal(heartbeat, ME.sign), Heartbeat, verify) == heartbeat
    with pytest.raises(BadMessage, match="signature"):
        unseal(seal(heartbeat, ME.sign), Envelope, verify)


def test_too_large_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadMessage, match="at most"):
        unseal(bytes(ENVELOPE_MAX + 1), Envelope, verify)


def test_another_version_is_refused_and_unknown_fields_are_ignored() -> None:
    fields = msgspec.to_builtins(
        Envelope(node_id=ME.node_id, started_at_ms=1, sequence=1, record=b"r"), builtin_types=[bytes]
    )

    def sealed(**changes: object) -> bytes:
        body = msgspec.msgpack.encode({**fields, **changes})
        return msgspec.msgpack.encode((body, ME.sign(b"swarmllm envelope 1:" + body)))

    assert unseal(sealed(colour="blue"), Envelope, verify).record == b"r"
    with pytest.raises(BadMessage, match="version 2"):
        unseal(sealed(v=2), Envelope, verify)


def test_only_ed25519_ids_verify_and_nothing_raises() -> None:
    other_kind = create_secp256k1_key_pair()
    node_id = str(ID.from_pubkey(other_kind.public_key))
    assert not verify(node_id, b"content", other_kind.private_key.sign(b"content"))
    assert verify(ME.node_id, b"content", ME.sign(b"content"))
    assert not verify(ME.node_id, b"content", b"")
    for junk in ("", "junk", "12D3KooW", "0OIl", ME.node_id[:-1], "z" * 500):
        assert not verify(junk, b"content", ME.sign(b"content"))


@given(order=st.permutations([(1000, 0), (1000, 1), (1000, 7), (2000, 0), (2000, 3)]))
def test_the_newest_envelope_wins_in_whatever_order_they_come(order: list[tuple[int, int]]) -> None:
    kept = book()
    for started_at_ms, sequence in order:
        kept.take(envelope(OTHER, sequence, started_at_ms, b"%d.%d" % (started_at_ms, sequence)), now=0.0)
    assert kept.records() == {OTHER.node_id: b"2000.3"}


def test_an_envelope_under_ones_own_id_is_refused_when_it_is_newer() -> None:
    kept = book()
    own = Envelope(node_id=ME.node_id, started_at_ms=1000, sequence=0, record=b"mine")
    kept.write_own(own, seal(own, ME.sign), now=0.0)
    assert kept.take(envelope(ME, sequence=5, record=b"a copy of me"), now=0.0) == ("refused", ME.node_id)
    assert kept.take(envelope(ME, sequence=5, started_at_ms=10), now=0.0) == ("known", ME.node_id)
    assert kept.records() == {ME.node_id: b"mine"}


@given(
    held=st.dictionaries(st.sampled_from([ME, OTHER, THIRD]), st.integers(0, 3), max_size=3),
    known=st.dictionaries(st.sampled_from([ME, OTHER, THIRD]), st.integers(0, 3), max_size=3),
)
def test_one_exchange_of_digests_makes_two_books_equal(
    held: dict[Identity, int], known: dict[Identity, int]
) -> None:
    reader = new_identity(9)
    a, b = book(reader), book(new_identity(10))
    for target, content in ((a, held), (b, known)):
        for writer, sequence in content.items():
            target.take(envelope(writer, sequence, record=b"%d" % sequence), now=0.0)
    wanted = a.lacking(b.digests(1.0, none_is_lost), now=1.0)
    for sealed in b.sealed(wanted, 10**6):
        assert a.take(sealed, now=1.0, ages_s=wanted)[0] == "new"
    expected = {
        writer.node_id: b"%d" % max(held.get(writer, -1), known.get(writer, -1)) for writer in {*held, *known}
    }
    assert a.records() == expected
    assert a.lacking(b.digests(1.0, none_is_lost), now=1.0) == {}


MANY = [new_identity(number) for number in range(10, 110)]
SEALED = {(writer, sequence): envelope(writer, sequence) for writer in MANY for sequence in range(2)}


def book_of(owner: Identity, known: dict[Identity, int]) -> EnvelopeBook:
    """By writer, the number of its newest envelope."""
    made = EnvelopeBook(owner.node_id, lambda _node_id, _content, _signature: True)
    for writer, sequence in known.items():
        made.take(SEALED[writer, sequence], now=0.0)
    return made


KNOWN = st.dictionaries(st.sampled_from(MANY), st.integers(0, 1), min_size=60)


@given(held=KNOWN, known=KNOWN, lost=st.sets(st.sampled_from(MANY), max_size=5))
def test_fingerprints_hide_nothing_that_a_list_of_all_would_have_told(
    held: dict[Identity, int], known: dict[Identity, int], lost: set[Identity]
) -> None:
    a, b = book_of(ME, held), book_of(OTHER, known)
    gone = {writer.node_id for writer in lost}

    def is_lost(node_id: NodeId, _heard_at_s: float) -> bool:
        return node_id in gone

    told = b.differing(a.fingerprints(is_lost), 1.0, none_is_lost)
    everything = b.digests(1.0, none_is_lost)
    assert a.lacking(told, 1.0) == a.lacking(everything, 1.0)
    # What a took for lost is alive: b has heard it, and says so.
    assert {digest.node_id for digest in everything} & gone <= {digest.node_id for digest in told}


def test_two_nodes_that_know_the_same_tell_each_other_next_to_nothing() -> None:
    known = dict.fromkeys(MANY, 1)
    a, b = book_of(ME, known), book_of(OTHER, known)
    assert len(a.fingerprints(none_is_lost)) == 128
    assert b.differing(a.fingerprints(none_is_lost), 1.0, none_is_lost) == ()
    b.take(envelope(MANY[3], 7), now=0.0)
    told = b.differing(a.fingerprints(none_is_lost), 1.0, none_is_lost)
    assert MANY[3].node_id in {digest.node_id for digest in told}
    assert len(told) < 30
    assert len(b.differing(b"", 1.0, none_is_lost)) == len(MANY)


def test_a_newcomer_asks_for_everything() -> None:
    assert book_of(ME, dict.fromkeys(MANY[:32], 0)).fingerprints(none_is_lost) == b""


@pytest.mark.parametrize("body", [b"1234567", bytes(24), bytes(2048 * 8), b"x"])
async def test_what_is_no_list_of_fingerprints_is_refused(body: bytes) -> None:
    exchange = RecordExchange(kept := book_of(ME, {}), no_answer, Reader(kept))
    with pytest.raises(UnreadableRequest, match="fingerprints"):
        exchange.answer(KIND_DIGESTS, body)


def test_nodes_that_are_neither_heard_nor_connected_are_forgotten() -> None:
    kept = book()
    kept.take(envelope(OTHER), now=0.0)
    kept.take(envelope(THIRD), now=0.0)
    assert kept.hear(THIRD.node_id, (1000, 0), now=200.0) is False
    assert kept.expire(EXPIRY_S - 1, connected=()) == []
    assert kept.expire(EXPIRY_S, connected={OTHER.node_id}) == []
    assert kept.expire(EXPIRY_S, connected=()) == [OTHER.node_id]
    assert kept.expire(200.0 + EXPIRY_S, connected=()) == [THIRD.node_id]
    assert kept.records() == {}


def test_others_are_not_told_of_a_node_that_was_lost_since_it_was_heard() -> None:
    a, b = book(ME), book(OTHER)
    a.take(envelope(THIRD), now=10.0)

    def told(lost_at_s: float) -> dict[NodeId, float]:
        return b.lacking(a.digests(20.0, lambda _, heard_at_s: heard_at_s <= lost_at_s), 20.0)

    assert set(told(9.0)) == {THIRD.node_id}
    assert told(10.0) == {}


def test_a_dead_node_does_not_live_on_by_being_passed_round() -> None:
    a, b = book(ME), book(OTHER)
    a.take(envelope(THIRD), now=0.0)
    for now in (EXPIRY_S * 0.6, EXPIRY_S * 0.9):
        wanted = b.lacking(a.digests(now, none_is_lost), now)
        for sealed in a.sealed(wanted, 10**6):
            b.take(sealed, now, ages_s=wanted)
        wanted = a.lacking(b.digests(now, none_is_lost), now)
        assert wanted == {}
    assert a.expire(EXPIRY_S, connected=()) == [THIRD.node_id]
    assert b.expire(EXPIRY_S, connected=()) == [THIRD.node_id]


def test_a_heartbeat_of_something_newer_says_so() -> None:
    kept = book()
    assert kept.hear(OTHER.node_id, (1000, 0), now=0.0) is True
    kept.take(envelope(OTHER, sequence=1), now=0.0)
    assert kept.hear(OTHER.node_id, (1000, 1), now=0.0) is False
    assert kept.hear(OTHER.node_id, (1000, 2), now=0.0) is True
    assert kept.hear(OTHER.node_id, (999, 9), now=0.0) is False
    kept.hear(OTHER.node_id, (999, 9), now=0.0, beat=1000)
    assert not kept.is_old(OTHER.node_id, (1000, 1), 0.0, beat=2), (
        "the heartbeats of an earlier life say nothing"
    )


def test_a_full_book_gives_up_who_was_silent_longest_but_nobody_connected() -> None:
    kept = book(nodes_max=2)
    kept.take(envelope(OTHER), now=0.0)
    kept.take(envelope(THIRD), now=1.0)
    newcomer = new_identity(4)
    assert kept.take(envelope(newcomer), now=2.0, connected={OTHER.node_id, THIRD.node_id})[0] == "refused"
    assert kept.take(envelope(newcomer), now=2.0, connected={OTHER.node_id})[0] == "new"
    assert set(kept.node_ids()) == {OTHER.node_id, newcomer.node_id}


def test_envelopes_asked_for_stop_where_the_response_is_full() -> None:
    kept = book()
    for writer in (OTHER, THIRD):
        kept.take(envelope(writer, record=bytes(1000)), now=0.0)
    assert len(kept.sealed([OTHER.node_id, THIRD.node_id], 1500)) == 1
    assert len(kept.sealed([OTHER.node_id, "unknown", THIRD.node_id], 10_000)) == 2


def test_all_heartbeats_of_a_swarm_together_stay_few() -> None:
    intervals_s = [heartbeat_interval_s(n_nodes, 0) for n_nodes in (1, 18, 19, 50, 4096)]
    assert intervals_s == [HEARTBEAT_S, *(n / HEARTBEATS_PER_S for n in (18, 19, 50, 4096))]
    assert all(n / heartbeat_interval_s(n, 1000) <= HEARTBEATS_PER_S for n in (120, 1000, 4096))


def none_is_lost(node_id: NodeId, heard_at_s: float) -> bool:
    return False


@pytest.mark.parametrize("n_nodes", [1, EXPIRY_NODES, EXPIRY_NODES + 1, 1000, 4096])
def test_a_node_is_remembered_for_several_of_its_heartbeats(n_nodes: int) -> None:
    assert 3 * heartbeat_interval_s(n_nodes, 1000) < expiry_s(n_nodes)


def test_who_has_nothing_new_to_say_says_so_ever_more_rarely() -> None:
    intervals_s = [heartbeat_interval_s(2, n_beats) for n_beats in (0, 1, 2, 3, 1000)]
    assert intervals_s == [10.0, 20.0, 40.0, HEARTBEAT_MAX_S, HEARTBEAT_MAX_S]


class HeardGossip(Gossip):
    """What a node says, and when."""

    def __init__(self) -> None:
        super().__init__("", ValidGossip(), {})
        self.said: list[tuple[str, float]] = []

    async def publish(self, topic: str, content: bytes) -> None:
        self.said.append((topic, trio.current_time()))


async def test_news_is_followed_by_a_heartbeat_soon(autojump_clock: trio.testing.MockClock) -> None:
    gossip = HeardGossip()
    async with trio.open_nursery() as nursery:
        spread = a_spread(nursery)
        spread.begin(gossip, (), ())
        await trio.sleep(1000)
        quiet_s = trio.current_time()
        n_until_quiet = len(gossip.said)
        await spread.publish(b"news")
        await trio.sleep(HEARTBEAT_S * 1.3)
        nursery.cancel_scope.cancel()
    assert n_until_quiet < 30
    after = [(topic, at_s - quiet_s) for topic, at_s in gossip.said[n_until_quiet:]]
    assert after[0] == (MODELS, 0.0)
    assert any(topic == HEALTH and at_s <= HEARTBEAT_S * 1.2 for topic, at_s in after)


async def test_news_does_not_wait_to_be_passed_on_and_signs_of_life_wait_longest() -> None:
    async with trio.open_nursery() as nursery:
        spread = a_spread(nursery)
        spread.take(envelope(OTHER, started_at_ms=1000, sequence=1), {})

        def wait_s(who: Identity, sequence: int, load: bytes = b"") -> float:
            beat = Heartbeat(
                node_id=who.node_id, started_at_ms=1000, sequence=sequence, beat=1, load=load or msgspec.UNSET
            )
            return spread.may_wait_s(HEALTH, seal(beat, who.sign))

        assert spread.may_wait_s(MODELS, envelope(OTHER)) == 0.0
        assert [wait_s(OTHER, 1), wait_s(OTHER, 1, b"load")] == [HEARTBEAT_WAITS_S, LOAD_WAITS_S]
        assert [wait_s(OTHER, 2), wait_s(THIRD, 1)] == [0.0, 0.0], "of an envelope that is not here"
        for number in range(20):
            spread.may_wait_s(MODELS, envelope(new_identity(100 + number)))
        assert spread.may_wait_s(MODELS, envelope(new_identity(99))) == UPDATES_WAIT_S, "there are many"
        assert wait_s(THIRD, 1) == UPDATES_WAIT_S
        assert spread.may_wait_s(MODELS, envelope(ME)) == 0.0, "its writer does not wait"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("n_alive", [40, 20])
async def test_a_node_that_gossip_does_not_reach_forgets_the_dead_and_nobody_else(
    autojump_clock: trio.testing.MockClock, n_alive: int
) -> None:
    """It has one neighbour, which has many, and is not in its mesh."""
    hub, n_nodes, n_forgotten = book(OTHER), 40, 0
    nodes = [new_identity(100 + number) for number in range(n_nodes)]
    answering = RecordExchange(hub, no_answer, NobodyLost())

    async def ask(_node_id: NodeId, kind: int, body: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return answering.answer(kind, body)

    class Forgetful(Listener):
        def forgotten(self, node_id: NodeId) -> None:
            nonlocal n_forgotten
            n_forgotten += 1

    async with trio.open_nursery() as nursery:
        leaf = RecordSpread(
            ME, verify, 1, nursery, ChangeFeed(), ask=ask, connected={OTHER.node_id}, listener=Forgetful()
        )
        for each in nodes:
            hub.take(envelope(each), trio.current_time())
            leaf.take(envelope(each), {})
        leaf.begin(HeardGossip(), (), ())
        for _ in range(60):
            for each in nodes[:n_alive]:
                hub.hear(each.node_id, hub.envelope(each.node_id).version, trio.current_time())
            await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert n_forgotten == n_nodes - n_alive
    assert {each.node_id for each in nodes[:n_alive]} < set(leaf.book.node_ids())


def test_gossip_that_misses_a_few_is_not_taken_for_one_that_misses_many() -> None:
    kept, old_s = book(), EXPIRY_S / 2
    nodes = [new_identity(100 + number) for number in range(16)]
    for each in nodes:
        kept.take(envelope(each), now=0.0)
    for n_missed, misses in ((2, False), (3, True)):
        for each in nodes[n_missed:]:
            kept.hear(each.node_id, (1000, 0), now=1.0)
        assert not kept.misses_signs(old_s - 1, ())
        assert kept.misses_signs(old_s, ()) == misses
        assert not kept.misses_signs(old_s, {each.node_id for each in nodes})
        for each in nodes:
            kept._entries.get(each.node_id).heard_at_s = 0.0
    assert not book().misses_signs(old_s, ())


class NobodyLost:
    """An `EnvelopeReader` that only answers."""

    def take(self, sealed: bytes, ages_s: Mapping[NodeId, float]) -> NodeId:
        raise NotImplementedError

    def blame(self, sender: NodeId, error: BadMessage) -> None:
        raise NotImplementedError

    def pass_on(self, node_id: NodeId) -> None:
        raise NotImplementedError

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        return False


class NeighbourlyGossip(HeardGossip):
    def audience(self, topic: str) -> bytes | None:
        return bytes(AUDIENCE_BYTES)


async def test_who_knows_more_nodes_than_may_be_neighbours_names_none(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        spread = a_spread(nursery)
        spread.begin(NeighbourlyGossip(), (), ())
        for number in range(AUDIENCE_MAX + 1):
            await spread.publish(b"news")
            names_neighbours = spread.own.audience is not msgspec.UNSET
            assert len(spread.book) == number + 1
            assert names_neighbours
            spread.take(envelope(new_identity(100 + number)), {})
        await spread.publish(b"news")
        assert spread.own.audience is msgspec.UNSET
        nursery.cancel_scope.cancel()


def a_spread(nursery: trio.Nursery) -> RecordSpread:
    return RecordSpread(
        ME, verify, 1, nursery, ChangeFeed(), ask=no_answer, connected=(), listener=Listener()
    )


async def no_answer(_node_id: str, _kind: int, _body: bytes) -> bytes:
    raise NodeUnreachable("nobody is there")


class Counting:
    """`verify`, and how often it was asked."""

    def __init__(self) -> None:
        self.n_asked = 0

    def __call__(self, node_id: str, content: bytes, signature: bytes) -> bool:
        self.n_asked += 1
        return verify(node_id, content, signature)


class Reader:
    """Puts envelopes into a book, and expects that nothing is wrong with them."""

    def __init__(self, kept: EnvelopeBook) -> None:
        self.kept = kept

    def take(self, sealed: bytes, ages_s: Mapping[NodeId, float]) -> NodeId:
        return self.kept.take(sealed, 0.0, ages_s=ages_s)[1]

    def pass_on(self, node_id: NodeId) -> None: ...

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        return False

    def blame(self, sender: NodeId, error: BadMessage) -> None:
        pytest.fail("nothing is wrong with it")


async def test_one_envelope_is_verified_once_however_it_comes() -> None:
    counting = Counting()
    sealed = envelope(OTHER)
    heartbeat = Heartbeat(node_id=OTHER.node_id, started_at_ms=1000, sequence=0, beat=1)

    async def ask(node_id: str, kind: int, body: bytes) -> bytes:
        return msgspec.msgpack.encode([sealed])

    async with trio.open_nursery() as nursery:
        spread = RecordSpread(
            ME,
            counting,
            1000,
            nursery,
            ChangeFeed(),
            ask=ask,
            connected={OTHER.node_id},
            listener=Listener(),
        )
        assert spread.validate(MODELS, sealed)
        spread.receive(MODELS, sealed)
        await spread.exchange.fetch(OTHER.node_id, {OTHER.node_id: 0.0})
        assert counting.n_asked == 1
        beat = seal(heartbeat, OTHER.sign)
        assert spread.validate(HEALTH, beat)
        spread.receive(HEALTH, beat)
        assert counting.n_asked == 2
        forged = envelope(OTHER, 1)[:-1] + b"x"
        assert not spread.validate(MODELS, forged)
        assert not spread.validate(MODELS, forged)
        assert counting.n_asked == 3
        assert spread.records == {OTHER.node_id: b"record"}


def test_verdicts_that_are_remembered_are_about_all_that_was_signed() -> None:
    counting = Counting()
    once = VerifyOnce(counting, kept_max=3)
    signed = ME.sign(b"content")
    assert once(ME.node_id, b"content", signed)
    assert not once(ME.node_id, b"other", signed)
    assert not once(OTHER.node_id, b"content", signed)
    assert once(ME.node_id, b"content", signed)
    assert counting.n_asked == 3
    assert not once(ME.node_id, b"content", ME.sign(b"more"))
    assert len(once) == 3
    assert once(ME.node_id, b"content", signed)
    assert counting.n_asked == 4


async def test_between_two_envelopes_of_one_answer_others_have_their_turn() -> None:
    writers = [new_identity(number) for number in range(10, 40)]
    seen: list[int] = []

    async def ask(node_id: str, kind: int, body: bytes) -> bytes:
        return msgspec.msgpack.encode([envelope(writer) for writer in writers])

    kept = book()

    exchange = RecordExchange(kept, ask, Reader(kept))

    async def look() -> None:
        while True:
            seen.append(len(kept))
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await exchange.fetch(OTHER.node_id, {writer.node_id: 0.0 for writer in writers})
        nursery.cancel_scope.cancel()
    assert len(kept) == len(writers)
    # Trio shuffles who goes first in a turn: two may come between two looks.
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2


def test_records_of_strangers_stay_within_their_bytes() -> None:
    kept = book(bytes_max=20_000)
    identities = [new_identity(number) for number in range(10, 40)]
    for now, identity in enumerate(identities):
        kept.take(envelope(identity, record=bytes(RECORD_MAX // 100)), now)
        assert kept.n_bytes <= 20_000
        assert kept.n_bytes == sum(entry.n_bytes for entry in kept._entries.values())
    assert kept.take(envelope(OTHER, record=bytes(RECORD_MAX)), 50) == ("refused", OTHER.node_id)
    kept.expire(1e6, ())
    assert kept.n_bytes == 0


def test_a_book_counts_the_bytes_that_it_holds() -> None:
    kept = book()
    assert kept.n_bytes == 0
    kept.write_own(unseal(envelope(ME), Envelope, verify), envelope(ME), now=0.0)
    assert kept.n_bytes == 0, "its own does not count"
    latest = [envelope(OTHER, record=bytes(10)), envelope(THIRD, sequence=1, record=bytes(110))]
    for each in (envelope(THIRD, record=bytes(999)), *latest):
        kept.take(each, now=0.0)
    other = book()
    for each in latest:
        other.take(each, now=0.0)
    assert kept.n_bytes == other.n_bytes > 120, "what was replaced does not count"
    kept.expire(EXPIRY_S, connected=())
    assert kept.n_bytes == 0


def test_large_records_give_way_to_small_ones_and_connected_nodes_keep_theirs() -> None:
    kept = book(bytes_max=20_000)
    kept.take(envelope(OTHER, record=bytes(5000)), 0)
    kept.take(envelope(THIRD, record=bytes(4000)), 0)
    assert kept.take(envelope(new_identity(9), record=bytes(1000)), 1, connected=[OTHER.node_id])[0] == "new"
    assert {OTHER.node_id, new_identity(9).node_id} <= set(kept.node_ids())
    assert THIRD.node_id not in kept.node_ids()
    kept.take(envelope(OTHER, 1, record=b"small now"), 2)
    assert kept.n_bytes == sum(entry.n_bytes for entry in kept._entries.values())


async def test_replays_of_old_envelopes_cost_nobody_anything() -> None:
    """They are checked once, change nothing, go no further and are held against nobody."""
    counting, events, listener = Counting(), list[tuple[object, ...]](), Listener()
    async with trio.open_nursery() as nursery:
        spread = RecordSpread(
            ME,
            counting,
            1,
            nursery,
            ChangeFeed(),
            ask=no_answer,
            connected=(),
            listener=listener,
            note=lambda *event: events.append(event),
        )
        old, new = envelope(OTHER, 1), envelope(OTHER, 2)
        for sealed in (old, new):
            assert spread.validate(MODELS, sealed) is True
            spread.receive(MODELS, sealed)
        for _ in range(1000):
            assert spread.validate(MODELS, old) is None
            spread.receive(MODELS, old)
        assert spread.validate(MODELS, new) is True
        assert [each.sequence for each in listener.envelopes] == [1, 2]
        assert counting.n_asked == 2
        assert events == []
        nursery.cancel_scope.cancel()


def test_nobody_is_asked_for_ones_own_envelope_nor_for_one_that_is_too_old() -> None:
    reader = book()
    digests = [
        Digest(ME.node_id, 2000, 1, 0.0),
        Digest(OTHER.node_id, 2000, 1, EXPIRY_S),
        Digest(THIRD.node_id, 2000, 1, EXPIRY_S - 1),
    ]
    assert reader.lacking(digests, now=0.0) == {THIRD.node_id: EXPIRY_S - 1}


class Asked:
    """In the place of other nodes, which answer when they are let."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.let = trio.Event()

    async def __call__(self, node_id: str, _kind: int, _body: bytes) -> bytes:
        self.sources.append(node_id)
        await self.let.wait()
        raise NodeUnreachable("it is gone")


def heartbeat(writer: Identity, sequence: int = 9, beat: int = 1) -> bytes:
    told = Heartbeat(node_id=writer.node_id, started_at_ms=1000, sequence=sequence, beat=beat)
    return seal(told, writer.sign)


async def test_a_heartbeat_that_tells_of_news_has_it_fetched_once_at_a_time_and_so_many_at_once() -> None:
    asked, connected = Asked(), set[NodeId]()
    writers = [new_identity(number) for number in range(10, 10 + 2 * FETCHES_MAX)]
    async with trio.open_nursery() as nursery:
        spread = RecordSpread(
            ME, verify, 1, nursery, ChangeFeed(), ask=asked, connected=connected, listener=Listener()
        )
        # Nobody is there who could be asked.
        spread.receive(HEALTH, heartbeat(OTHER))
        await trio.testing.wait_all_tasks_blocked()
        assert asked.sources == []
        connected.update((OTHER.node_id, THIRD.node_id))
        spread.receive(HEALTH, heartbeat(ME))
        for _ in range(3):
            spread.receive(HEALTH, heartbeat(OTHER))
        await trio.testing.wait_all_tasks_blocked()
        assert asked.sources == [OTHER.node_id], "its writer, where that is connected"
        for writer in writers:
            spread.take(envelope(writer, sequence=1), {})
            spread.receive(HEALTH, heartbeat(writer))
        await trio.testing.wait_all_tasks_blocked()
        assert len(asked.sources) == FETCHES_MAX
        assert set(asked.sources) <= connected
        asked.let.set()
        await trio.testing.wait_all_tasks_blocked()
        spread.receive(HEALTH, heartbeat(OTHER))
        await trio.testing.wait_all_tasks_blocked()
        assert len(asked.sources) == FETCHES_MAX + 1
        # What is known already is fetched from nobody.
        spread.take(envelope(OTHER, sequence=9), {})
        spread.receive(HEALTH, heartbeat(OTHER))
        await trio.testing.wait_all_tasks_blocked()
        assert len(asked.sources) == FETCHES_MAX + 1


async def test_a_node_is_found_through_its_latest_relays_and_no_others() -> None:
    async with trio.open_nursery() as nursery:
        spread = RecordSpread(
            ME, verify, 1, nursery, ChangeFeed(), ask=no_answer, connected=(), listener=Listener()
        )
        own = tuple(f"/ip4/192.0.2.1/tcp/{port}" for port in range(1, ADDRESSES_MAX + 1))
        spread.begin(HeardGossip(), own, ())
        circuits = [f"/ip4/192.0.2.9/tcp/1/p2p/{each.node_id}/p2p-circuit" for each in (OTHER, THIRD)]
        before = spread.own.sequence
        await spread.reach_through((circuits[0],))
        assert spread.own.addresses == (*own[: ADDRESSES_MAX - 1], circuits[0])
        await spread.reach_through((circuits[1],))
        assert spread.own.addresses == (*own[: ADDRESSES_MAX - 1], circuits[1])
        await spread.reach_through(())
        assert spread.own.addresses == own
        # What a router forwards stays when relays come and go, and the other way round.
        await spread.also_at(("/ip4/198.51.100.7/tcp/1",), ("/ip4/198.51.100.7/tcp/2",))
        await spread.reach_through((circuits[0],))
        assert spread.own.addresses == (*own[: ADDRESSES_MAX - 2], "/ip4/198.51.100.7/tcp/1", circuits[0])
        assert spread.own.data_addresses == ("/ip4/198.51.100.7/tcp/2",)
        assert spread.plain_addresses == own
        await spread.also_at((), ())
        assert spread.own.addresses == (*own[: ADDRESSES_MAX - 1], circuits[0])
        assert spread.own.data_addresses == ()
        assert spread.own.sequence == before + 6
        sealed = spread.envelope(ME.node_id)
        assert sealed is not None
        assert sealed.addresses == spread.own.addresses
        nursery.cancel_scope.cancel()


async def test_what_has_been_round_the_swarm_is_not_passed_on_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Whoever is told of it once more has forgotten its id by then."""
    parts: Any = (ME, verify, 1, None, ChangeFeed())
    spread = RecordSpread(*parts, ask=no_answer, connected=(), listener=Listener())
    sealed = envelope(OTHER, 5)
    spread.take(sealed, {OTHER.node_id: 200.0})
    await trio.sleep(GOES_ROUND_S / 2)
    assert spread.validate(MODELS, sealed) is True
    spread.take(sealed, {})
    await trio.sleep(GOES_ROUND_S / 2)
    assert spread.validate(MODELS, sealed) is None
    assert spread.validate(MODELS, envelope(OTHER, 6)) is True
    assert spread.validate(MODELS, envelope(THIRD)) is True
    beats = {beat: heartbeat(OTHER, 5, beat) for beat in (3, 4, 5)}
    assert spread.validate(HEALTH, beats[4]) is True
    spread.receive(HEALTH, beats[4])
    assert [spread.validate(HEALTH, beats[beat]) for beat in (3, 4, 5)] == [None, None, True]
    spread.receive(HEALTH, beats[3])
    assert spread.validate(HEALTH, beats[4]) is None
    assert spread.validate(HEALTH, heartbeat(OTHER, 6, 1)) is True
    spread.take(envelope(OTHER, 6), {})
    assert spread.validate(HEALTH, heartbeat(OTHER, 6, 1)) is True
    assert spread.validate(HEALTH, beats[5]) is None


@pytest.mark.parametrize("topic", [MODELS, HEALTH])
async def test_what_is_forged_is_not_passed_on_and_what_is_old_or_of_another_version_is_nobodys_fault(
    topic: str,
) -> None:
    events: list[tuple[str, TrustEvent]] = []
    parts: Any = (ME, verify, 1, None, ChangeFeed())
    spread = RecordSpread(
        *parts,
        ask=no_answer,
        connected=(),
        listener=Listener(),
        note=lambda node_id, event, _detail="": events.append((node_id, event)),
    )
    spread.take(envelope(OTHER, 5), {})
    for sequence, verdict in ((6, True), (5, True), (4, None)):
        sealed = envelope(OTHER, sequence) if topic == MODELS else heartbeat(OTHER, sequence)
        assert spread.validate(topic, sealed) is verdict
    assert spread.validate(topic, b"noise") is False
    assert events == []
