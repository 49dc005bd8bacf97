"""The details of records: how they come apart from the brief record, are asked for, taken and dropped."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from swarmllm.errors import DeadlineExceeded, RemoteError
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.libp2p.gossip import HEALTH, MODELS
from swarmllm.swarm.membership.identity import Identity, verify
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.records.details_book import (
    ASKED_MAX,
    BURST_BYTES,
    BYTES_PER_S,
    DUE_MAX,
    REFRESH_S,
    RETRY_MAX_S,
    RETRY_S,
    AskedDetails,
    BytesPace,
    DetailsBook,
)
from swarmllm.swarm.records.details_exchange import (
    ANSWER_MAX,
    ASKED_THEMSELVES_MAX,
    DIAL_EVERY_S,
    QUESTIONS_MAX,
    DetailsExchange,
)
from swarmllm.swarm.records.direct_loads import DirectLoads
from swarmllm.swarm.records.exchange import KIND_DETAILS
from swarmllm.swarm.records.spread import RecordSpread
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.envelope import Details, Envelope, Heartbeat, seal, unseal
from swarmllm_proto.errors import BadMessage, ProtocolError, UnsupportedVersion
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import DETAILS_MAX, RECORD_MAX
from swarmllm_proto.record_parts import (
    FetchProgress,
    RecordDetails,
    decode_details,
    join_record,
    split_record,
)
from swarmllm_proto.swarm import (
    FileAnnounce,
    KeptPrefix,
    NetworkCoordinate,
    NodeCapability,
    NodeRecord,
    ObservedLatency,
    ObservedLink,
    PrefixCacheAnnounce,
    ShardAnnounce,
    SharedModel,
)

from .handlers import Listener
from .test_loads import KeepingGossip
from .test_records import ME, OTHER, THIRD, book, new_identity, no_answer

MODEL, ANOTHER = "a" * 64, "b" * 64


def record_of(who: Identity, decode_s: float = 0.001, **fields: Any) -> NodeRecord:
    return NodeRecord(
        node_id=who.node_id,
        models=(ShardAnnounce(model_id=MODEL, name="m", n_layers=4, ranges=((0, 4),)),),
        capability=NodeCapability(
            max_requests=3,
            observed_latencies=(ObservedLatency(model_id=MODEL, decode_s=decode_s),),
            observed_links=(ObservedLink(node_id=THIRD.node_id, rtt_s=0.1),),
        ),
        **fields,
    )


def whole(who: Identity, decode_s: float = 0.001) -> bytes:
    return encode_record(record_of(who, decode_s))


def brief_envelope(who: Identity, number: int = 1, *, life: int = 1000, sequence: int = 0) -> bytes:
    brief, _ = split_record(whole(who))
    said = Envelope(node_id=who.node_id, started_at_ms=life, sequence=sequence, record=brief, details=number)
    return seal(said, who.sign)


def details_of(
    who: Identity, number: int = 1, *, life: int = 1000, decode_s: float = 0.001, content: bytes = b""
) -> bytes:
    content = content or split_record(whole(who, decode_s))[1]
    said = Details(node_id=who.node_id, started_at_ms=life, number=number, details=content)
    return seal(said, who.sign)


LINKS = tuple(ObservedLink(node_id=OTHER.node_id, rtt_s=0.1) for _ in range(32))
COUNTS = st.integers(0, 2**53)
TIMES = st.floats(0, 100)
RANGES = st.sampled_from([(), ((0, 2),), ((0, 1), (2, 4))])
SHARDS = st.builds(
    ShardAnnounce,
    model_id=st.sampled_from([MODEL, ANOTHER]),
    name=st.text(max_size=5),
    n_layers=st.just(4),
    ranges=RANGES,
    loading=RANGES,
    pinned=RANGES,
    fetched=st.one_of(st.just(UNSET), st.tuples(COUNTS, COUNTS)),
    kv_type=st.sampled_from([UNSET, "f16"]),
)
CAPABILITIES = st.builds(
    NodeCapability,
    memory_total_bytes=COUNTS,
    stage_requests=COUNTS,
    flops=TIMES,
    observed_latencies=st.lists(
        st.builds(ObservedLatency, model_id=st.just(MODEL), decode_s=TIMES, prefill_s=TIMES), max_size=2
    ).map(tuple),
    observed_links=st.lists(
        st.builds(ObservedLink, node_id=st.just(OTHER.node_id), rtt_s=TIMES, bytes_per_s=TIMES), max_size=2
    ).map(tuple),
    coordinate=st.sampled_from(
        [None, NetworkCoordinate(position_s=(0.1, 0.0, 0.2), height_s=0.0, error=1.0)]
    ),
    accepts_shares_of=st.sampled_from([UNSET, (), ("members",)]),
    commits=st.sampled_from([UNSET, True, False]),
    placed_models=st.sampled_from([(), (MODEL,)]),
)
RECORDS = st.builds(
    NodeRecord,
    node_id=st.just(ME.node_id),
    nickname=st.text(max_size=5),
    sequence=COUNTS,
    models=st.lists(SHARDS, max_size=2, unique_by=lambda each: each.model_id).map(tuple),
    capability=CAPABILITIES,
    files=st.sampled_from([(), (FileAnnounce(model_id=MODEL, name="f", n_layers=4, layers=((0, 4),)),)]),
    prefix_caches=st.sampled_from(
        [(), (PrefixCacheAnnounce(model_id=MODEL, prefixes=(KeptPrefix(bytes(32), 3),)),)]
    ),
    shares=st.sampled_from([UNSET, (), (SharedModel(model_id=MODEL, name="s"),)]),
)


@given(RECORDS)
def test_the_parts_of_a_record_make_it_again(record: NodeRecord) -> None:
    content = encode_record(record)
    brief, details = split_record(content)
    assert decode_record(join_record(brief, details)) == record
    said = decode_record(brief)
    assert (said.capability.observed_links, said.capability.observed_latencies) == ((), ())
    assert said.prefix_caches == ()
    assert said.models == tuple(msgspec.structs.replace(each, fetched=UNSET) for each in record.models)
    assert (said.files, said.shares, said.nickname) == (record.files, record.shares, record.nickname)


def test_a_brief_record_is_less_than_half_of_a_whole_one() -> None:
    links = tuple(
        ObservedLink(node_id=new_identity(n).node_id, rtt_s=0.021, bytes_per_s=1e7) for n in range(16)
    )
    record = record_of(ME)
    record = msgspec.structs.replace(
        record, capability=msgspec.structs.replace(record.capability, observed_links=links)
    )
    brief, details = split_record(encode_record(record))
    assert len(brief) < 400 < 1600 < len(details)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"half 1", encode_record(record_of(ME))[:-1]])
def test_what_is_no_record_has_no_parts(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        split_record(content)


def test_details_that_are_too_large_do_not_travel() -> None:
    models = tuple(
        ShardAnnounce(model_id=f"{number:064x}", name="m", n_layers=4, ranges=(), fetched=(2**40, 2**41))
        for number in range(256)
    )
    prefixes = tuple(KeptPrefix(bytes(32), 1) for _ in range(64))
    kept = tuple(PrefixCacheAnnounce(model_id=f"{number:064x}", prefixes=prefixes) for number in range(8))
    record = NodeRecord(node_id=ME.node_id, models=models, prefix_caches=kept)
    with pytest.raises(BadMessage, match="at most"):
        split_record(encode_record(record))
    progress = tuple(FetchProgress(each.model_id, 2**40, 2**41) for each in models)
    details = msgspec.msgpack.encode(RecordDetails(prefix_caches=kept, fetched=progress))
    with pytest.raises(BadMessage, match="at most"):
        decode_details(details)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"\xc1", "details"),
        (msgspec.msgpack.encode({"observed_latencies": [{"model_id": "x"}]}), "observed_latencies"),
        (msgspec.msgpack.encode({"fetched": [[MODEL, -1, 0]]}), "fetched"),
        (bytes(DETAILS_MAX + 1), "details"),
    ],
)
def test_what_is_no_details_is_refused(content: bytes, field: str) -> None:
    with pytest.raises(BadMessage, match=field):
        decode_details(content)


def test_details_of_another_version_are_nobodys_fault() -> None:
    with pytest.raises(UnsupportedVersion):
        decode_details(msgspec.msgpack.encode({"v": 2}))


def test_details_say_nothing_of_models_that_the_record_lacks() -> None:
    brief, _ = split_record(whole(OTHER))
    lie = RecordDetails(fetched=(FetchProgress(ANOTHER, 1, 2),))
    said = decode_record(join_record(brief, msgspec.msgpack.encode(lie)))
    assert [each.model_id for each in said.models] == [MODEL]


# The book.


def two_books(**options: Any) -> tuple[Any, DetailsBook]:
    envelopes = book()
    return envelopes, DetailsBook(ME.node_id, envelopes, verify, **options)


def ids(*who: Identity) -> list[NodeId]:
    return [each.node_id for each in who]


def test_details_come_into_the_record_and_leave_it_with_the_interest() -> None:
    envelopes, details = two_books()
    envelopes.take(brief_envelope(OTHER), 0.0)
    brief = envelopes.records()[OTHER.node_id]
    n_bytes = envelopes.n_bytes
    assert details.due(0.0) == [], "nobody is of interest"
    assert details.want([ids(OTHER, ME)], ()) == []
    assert details.due(0.0) == ids(OTHER)
    assert details.question(ids(OTHER)) == (AskedDetails(OTHER.node_id, 0, 0),)
    assert details.take(details_of(OTHER), ids(OTHER), 0.0) == OTHER.node_id
    assert decode_record(envelopes.records()[OTHER.node_id]) == record_of(OTHER)
    assert envelopes.n_bytes == n_bytes + len(envelopes.records()[OTHER.node_id])
    assert details.due(1e6) == []
    assert details.question(ids(OTHER)) == (AskedDetails(OTHER.node_id, 1000, 1),)
    envelopes.take(brief_envelope(OTHER, sequence=1), 0.0)
    assert envelopes.n_bytes == n_bytes, "until they are put into the new one"
    details.envelope_came(OTHER.node_id)
    assert envelopes.n_bytes == n_bytes + len(envelopes.records()[OTHER.node_id])
    assert details.want([[]], ()) == ids(OTHER)
    assert envelopes.records()[OTHER.node_id] == brief
    assert (envelopes.n_bytes, len(details), details.due(1e6)) == (n_bytes, 0, [])


def test_a_whole_record_is_not_asked_about() -> None:
    envelopes, details = two_books()
    said = Envelope(node_id=OTHER.node_id, started_at_ms=1, sequence=0, record=whole(OTHER))
    envelopes.take(seal(said, OTHER.sign), 0.0)
    details.want([ids(OTHER)], ())
    assert details.due(0.0) == []
    envelopes.hear_details(OTHER.node_id, 1, 7)
    details.want([ids(OTHER)], ())
    assert details.due(0.0) == [], "an old heartbeat speaks of a record before it"


def test_a_newer_envelope_keeps_the_details_and_one_of_another_life_does_not() -> None:
    envelopes, details = two_books()
    envelopes.take(brief_envelope(OTHER), 0.0)
    details.want([ids(OTHER)], ())
    details.take(details_of(OTHER), ids(OTHER), 0.0)
    envelopes.take(brief_envelope(OTHER, sequence=1), 1.0)
    details.envelope_came(OTHER.node_id)
    assert decode_record(envelopes.records()[OTHER.node_id]) == record_of(OTHER)
    envelopes.take(brief_envelope(OTHER, life=2000), 2.0)
    details.envelope_came(OTHER.node_id)
    assert not decode_record(envelopes.records()[OTHER.node_id]).capability.observed_links
    assert len(details) == 0
    assert details.take(details_of(OTHER, 9), ids(OTHER), 2.0) is None, "of the life before"
    assert details.due(1e6) == ids(OTHER)
    assert details.take(details_of(OTHER, life=2000), ids(OTHER), 2.0) == OTHER.node_id


def test_a_whole_record_takes_the_place_of_a_brief_one_with_its_details() -> None:
    envelopes, details = two_books()
    envelopes.take(brief_envelope(OTHER), 0.0)
    details.want([ids(OTHER)], ())
    details.take(details_of(OTHER), ids(OTHER), 0.0)
    newer = whole(OTHER, 0.9)
    said = Envelope(node_id=OTHER.node_id, started_at_ms=1000, sequence=1, record=newer)
    envelopes.take(seal(said, OTHER.sign), 1.0)
    details.envelope_came(OTHER.node_id)
    assert envelopes.records()[OTHER.node_id] == newer
    assert len(details) == 0


def test_newer_details_are_asked_for_when_they_are_named_and_not_at_once() -> None:
    envelopes, details = two_books()
    envelopes.take(brief_envelope(OTHER), 0.0)
    details.want([ids(OTHER)], ())
    details.take(details_of(OTHER), ids(OTHER), 0.0)
    for started_at_ms, number in ((999, 5), (1000, 1), (1000, 0)):
        envelopes.hear_details(OTHER.node_id, started_at_ms, number)
        assert details.due(1e6) == []
    envelopes.hear_details(OTHER.node_id, 1000, 3)
    assert (details.due(REFRESH_S - 1), details.due(REFRESH_S)) == ([], ids(OTHER))
    assert details.take(details_of(OTHER, 2, decode_s=0.5), ids(OTHER), 50.0) == OTHER.node_id
    assert decode_record(envelopes.records()[OTHER.node_id]) == record_of(OTHER, 0.5)
    assert details.due(60.0) == []
    assert details.due(50.0 + REFRESH_S) == ids(OTHER), "the newest was not there"
    assert details.take(details_of(OTHER, 2), ids(OTHER), 60.0) is None
    envelopes.take(brief_envelope(OTHER, number=1, sequence=5), 70.0)
    details.envelope_came(OTHER.node_id)
    assert envelopes.newest_details(OTHER.node_id) == 3, "the envelope was written before"


def test_large_details_are_fetched_more_rarely() -> None:
    envelopes, details = two_books()
    envelopes.take(brief_envelope(OTHER, 2), 0.0)
    details.want([ids(OTHER)], ())
    prefixes = tuple(KeptPrefix(bytes(32), 1) for _ in range(64))
    kept = tuple(PrefixCacheAnnounce(model_id=f"{n:064x}", prefixes=prefixes) for n in range(8))
    content = msgspec.msgpack.encode(RecordDetails(prefix_caches=kept))
    assert details.take(details_of(OTHER, content=content), ids(OTHER), 0.0) == OTHER.node_id
    assert details.due(len(content) / 50) == []
    assert details.due(len(content) / 39) == ids(OTHER)


def test_who_does_not_have_them_is_asked_ever_more_rarely() -> None:
    envelopes, details = two_books()
    envelopes.take(brief_envelope(OTHER), 0.0)
    details.want([ids(OTHER)], ())
    waits_s = [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    for number, wait_s in enumerate(waits_s):
        assert details.is_hard_to_find(OTHER.node_id) == (number >= 2)
        details.in_vain(OTHER.node_id, 0.0)
        assert (details.due(wait_s - 0.1), details.due(wait_s)) == ([], ids(OTHER))
    for _ in range(100):
        details.in_vain(OTHER.node_id, 0.0)
    assert (details.due(RETRY_MAX_S - 1), details.due(RETRY_MAX_S)) == ([], ids(OTHER))
    details.take(details_of(OTHER), ids(OTHER), 0.0)
    assert not details.is_hard_to_find(OTHER.node_id)
    envelopes.hear_details(OTHER.node_id, 1000, 2)
    details.in_vain(OTHER.node_id, 1000.0)
    assert details.due(1000.0 + RETRY_S) == ids(OTHER), "counted from anew"
    for _ in range(5):
        details.in_vain(OTHER.node_id, 0.0)
    assert not details.is_hard_to_find(OTHER.node_id), "nobody is dialled for newer ones"


def test_nobody_is_asked_while_too_much_has_come() -> None:
    envelopes, details = two_books()
    envelopes.take(brief_envelope(OTHER), 0.0)
    details.want([ids(OTHER)], ())
    details.received(BURST_BYTES + 10 * int(BYTES_PER_S), 0.0)
    assert (details.due(9.0), details.due(11.0)) == ([], ids(OTHER))


def test_connected_nodes_find_a_place_and_those_that_have_one_keep_it() -> None:
    envelopes, details = two_books(nodes_max=2)
    crowd = [new_identity(100 + number) for number in range(4)]
    for each in crowd:
        envelopes.take(brief_envelope(each), 0.0)
    names = ids(*crowd)
    details.want([names[:1], names[1:2]], ())
    assert list(details.of_interest) == names[:2]
    details.want([names[::-1]], ())
    assert set(details.of_interest) == set(names[:2]), "no newcomer drives them out"
    details.want([names], {names[3]})
    assert set(details.of_interest) == {names[3], names[0]}, "but one that is there does"


def test_a_question_has_an_end() -> None:
    envelopes, details = two_books()
    crowd = [new_identity(100 + number) for number in range(DUE_MAX + 3)]
    for each in crowd:
        envelopes.take(brief_envelope(each, 2), 0.0)
    details.want([ids(*crowd)], ())
    details.take(details_of(crowd[0]), ids(crowd[0]), -1e6)
    due = details.due(0.0)
    assert due == ids(*crowd[1 : DUE_MAX + 1]), "those come first of which there is nothing, in order"


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"\xc1", "details"),
        (b"", "details"),
        (details_of(OTHER)[:-1] + b"!", "signature"),
        (details_of(OTHER, content=b"\xc1"), "details"),
        (details_of(THIRD), "nobody asked"),
        (brief_envelope(OTHER), "details|number|signature"),
    ],
)
def test_forged_and_malformed_details_are_refused(content: bytes, field: str) -> None:
    envelopes, details = two_books()
    for who in (OTHER, THIRD):
        envelopes.take(brief_envelope(who), 0.0)
    before = dict(envelopes.records())
    details.want([ids(OTHER, THIRD)], ())
    with pytest.raises(BadMessage, match=field):
        details.take(content, ids(OTHER), 0.0)
    assert (dict(envelopes.records()), len(details)) == (before, 0)


def test_details_that_make_a_record_too_large_are_not_taken() -> None:
    name = "\U0001f600" * 200
    files = [FileAnnounce(model_id=f"{n:064x}", name=name, n_layers=1) for n in range(256)]
    models = tuple(
        ShardAnnounce(model_id=each.model_id, name=name, n_layers=1, ranges=()) for each in files[:30]
    )
    record = msgspec.structs.replace(record_of(OTHER), models=models)
    contents = (
        msgspec.msgpack.encode(msgspec.structs.replace(record, files=tuple(files[:number])))
        for number in range(256, 0, -1)
    )
    brief = next(content for content in contents if len(content) <= RECORD_MAX)
    small = msgspec.msgpack.encode(RecordDetails())
    large = msgspec.msgpack.encode(RecordDetails(observed_links=LINKS))
    assert len(brief) + len(large) > RECORD_MAX
    envelopes, details = two_books()
    said = Envelope(node_id=OTHER.node_id, started_at_ms=1000, sequence=0, record=brief, details=2)
    envelopes.take(seal(said, OTHER.sign), 0.0)
    details.want([ids(OTHER)], ())
    assert details.take(details_of(OTHER, content=large), ids(OTHER), 0.0) is None
    assert envelopes.records()[OTHER.node_id] == brief
    assert details.take(details_of(OTHER, content=small), ids(OTHER), 0.0) == OTHER.node_id


def test_a_full_book_of_envelopes_takes_no_details() -> None:
    first = brief_envelope(OTHER)
    envelopes = book(bytes_max=2 * len(first))
    details = DetailsBook(ME.node_id, envelopes, verify)
    envelopes.take(first, 0.0)
    details.want([ids(OTHER)], ())
    large = RecordDetails(observed_links=LINKS)
    assert details.take(details_of(OTHER, content=msgspec.msgpack.encode(large)), ids(OTHER), 0.0) is None
    assert envelopes.n_bytes <= 2 * len(first)


def test_others_are_given_what_they_lack_and_no_more() -> None:
    envelopes, details = two_books()
    own = Details(node_id=ME.node_id, started_at_ms=1, number=4, details=b"own")
    sealed_own, sealed = seal(own, ME.sign), details_of(OTHER, 2)
    envelopes.take(brief_envelope(OTHER), 0.0)
    everything = [AskedDetails(each, 0, 0) for each in ids(ME, OTHER, THIRD)]
    assert details.answer(everything, 10**6) == []
    details.write_own(own, sealed_own)
    details.want([ids(OTHER)], ())
    assert details.answer(everything, 10**6) == [sealed_own]
    details.take(sealed, ids(OTHER), 0.0)
    assert details.answer(everything, 10**6) == [sealed_own, sealed]
    known = [AskedDetails(ME.node_id, 1, 3), AskedDetails(OTHER.node_id, 1000, 2)]
    assert details.answer(known, 10**6) == [sealed_own]
    assert details.answer(everything, len(sealed_own)) == [sealed_own]


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 10**5)), max_size=50))
def test_no_more_comes_than_the_pace_allows(answers: list[tuple[float, int]]) -> None:
    pace, now, n_received, largest = BytesPace(), 0.0, 0, 0
    for wait_s, n_bytes in answers:
        now += wait_s
        if pace.may_ask(now):
            pace.received(n_bytes, now)
            n_received, largest = n_received + n_bytes, max(largest, n_bytes)
    assert n_received <= BURST_BYTES + BYTES_PER_S * now + largest + 1e-6


def test_no_more_is_saved_up_than_for_the_beginning() -> None:
    pace = BytesPace()
    pace.received(1, 0.0)
    pace.received(BURST_BYTES, 1e9)
    assert not pace.may_ask(1e9)
    assert pace.may_ask(1e9 + 1)


# Between nodes.


class Blamed:
    def __init__(self) -> None:
        self.senders: list[NodeId] = []

    def blame(self, sender: NodeId, error: BadMessage) -> None:
        self.senders.append(sender)


class Asking:
    """A node that asks others, and what it asked whom."""

    def __init__(self, connected: Collection[NodeId], **answers: Any) -> None:
        self.envelopes = book()
        self.book = DetailsBook(ME.node_id, self.envelopes, verify)
        self.connected = dict.fromkeys(connected)
        self.answers: dict[NodeId, bytes] = {}
        self.silent: set[NodeId] = set()
        self.asked: list[tuple[NodeId, list[NodeId]]] = []
        self.dialled: list[NodeId] = []
        self.reader = Blamed()
        self.exchange = DetailsExchange(
            self.book, self._ask, self.connected, self.reader, ChangeFeed(), self._dial
        )

    async def _ask(self, node_id: NodeId, kind: int, body: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        assert kind == KIND_DETAILS
        question = msgspec.msgpack.decode(body, type=tuple[AskedDetails, ...])
        self.asked.append((node_id, [each.node_id for each in question]))
        if node_id in self.silent:
            await trio.sleep(30)
            raise DeadlineExceeded("no answer")
        if node_id not in self.answers:
            raise RemoteError("requests of kind 7 are not known here")
        return self.answers[node_id]

    async def _dial(self, node_id: NodeId) -> None:
        await trio.lowlevel.checkpoint()
        self.dialled.append(node_id)
        self.connected[node_id] = None

    def knows(self, *who: Identity) -> None:
        for each in who:
            self.envelopes.take(brief_envelope(each), trio.current_time())
        self.exchange.interests = lambda: [ids(*who)]


def packed(*sealed: bytes) -> bytes:
    return msgspec.msgpack.encode(sealed)


async def test_a_node_is_asked_itself_where_it_is_connected_and_others_of_a_neighbour_of_interest(
    autojump_clock: trio.testing.MockClock,
) -> None:
    strangers = [new_identity(50 + number) for number in range(20)]
    asking = Asking(ids(*strangers, OTHER))
    asking.knows(OTHER, THIRD)
    asking.answers[OTHER.node_id] = packed(details_of(OTHER), details_of(THIRD))
    await asking.exchange.look()
    assert sorted(asking.asked) == sorted([(OTHER.node_id, ids(OTHER)), (OTHER.node_id, ids(THIRD))])
    assert asking.reader.senders == [OTHER.node_id] * 2, "each answer had one that was not asked for"
    assert decode_record(asking.envelopes.records()[THIRD.node_id]) == record_of(THIRD)
    await asking.exchange.look()
    assert len(asking.asked) == 2
    for who in (OTHER, THIRD):
        asking.envelopes.hear_details(who.node_id, 1000, 2)
    assert asking.book.due(trio.current_time() + REFRESH_S - 1) == [], (
        "an answer that had them was not in vain"
    )
    assert len(asking.book.due(trio.current_time() + REFRESH_S)) == 2


async def test_a_node_that_answers_nothing_holds_up_no_other_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    asking = Asking(ids(OTHER, THIRD))
    asking.knows(OTHER, THIRD)
    for silent, answering in ((OTHER, THIRD), (THIRD, OTHER)):
        asking.silent = {silent.node_id}
        asking.answers = {answering.node_id: packed(details_of(answering))}
        with trio.move_on_after(1):
            await asking.exchange.look()
        assert decode_record(asking.envelopes.records()[answering.node_id]) == record_of(answering)
        asking.book.forget(answering.node_id)


async def test_few_nodes_are_asked_for_their_own_details_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    crowd = [new_identity(100 + number) for number in range(ASKED_THEMSELVES_MAX + 3)]
    asking = Asking(ids(*crowd))
    asking.knows(*crowd)
    await asking.exchange.look()
    assert len(asking.asked) == ASKED_THEMSELVES_MAX
    await asking.exchange.look()
    assert sorted(source for source, _ in asking.asked) == sorted(ids(*crowd))


async def test_of_each_model_neighbours_that_have_it_are_asked_several_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """About other nodes."""
    one, another = new_identity(50), new_identity(51)
    of_one = [one, *(new_identity(100 + number) for number in range(ASKED_MAX + 6))]
    of_another = [another, *(new_identity(300 + number) for number in range(3 * ASKED_MAX))]
    asking = Asking([*ids(one, another), *ids(*(new_identity(10 + n) for n in range(20)))])
    asking.knows(*of_one, *of_another)
    sets = [dict.fromkeys(ids(*of_one)), dict.fromkeys(ids(*of_one[1:4], *of_another))]
    asking.exchange.interests = lambda: sets
    await asking.exchange.look()
    questions = [(source, asked) for source, asked in asking.asked if asked != [source]]
    assert len(questions) == QUESTIONS_MAX
    assert all(len(asked) <= ASKED_MAX for _, asked in questions)
    found = [node_id for _, asked in questions for node_id in asked]
    assert len(set(found)) == len(found), "each node is asked about once"
    assert set(ids(*of_one[1:])) <= set(found)
    for source, asked in questions:
        of = of_one if source == one.node_id else of_another
        assert set(asked) <= set(ids(*of)), "nobody else has them"


async def test_one_node_in_a_while_is_dialled_for_its_details(autojump_clock: trio.testing.MockClock) -> None:
    crowd = [new_identity(100 + number) for number in range(3)]
    asking = Asking(())
    asking.knows(*crowd)
    asking.book.want([ids(*crowd)], ())
    for each in crowd:
        for _ in range(3):
            asking.book.in_vain(each.node_id, -1e6)
    await asking.exchange.look()
    assert asking.dialled == ids(crowd[0])
    del asking.connected[crowd[0].node_id]
    await asking.exchange.look()
    assert asking.dialled == ids(crowd[0])
    await trio.sleep(DIAL_EVERY_S)
    await asking.exchange.look()
    assert asking.dialled == ids(*crowd[:2])


async def test_who_has_no_such_neighbour_dials_the_writer_in_the_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stranger = new_identity(50)
    asking = Asking(ids(stranger))
    asking.knows(OTHER, THIRD)
    asking.answers[OTHER.node_id] = packed(details_of(OTHER))
    for _ in range(2):
        await asking.exchange.look()
        await trio.sleep(2 * RETRY_S)
    assert [source for source, _ in asking.asked[:2]] == ids(stranger, stranger)
    assert len(asking.dialled) == 1
    await trio.sleep(DIAL_EVERY_S)
    for _ in range(20):
        await asking.exchange.look()
        await trio.sleep(DIAL_EVERY_S)
    assert set(asking.dialled) == set(ids(OTHER, THIRD))
    assert len(asking.book) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"\xc1",
        packed(b"no details"),
        packed(details_of(OTHER, content=b"\xc1")),
        msgspec.msgpack.encode([bytes(DETAILS_MAX + 2000)]),
        packed(*[details_of(OTHER)] * (ASKED_MAX + 1)),
        packed(*[bytes(DETAILS_MAX)] * (ANSWER_MAX // DETAILS_MAX + 1)),
    ],
)
async def test_a_bad_answer_costs_its_sender_trust(
    autojump_clock: trio.testing.MockClock, answer: bytes
) -> None:
    asking = Asking(ids(THIRD))
    asking.knows(OTHER)
    asking.answers[THIRD.node_id] = answer
    await asking.exchange.look()
    assert asking.reader.senders == ids(THIRD)
    assert asking.book.due(trio.current_time()) == [], "and it is not asked again at once"
    assert len(asking.book) == 0


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode([[ME.node_id, 0, 0]] * (ASKED_MAX + 1))]
)
def test_a_bad_question_is_refused(body: bytes) -> None:
    _, details = two_books()
    exchange = DetailsExchange(details, no_answer, (), Blamed(), ChangeFeed())
    with pytest.raises(RequestRefused):
        exchange.answer(body)


# What a node says.


def speaking(
    nursery: trio.Nursery,
    gossip: KeepingGossip,
    notes: list[Any] | None = None,
    direct: DirectLoads | None = None,
) -> RecordSpread:
    spread = RecordSpread(
        ME,
        verify,
        1,
        nursery,
        ChangeFeed(),
        ask=no_answer,
        connected=(),
        listener=Listener(),
        note=lambda node_id, event, detail="": notes.append((node_id, event)) if notes is not None else None,
        whole_records_max=4,
        direct_loads=direct,
    )
    spread.begin(gossip, (), ())
    return spread


def told(gossip: KeepingGossip) -> list[Envelope | Heartbeat]:
    return [
        unseal(content, Envelope, verify) if topic == MODELS else unseal(content, Heartbeat, verify)
        for topic, content in gossip.contents
    ]


async def test_a_node_of_a_small_swarm_says_everything_to_everybody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gossip = KeepingGossip()
    async with trio.open_nursery() as nursery:
        spread = speaking(nursery, gossip)
        await spread.publish(whole(ME))
        assert await spread.publish_details(whole(ME, 0.5), soon=True)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    said = told(gossip)
    assert [each.record for each in said if isinstance(each, Envelope)] == [whole(ME), whole(ME, 0.5)]
    assert all(each.details is UNSET for each in said)
    asked = msgspec.msgpack.encode([AskedDetails(ME.node_id, 0, 0)])
    assert spread.answer(OTHER.node_id, KIND_DETAILS, asked) == packed()


async def test_a_node_of_a_large_swarm_says_briefly_what_all_need_and_the_rest_when_asked(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gossip = KeepingGossip()
    async with trio.open_nursery() as nursery:
        spread = speaking(nursery, gossip)
        await trio.sleep(1)
        crowd = [new_identity(100 + number) for number in range(5)]
        for each in crowd:
            spread.take(brief_envelope(each), {})
        gossip.contents.clear()
        await spread.publish(whole(ME))
        (said,) = told(gossip)
        assert isinstance(said, Envelope)
        assert (said.record, said.details) == (split_record(whole(ME))[0], 1)
        assert spread.records[ME.node_id] == whole(ME), "the node knows itself"

        assert not await spread.publish_details(whole(ME, 0.5), soon=False)
        assert len(gossip.contents) == 1, "nobody hears of it yet"
        assert spread.records[ME.node_id] == whole(ME, 0.5)
        assert not await spread.publish_details(whole(ME, 0.7), soon=True)
        (heard,) = told(gossip)[1:]
        assert isinstance(heard, Heartbeat)
        assert (heard.details, heard.sequence) == (3, said.sequence)

        asked = msgspec.msgpack.encode([AskedDetails(ME.node_id, 0, 0)])
        (sealed,) = msgspec.msgpack.decode(spread.answer(OTHER.node_id, KIND_DETAILS, asked))
        details = unseal(sealed, Details, verify)
        assert (details.number, details.details) == (3, split_record(whole(ME, 0.7))[1])

        await spread.publish(whole(ME, 0.7))
        assert told(gossip)[-1].details == 3, "they are the same"
        await spread.reach_through(("/ip4/192.0.2.1/tcp/8810/p2p/" + OTHER.node_id + "/p2p-circuit",))
        assert told(gossip)[-1].record == split_record(whole(ME))[0]
        assert spread.records[ME.node_id] == whole(ME, 0.7)
        nursery.cancel_scope.cancel()


async def test_a_swarm_that_has_grown_hears_a_brief_record_with_the_next_change(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gossip = KeepingGossip()
    async with trio.open_nursery() as nursery:
        spread = speaking(nursery, gossip)
        await spread.publish(whole(ME))
        for number in range(5):
            spread.take(brief_envelope(new_identity(100 + number)), {})
        assert await spread.publish_details(whole(ME, 0.5), soon=False), "all had the old ones"
        said = told(gossip)[-1]
        assert isinstance(said, Envelope)
        assert said.details == 1
        assert not await spread.publish_details(whole(ME, 0.7), soon=False)
        nursery.cancel_scope.cancel()


async def test_what_is_no_record_is_published_as_it_is(autojump_clock: trio.testing.MockClock) -> None:
    gossip = KeepingGossip()
    async with trio.open_nursery() as nursery:
        spread = speaking(nursery, gossip)
        for number in range(6):
            spread.take(brief_envelope(new_identity(100 + number)), {})
        await spread.publish(b"half 1")
        said = told(gossip)[-1]
        nursery.cancel_scope.cancel()
    assert isinstance(said, Envelope)
    assert (said.record, said.details) == (b"half 1", UNSET)


async def test_a_swarm_at_the_limit_does_not_change_its_mind(autojump_clock: trio.testing.MockClock) -> None:
    gossip, is_brief = KeepingGossip(), []
    async with trio.open_nursery() as nursery:
        spread = speaking(nursery, gossip)
        crowd = [new_identity(100 + number) for number in range(5)]
        for each in crowd:
            await spread.publish(whole(ME))
            is_brief.append(spread.own.details is not UNSET)
            spread.take(brief_envelope(each), {})
        for each in crowd:
            await spread.publish(whole(ME))
            is_brief.append(spread.own.details is not UNSET)
            spread.book._drop(each.node_id)
        nursery.cancel_scope.cancel()
    assert is_brief == [*(False, False, False, False), *(True, True, True, True), *(False, False)]


async def test_news_of_details_is_heard_and_forgotten_nodes_leave_none(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gossip = KeepingGossip()
    async with trio.open_nursery() as nursery:
        spread = speaking(nursery, gossip)
        spread.take(brief_envelope(OTHER), {})
        beat = Heartbeat(node_id=OTHER.node_id, started_at_ms=1000, sequence=0, beat=1, details=8)
        spread.receive(HEALTH, seal(beat, OTHER.sign))
        assert spread.book.newest_details(OTHER.node_id) == 8
        spread.details.interests = lambda: [ids(OTHER)]
        await spread.details.look()
        assert list(spread._details.of_interest) == ids(OTHER)
        spread.expire(1e6)
        assert list(spread._details.of_interest) == []
        nursery.cancel_scope.cancel()


async def test_what_is_of_interest_is_asked_for_and_stays_in_the_record(
    autojump_clock: trio.testing.MockClock,
) -> None:
    kinds: list[int] = []

    async def ask(node_id: NodeId, kind: int, body: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        kinds.append(kind)
        return packed(details_of(OTHER))

    async with trio.open_nursery() as nursery:
        spread = RecordSpread(
            ME, verify, 1, nursery, ChangeFeed(), ask=ask, connected=ids(OTHER), listener=Listener()
        )
        spread.details.interests = lambda: [ids(OTHER)]
        nursery.start_soon(spread.details.run)
        await trio.sleep(100)
        spread.take(brief_envelope(OTHER), {})
        await trio.sleep(10)
        assert kinds == [KIND_DETAILS]
        assert decode_record(spread.records[OTHER.node_id]) == record_of(OTHER)
        spread.take(brief_envelope(OTHER, sequence=1), {})
        assert decode_record(spread.records[OTHER.node_id]) == record_of(OTHER)
        nursery.cancel_scope.cancel()


async def test_a_malformed_part_of_a_record_costs_its_author_and_who_passed_it_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    notes: list[Any] = []
    async with trio.open_nursery() as nursery:
        spread = speaking(nursery, KeepingGossip(), notes)
        spread.take(brief_envelope(OTHER), {})
        spread._details.want([ids(OTHER)], ())
        with pytest.raises(BadMessage) as caught:
            spread._details.take(details_of(OTHER, content=b"\xc1"), ids(OTHER), 0.0)
        spread.blame(THIRD.node_id, caught.value)
        nursery.cancel_scope.cancel()
    assert notes == [
        (THIRD.node_id, TrustEvent.BROKE_PROTOCOL),
        (OTHER.node_id, TrustEvent.BROKE_PROTOCOL),
    ]
