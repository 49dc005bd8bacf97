"""Which encoder is asked and when the next one begins, what travels in how many parts, and when rows are
alike: the rules, without a node."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B, C, D

from swarmllm.pipeline.check.verdict import Match
from swarmllm.pipeline.prefix.choice import HANDLING_S, LANES, HolderPath
from swarmllm.pipeline.vision.choice import (
    LEAST_TRUST,
    PROJECTORS_MAX,
    REQUEST_S,
    USUAL_ROWS,
    Encoder,
    by_projector,
    in_order,
)
from swarmllm.pipeline.vision.race import (
    AT_ONCE,
    BUSY_PAUSE_S,
    BUSY_S,
    FAR,
    LEAST_S,
    MOST_S,
    NODES_MAX,
    SILENCE_S,
    USUAL_S,
    EncodingTimes,
    Race,
    Runner,
)
from swarmllm.pipeline.vision.similarity import FLAT, LIMIT, WORST_ROW, picture_distance, similarity
from swarmllm.pipeline.vision.slices import (
    PICTURE_TOKENS_MAX,
    TOKENS_MAX,
    WrongPicture,
    assembled,
    parts_of,
    require_places,
    rows_each,
)
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.workerpool.encoders import EncodedPicture, encoded_picture
from swarmllm_proto.identifiers import Digest, ModelId, NodeId
from swarmllm_proto.ipc import PicturePart
from swarmllm_proto.limits import IMAGE_MAX, IMAGE_ROWS_MAX, MIB
from swarmllm_proto.swarm.vision import bound_digest

N_EMBD = 4


def test_a_slow_encoding_counts_at_once_and_a_fast_one_by_and_by() -> None:
    paces = EncodingTimes()
    assert paces.expected_s(A) == USUAL_S
    for took_s, expected_s in ((4.0, 4.0), (10.0, 10.0), (5.0, 9.0), (9.0, 9.0)):
        paces.took(A, took_s)
        assert paces.expected_s(A) == pytest.approx(expected_s)


def test_the_paces_of_the_latest_nodes_are_kept() -> None:
    paces = EncodingTimes()
    for n in range(NODES_MAX):
        paces.took(NodeId(f"n{n}"), 7.0)
    paces.took(NodeId("n0"), 7.0)
    paces.took(NodeId("new"), 7.0)
    known = [name for name in ("n0", "n1", "n2", "new") if paces.expected_s(NodeId(name)) > USUAL_S]
    assert known == ["n0", "n2", "new"]


@pytest.mark.parametrize(
    ("work_s", "travel_s", "late_after_s"),
    [
        (0.5, 0.0, LEAST_S),
        (3.0, 0.0, FAR * 3.0),
        (3.0, 2.0, FAR * 5.0),
        (100.0, 0.0, MOST_S),
        (100.0, 30.0, MOST_S + FAR * 30.0),
    ],
)
def test_patience_grows_with_what_is_expected_and_not_without_end(
    work_s: float, travel_s: float, late_after_s: float
) -> None:
    assert Runner(A, work_s, travel_s).late_after_s == pytest.approx(late_after_s)
    assert Runner(A, slice_s=3.0).silence_s == pytest.approx(SILENCE_S + FAR * 3.0)


def begun(race: Race, now_s: float) -> str:
    """Who begins, all of them."""
    return " ".join(runner.node_id for runner in iter(lambda: race.begin(now_s), None))


def race_of(*names: str, **fields: float) -> Race:
    return Race.of([Runner(NodeId(name), **fields) for name in names], 100.0)


def test_the_next_begins_beside_one_that_is_silent_and_there_are_no_more_than_so_many() -> None:
    names = [f"n{n}" for n in range(AT_ONCE + 1)]
    race = race_of(*names)
    assert race.begin(99.9) is None
    now_s = 100.0
    for name in names[:AT_ONCE]:
        assert race.look_again_s() == pytest.approx(now_s)
        assert begun(race, now_s) == name
        now_s += SILENCE_S
    assert race.look_again_s() == inf
    assert begun(race, 1000.0) == ""
    race.failed(NodeId(names[0]), 1000.0)
    assert begun(race, 1000.0) == names[AT_ONCE]
    assert not race.is_over
    for name in names[1:]:
        race.failed(NodeId(name), 1000.0)
    assert race.is_over
    assert not race.is_busy


def test_one_that_speaks_is_late_when_its_patience_is_over() -> None:
    race = race_of("a", "b", work_s=3.0)
    assert begun(race, 100.0) == "a"
    race.heard(NodeId("a"), 101.5)
    race.heard(NodeId("nobody"), 101.5)
    assert race.look_again_s() == pytest.approx(101.5 + SILENCE_S)
    race.heard(NodeId("a"), 105.5)
    assert race.look_again_s() == pytest.approx(100.0 + FAR * 3.0)
    assert begun(race, 105.9) == ""
    assert begun(race, 106.0) == "b"


def test_whoever_is_busy_is_asked_again_for_a_while() -> None:
    race = race_of("a")
    now_s = 100.0
    while begun(race, now_s) == "a":
        race.failed(NodeId("a"), now_s, is_busy=True)
        assert race.is_busy
        if race.is_over:
            break
        assert race.look_again_s() == pytest.approx(now_s + BUSY_PAUSE_S)
        assert begun(race, now_s + BUSY_PAUSE_S - 0.1) == ""
        now_s += BUSY_PAUSE_S
    assert now_s == pytest.approx(100.0 + BUSY_S)


def test_one_that_begins_again_is_busy_no_more_and_others_begin_meanwhile() -> None:
    race = race_of("a", "b")
    assert begun(race, 100.0) == "a"
    race.failed(NodeId("a"), 100.0, is_busy=True)
    assert begun(race, 100.0) == "b"
    race.failed(NodeId("b"), 100.5)
    assert begun(race, 100.0 + BUSY_PAUSE_S) == "a"
    assert not race.is_busy


def test_who_wins_took_what_went_by_without_travelling_and_the_late_are_named() -> None:
    race = race_of("a", "b", "c", travel_s=0.5)
    assert begun(race, 100.0) == "a"
    assert begun(race, 102.0) == "b"
    race.heard(NodeId("b"), 103.0)
    assert race.won(NodeId("b"), 104.0) == pytest.approx(1.5)
    assert race.overtaken(101.9) == []
    assert race.overtaken(104.0) == [("a", pytest.approx(3.5), True)]
    race.heard(NodeId("a"), 104.0)
    assert race.overtaken(105.0) == [("a", pytest.approx(4.5), False)], "late, and it lives"
    assert race.won(NodeId("a"), 100.2) == 0.0


def encoder(node_id: str, **fields: Any) -> Encoder:
    fields = {"projector": Digest("p"), "trust": 1.0, "rtt_s": 0.01, "bytes_per_s": 1e6} | fields
    path = HolderPath(NodeId(node_id), fields.pop("rtt_s"), fields.pop("bytes_per_s"))
    return Encoder(path, **fields)


def test_what_an_encoding_takes_is_its_work_and_one_slice_after_the_other() -> None:
    one = encoder(A, n_active=3, encoding_s=2.0, rtt_s=0.1)
    assert one.work_s == pytest.approx(3 * REQUEST_S + 2.0)
    n_embd, picture_bytes = 4096, 2 * IMAGE_MAX + 1
    rows_bytes = 4 * n_embd * USUAL_ROWS
    n_slices = 3 + -(-rows_bytes // IMAGE_ROWS_MAX)
    travel_s = (picture_bytes + rows_bytes) / 1e6 + n_slices * (0.1 + HANDLING_S)
    assert one.travel_s(picture_bytes, n_embd) == pytest.approx(travel_s)
    assert HolderPath(A, 0.1, 1e6).takes_s(0, LANES) == pytest.approx(0.1 + HANDLING_S)
    assert one.takes_s(picture_bytes, n_embd) == pytest.approx(travel_s + one.work_s)
    half = encoder(A, n_active=3, encoding_s=2.0, rtt_s=0.1, trust=0.5)
    assert half.takes_s(picture_bytes, n_embd) == pytest.approx(2 * (travel_s + one.work_s))
    none = encoder(A, n_active=3, encoding_s=2.0, rtt_s=0.1, trust=0.0)
    assert none.takes_s(picture_bytes, n_embd) == pytest.approx((travel_s + one.work_s) / LEAST_TRUST)


@pytest.mark.parametrize(
    ("picture_bytes", "n_embd", "n_bytes"),
    [(MIB, 4, MIB), (9 * IMAGE_MAX, 4, IMAGE_MAX), (1, 64, 4 * 64 * USUAL_ROWS), (1, 10**4, IMAGE_ROWS_MAX)],
)
def test_the_largest_slice_is_of_the_picture_or_of_its_rows(
    picture_bytes: int, n_embd: int, n_bytes: int
) -> None:
    found_s = encoder(A).slice_s(picture_bytes, n_embd)
    assert found_s == pytest.approx(n_bytes / 1e6 + 0.01 + HANDLING_S)


def test_doubtful_encoders_come_last_and_the_first_stage_first() -> None:
    first, quick = encoder(A, is_first_stage=True, encoding_s=9.0), encoder(B)
    slow, doubtful = encoder(C, encoding_s=2.0), encoder(D, is_doubtful=True, is_first_stage=True)
    assert in_order([doubtful, slow, quick, first], MIB, 64) == [first, quick, slow, doubtful]
    alike = [encoder(node_id) for node_id in sorted((A, B, C))]
    assert in_order(reversed(alike), MIB, 64) == alike


def test_known_projectors_come_first_and_there_are_no_more_than_so_many() -> None:
    ordered = [encoder(f"n{n}", projector=Digest(f"p{n % (PROJECTORS_MAX + 1)}")) for n in range(10)]
    found = by_projector(ordered, [Digest("p3"), Digest("unheld")])
    assert list(found) == ["p3", "p0", "p1", "p2"]
    assert found[Digest("p1")] == [ordered[1], ordered[6]]
    assert list(by_projector(ordered)) == [f"p{n}" for n in range(PROJECTORS_MAX)]


parts_lists = st.lists(
    st.one_of(
        st.integers(1, 6).map(lambda n: PicturePart((), n)),
        st.sampled_from([1, 3, TOKENS_MAX, TOKENS_MAX + 1]).map(lambda n: PicturePart((7,) * n)),
    ),
    min_size=1,
    max_size=6,
)


@given(parts_lists)
def test_the_parts_that_travel_make_the_same_picture_again(parts: list[PicturePart]) -> None:
    n_rows = sum(part.n_rows for part in parts)
    if not n_rows:
        return
    rows = np.arange(n_rows * N_EMBD, dtype=np.float32).reshape(n_rows, N_EMBD)
    encoded = encoded_picture(parts, rows, N_EMBD)
    travel = parts_of(encoded)
    assert all(len(part.tokens) <= TOKENS_MAX for part in travel)
    again = encoded_picture(travel, rows, N_EMBD)
    assert np.array_equal(again.tokens, encoded.tokens)
    assert again.ends == encoded.ends


def test_as_many_rows_as_fit_are_in_one_response() -> None:
    assert rows_each(1024) == IMAGE_ROWS_MAX // 4096
    assert rows_each(IMAGE_ROWS_MAX // 4) == 1
    assert rows_each(IMAGE_ROWS_MAX // 4 + 1) == 0


MODEL, PROJECTOR, SHOWN = ModelId("1" * 64), Digest("2" * 64), Digest("3" * 64)


def put_together(parts: tuple[PicturePart, ...], rows: bytes, digest: bytes | None = None) -> EncodedPicture:
    digest = bound_digest(MODEL, PROJECTOR, SHOWN, parts, rows) if digest is None else digest
    return assembled(MODEL, PROJECTOR, SHOWN, parts, rows, digest, n_embd=N_EMBD, n_vocab=100)


ROWS = np.ones((2, N_EMBD), "<f4").tobytes()


@pytest.mark.parametrize(
    ("parts", "rows", "digest", "event"),
    [
        ((PicturePart((), 2),), ROWS, b"another", TrustEvent.DAMAGED),
        ((PicturePart((100,)), PicturePart((), 2)), ROWS, None, TrustEvent.BROKE_PROTOCOL),
        (
            (PicturePart((1,) * PICTURE_TOKENS_MAX), PicturePart((1,)), PicturePart((), 2)),
            ROWS,
            None,
            TrustEvent.BROKE_PROTOCOL,
        ),
        ((PicturePart((), 3),), ROWS, None, TrustEvent.BROKE_PROTOCOL),
        ((PicturePart((), 2),), ROWS[:-1], None, TrustEvent.BROKE_PROTOCOL),
        ((PicturePart((), 2),), np.full((2, N_EMBD), np.nan, "<f4").tobytes(), None, TrustEvent.BAD_NUMBERS),
    ],
    ids=["digest", "vocabulary", "tokens", "rows", "bytes", "numbers"],
)
def test_what_a_picture_cannot_be_says_what_its_sender_did(
    parts: tuple[PicturePart, ...], rows: bytes, digest: bytes | None, event: TrustEvent
) -> None:
    with pytest.raises(WrongPicture) as raised:
        put_together(parts, rows, digest)
    assert raised.value.trust_event is event


def test_the_largest_token_and_the_most_tokens_are_taken() -> None:
    found = put_together((PicturePart((99,) * PICTURE_TOKENS_MAX), PicturePart((), 2)), ROWS)
    assert len(found.tokens) == PICTURE_TOKENS_MAX + 2


def rows_picture(rows: Any, *parts: PicturePart) -> EncodedPicture:
    rows = np.array(rows, np.float32)
    return encoded_picture(parts or (PicturePart((), len(rows)),), rows, rows.shape[1])


SPECIAL = [[3.0, 0.0], [0.0, 3.0], [-3.0, 0.0], [0.0, -3.0]]
"""Their mean is zero: what is special about each is 3 long."""


def test_the_distance_is_the_mean_of_what_rows_are_off_by_what_is_special_about_them() -> None:
    one = rows_picture(SPECIAL)
    off = np.array(SPECIAL)
    off[1] += (0.0, 1.5)
    off[2] += (1.5, 0.0)
    assert picture_distance(one, one) == 0.0
    assert picture_distance(one, rows_picture(off)) == pytest.approx((0.5 + 0.5) / 4)
    far = np.array(SPECIAL)
    far[0] += 1000.0
    assert picture_distance(one, rows_picture(far)) == pytest.approx(WORST_ROW / 4), "one row has its limit"


def test_rows_of_a_picture_that_is_the_same_everywhere_count_as_a_little_apart() -> None:
    flat = rows_picture([[10.0, 0.0]] * 3)
    moved = rows_picture([[10.0, 0.5]] * 3)
    assert picture_distance(flat, moved) == pytest.approx(0.5 / (FLAT * 10.0))


@pytest.mark.parametrize(("factor", "match"), [(0.99, Match.CLOSE), (1.01, Match.WRONG)])
def test_rows_are_alike_up_to_the_limit_in_either_order(factor: float, match: Match) -> None:
    one, other = rows_picture(SPECIAL), rows_picture(np.array(SPECIAL) * (1 + LIMIT * factor))
    smaller_side = picture_distance(other, one)
    assert smaller_side < picture_distance(one, other)
    assert similarity(one, other) is similarity(other, one) is match
    assert similarity(one, rows_picture(SPECIAL)) is Match.EQUAL


def test_rows_at_other_places_or_with_other_tokens_are_of_another_picture() -> None:
    rows = PicturePart((), 2)
    one = rows_picture(SPECIAL, rows, PicturePart((7,)), rows)
    assert similarity(one, rows_picture(SPECIAL, rows, PicturePart((8,)), rows)) is Match.WRONG
    assert similarity(one, rows_picture(SPECIAL, rows, rows, PicturePart((7,)))) is Match.WRONG
    joined = rows_picture(SPECIAL, PicturePart((), 4))
    assert similarity(joined, rows_picture(SPECIAL, rows, rows)) is Match.WRONG


def test_the_reason_is_the_text_of_the_error() -> None:
    error = WrongPicture("why")
    assert (str(error), error.trust_event) == ("why", TrustEvent.BROKE_PROTOCOL)


def test_the_token_nought_is_a_token() -> None:
    rows = np.ones((1, N_EMBD), np.float32)
    parts = (PicturePart((0, 5)), PicturePart((), 1), PicturePart((0,)))
    assert parts_of(encoded_picture(parts, rows, N_EMBD)) == parts


GRID, SEEING, PLAIN = PicturePart((), 6, 3), PicturePart((), 6, 0, False), PicturePart((), 6)


@pytest.mark.parametrize(
    ("architecture", "able"), [("qwen2vl", GRID), ("gemma3", SEEING), ("llama", PLAIN), ("qwen2", PLAIN)]
)
def test_how_rows_stand_travels_and_is_as_the_model_has_it(architecture: str, able: PicturePart) -> None:
    rows = np.arange(12 * N_EMBD, dtype=np.float32).reshape(12, N_EMBD)
    for part in (GRID, SEEING, PLAIN, PicturePart((), 6, 3, False)):
        parts = (PicturePart((7,)), able, part)
        encoded = encoded_picture(parts, rows, N_EMBD)
        assert parts_of(encoded) == parts
        if part == able:
            require_places(encoded, architecture)
        else:
            with pytest.raises(WrongPicture, match="do not stand as those of pictures"):
                require_places(encoded, architecture)


def test_how_rows_stand_is_in_the_digest_and_compared_by_checks() -> None:
    rows = np.ones((6, N_EMBD), np.float32)
    laid_out = [GRID, SEEING, PLAIN, PicturePart((), 6, 2)]
    digests = {bound_digest("0" * 64, "1" * 64, "2" * 64, (part,), rows.tobytes()) for part in laid_out}
    assert len(digests) == 4
    encoded = [encoded_picture((part,), rows, N_EMBD) for part in laid_out]
    assert [similarity(encoded[0], other) is Match.EQUAL for other in encoded] == [True, False, False, False]


def test_rows_that_cannot_stand_so_are_no_picture() -> None:
    rows = np.ones((7, N_EMBD), np.float32)
    with pytest.raises(ValueError, match="7 rows on lines of 3"):
        encoded_picture((PicturePart((), 7, 3),), rows, N_EMBD)
