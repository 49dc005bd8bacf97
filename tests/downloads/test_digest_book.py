"""What is known of a file's tensors: what nobody contradicts, whoever says it in whatever order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.downloads.digest_book import HERE, MAX_HEARD, DigestBook, digests_of, runs_of
from swarmllm_proto.file_digests import DigestRun

N_TENSORS = 8


def true(tensor: int) -> bytes:
    return bytes([tensor]) * 32


def false(tensor: int) -> bytes:
    return bytes([tensor + 100]) * 32


def said(*tensors: int, lies: tuple[int, ...] = ()) -> dict[int, bytes]:
    return {t: true(t) for t in tensors} | {t: false(t) for t in lies}


def book_of(own: dict[int, bytes], **heard: dict[int, bytes]) -> DigestBook:
    book = DigestBook(N_TENSORS, own)
    for node_id, digests in heard.items():
        book.hear(node_id, runs_of(digests))
    return book


statements = st.dictionaries(st.integers(0, N_TENSORS - 1), st.integers(0, 2).map(lambda n: bytes([n]) * 32))


@given(st.dictionaries(st.integers(0, 65_535), st.binary(min_size=32, max_size=32)))
def test_runs_say_the_same_as_digests(digests: dict[int, bytes]) -> None:
    runs = runs_of(digests)
    assert digests_of(runs) == digests
    ends = [(run.first, run.first + len(run.digests) // 32) for run in runs]
    assert all(end < start for (_, end), (start, _) in pairwise(ends))


def test_parts_make_the_whole() -> None:
    book = book_of(said(0, 1, 2), b=said(2, 3, 4), c=said(5, 6, 7))
    assert book.known() == said(*range(N_TENSORS))
    assert book.missing() == ()
    assert book.contradictions() == ()


def test_who_contradicts_this_node_is_not_believed_about_anything() -> None:
    book = book_of(said(0, 1), b=said(3, 4, lies=(1,)), c=said(5))
    assert book.known() == said(0, 1, 5)
    (contradiction,) = book.contradictions()
    assert (contradiction.tensor, contradiction.nodes) == (1, (HERE, "b"))


def test_of_two_others_that_contradict_each_other_neither_is_believed() -> None:
    book = book_of(said(0), b=said(3, 4), c=said(5, lies=(4,)), d=said(3, 6))
    assert book.known() == said(0, 3, 6)
    (contradiction,) = book.contradictions()
    assert (contradiction.tensor, contradiction.nodes) == (4, ("b", "c"))


def test_one_who_lies_to_this_node_does_not_bring_others_into_doubt() -> None:
    book = book_of(said(0), b=said(lies=(0, 3)), c=said(3))
    assert book.known() == said(0, 3)


def test_what_a_node_says_now_replaces_what_it_said() -> None:
    book = book_of(said(0), b=said(lies=(0,)))
    assert book.hear("b", runs_of(said(1)))
    assert book.known() == said(0, 1)
    assert not book.hear("b", runs_of(said(1)))
    assert book.hear("b", ())
    assert book.known() == said(0)


def test_tensors_that_the_file_does_not_have_make_a_statement_nonsense() -> None:
    book = book_of(said(0))
    assert not book.hear("b", runs_of(said(1, N_TENSORS)))
    assert book.known() == said(0)


def test_no_more_nodes_are_listened_to_than_there_is_room_for() -> None:
    book = DigestBook(N_TENSORS)
    answers = [book.hear(f"n{i}", [DigestRun(1, true(1))]) for i in range(MAX_HEARD + 1)]
    assert answers == [True] * MAX_HEARD + [False]


@given(statements, st.dictionaries(st.sampled_from("bcde"), statements), st.randoms())
def test_no_doubted_word_counts_and_the_order_does_not_matter(own, heard, random) -> None:  # type: ignore[no-untyped-def]
    book = book_of(own, **heard)
    doubted = {node for each in book.contradictions() for node in each.nodes}
    known = book.known()
    assert known.items() >= own.items()
    for tensor, digest in known.items():
        sources = [node for node, digests in heard.items() if digests.get(tensor) == digest]
        assert tensor in own or any(node not in doubted for node in sources)
    for node, digests in heard.items():
        if node not in doubted:
            assert known.items() >= digests.items()
    shuffled = list(heard.items())
    random.shuffle(shuffled)
    assert book_of(own, **dict(shuffled)).known() == known
