"""Which shares of others are followed: whose, how many, for how long, and what became of them before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B, C, D

from swarmllm.node.placing.accepted_shares import (
    ACCEPTED_MAX,
    ALLOWANCE,
    ALLOWANCE_PER_S,
    GONE_S,
    REFUSED_MAX_S,
    REFUSED_S,
    AcceptedShares,
    accepted_writers,
    accepts,
)
from swarmllm.node.placing.share_book import FETCHED_MAX, FILE_NAME, ShareBook, open_share_book
from swarmllm_proto.identifiers import ModelId, NodeId, PublishedName
from swarmllm_proto.swarm import NodeCapability, NodeRecord, SharedModel


def model(n: int) -> ModelId:
    return ModelId(f"{n:064x}")


def sharing(node_id: NodeId, *models: int) -> NodeRecord:
    shares = tuple(SharedModel(model_id=model(n), name=f"m{n}") for n in models)
    return NodeRecord(node_id=node_id, shares=shares)


def records(*said: NodeRecord) -> dict[NodeId, NodeRecord]:
    return {record.node_id: record for record in said}


@pytest.mark.parametrize(
    ("accept", "is_private", "writers"),
    [
        (("private",), False, ()),
        (("private",), True, ("members",)),
        ((B, "private"), False, (B,)),
        (("members",), False, ("members",)),
        (("members", "private"), True, ("members",)),
        ((), True, ()),
    ],
)
def test_only_members_of_a_private_swarm_are_accepted_by_default(
    accept: tuple[str, ...], is_private: bool, writers: tuple[str, ...]
) -> None:
    assert accepted_writers(accept, is_private=is_private) == writers


def test_a_node_says_whose_shares_it_accepts() -> None:
    assert not accepts(NodeCapability(), B)
    assert accepts(NodeCapability(accepts_shares_of=("members",)), B)
    assert accepts(NodeCapability(accepts_shares_of=(B,)), B)
    assert not accepts(NodeCapability(accepts_shares_of=(B,)), C)


def test_a_model_that_cannot_be_fetched_leaves_its_place_and_comes_back_later_and_later() -> None:
    followed = AcceptedShares(("members",), places=1)
    said = records(sharing(B, 1, 2))
    assert followed.follow(A, said, 0.0) == (model(1),)
    followed.cannot_be_fetched(model(1), 10.0)
    assert followed.follow(A, said, 11.0) == (model(2),)
    followed.cannot_be_fetched(model(2), 12.0)
    assert followed.follow(A, said, 13.0) == ()
    assert followed.follow(A, said, 10.0 + REFUSED_S) == (model(1),)
    followed.cannot_be_fetched(model(1), 700.0)
    assert model(1) not in followed.follow(A, records(sharing(B, 1)), 700.0 + 1.9 * REFUSED_S)
    assert model(1) in followed.follow(A, records(sharing(B, 1)), 700.0 + 2 * REFUSED_S)


def test_what_was_fetched_after_all_starts_with_a_short_pause_again() -> None:
    followed = AcceptedShares(("members",))
    said = records(sharing(B, 1))
    for _ in range(12):
        followed.cannot_be_fetched(model(1), 0.0)
    assert followed.follow(A, said, REFUSED_MAX_S - 1) == ()
    followed.was_fetched(model(1))
    assert followed.follow(A, said, 1.0) == (model(1),)


def test_a_writer_that_brings_ever_new_models_is_slowed_down_and_no_other_with_it() -> None:
    followed = AcceptedShares(("members",))
    begun: set[ModelId] = set()
    for look in range(100):
        begun |= set(followed.follow(A, records(sharing(B, *range(8 * look, 8 * look + 8))), look * 5.0))
    assert len(begun) <= ALLOWANCE + 500 * ALLOWANCE_PER_S + 1
    honest = followed.follow(A, records(sharing(B, *range(5000, 5008)), sharing(C, 9999)), 501.0)
    assert model(9999) in honest


def test_the_own_shares_of_a_node_are_charged_to_nobody() -> None:
    followed = AcceptedShares(())
    for look in range(40):
        assert followed.follow(A, records(sharing(A, look)), float(look)) == (model(look),)


@pytest.mark.parametrize("own", [A, B])
def test_where_there_is_one_place_this_node_has_it_whatever_its_id_is(own: NodeId) -> None:
    other = B if own == A else A
    followed = AcceptedShares(("members",), places=1)
    assert followed.follow(own, records(sharing(other, 1), sharing(own, 2)), 0.0) == (model(2),)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100), st.lists(st.lists(st.integers(0, 40), max_size=8), min_size=3, max_size=3)
        ),
        max_size=30,
    )
)
def test_there_are_never_more_than_the_places_and_only_what_an_accepted_node_shared(
    looks: list[tuple[float, list[list[int]]]],
) -> None:
    followed = AcceptedShares((B, C), places=5)
    now_s, shared = 0.0, set()
    for step_s, (of_b, of_c, of_d) in looks:
        now_s += step_s
        shared |= {model(n) for n in (*of_b, *of_c)}
        said = records(sharing(B, *of_b), sharing(C, *of_c), sharing(D, *of_d))
        found = followed.follow(A, said, now_s)
        assert len(found) <= 5
        assert set(found) <= {model(n) for n in (*of_b, *of_c)}
    assert set(followed.follow(A, {}, now_s + GONE_S + 1)) == set()
    assert ACCEPTED_MAX >= 5


async def test_the_book_of_shares_is_read_as_it_was_written(tmp_path: Path) -> None:
    book = open_share_book(tmp_path)
    assert (book.shared, book.fetched) == ({}, {})
    book.shared |= {model(1): "one", model(2): "two"}
    book.sources[model(2)] = PublishedName("hf:ORG/REPO:FILE.gguf")
    book.fetched |= dict.fromkeys(map(model, range(FETCHED_MAX + 5)))
    await book.save()
    again = open_share_book(tmp_path)
    assert again.shared == {model(1): "one", model(2): "two"}
    assert again.sources == {model(2): "hf:ORG/REPO:FILE.gguf"}
    assert list(again.fetched) == list(map(model, range(5, FETCHED_MAX + 5)))


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"version": 2}', b'{"version": 1, "shared": [{"model_id": "x", "name": "y"}]}']
)
def test_a_damaged_book_is_ignored_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert open_share_book(tmp_path).shared == {}
    assert "is ignored" in caplog.text


async def test_a_book_without_a_file_is_kept_in_memory() -> None:
    book = ShareBook()
    book.shared[model(1)] = "one"
    await book.save()
    assert book.shared == {model(1): "one"}
