"""What is drawn for a check, and what follows from its rows: pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.pipeline.check.recompute import batches, regrouped
from swarmllm.pipeline.check.sampling import (
    CHECKED_TOKENS,
    DISTRUSTED,
    DRAWN_TOKENS,
    EVIDENCE_BYTES_MAX,
    STRANGERS,
    STRETCH_ROWS,
    Budget,
    draw_stage,
    draw_stretch,
    draw_tokens,
    rate,
)
from swarmllm.pipeline.check.thresholds import OTHER_KV, SAME_KV, TOLERANCE, limits
from swarmllm.pipeline.check.verdict import (
    Evidence,
    Match,
    Sampled,
    TokenEvidence,
    Verdict,
    before_computing,
    compare,
    distance,
    judge,
    judge_tokens,
)
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN
from swarmllm_proto.swarm import Stage
from swarmllm_proto.tensors import Tensor

A, B, C, D = (node_id_named(name) for name in "abcd")
STAGES = tuple(
    Stage(node_id=node_id, start=3 * index, end=3 * index + 3) for index, node_id in enumerate((A, B, C, D))
)


def test_the_rate_rises_for_strangers_and_falls_with_trust() -> None:
    assert rate(1.0, 0.0625) == 0.0625
    assert rate(NEUTRAL, 0.0625) == STRANGERS * 0.0625
    assert rate(NEUTRAL - 1e-9, 0.0625) == rate(WORK_MIN, 0.0625) == DISTRUSTED * 0.0625
    assert rate(0.5, 0.5) == rate(0.1, 0.5) == 1.0
    assert rate(0.0, 0.0) == 0.0
    assert rate(1.0, 0.0625, tells=False) == DISTRUSTED * 0.0625


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_nobody_is_checked_less_often_for_being_trusted_less(low: float, high: float, base: float) -> None:
    low, high = sorted((low, high))
    assert base <= rate(high, base) * (1 + 1e-9)
    assert rate(low, base) >= rate(high, base) * (1 - 1e-9)


def test_a_stranger_that_always_cheats_is_drawn_within_twenty_requests() -> None:
    """And one that cheats in every tenth request mostly within a hundred."""
    drawn, base = random.Random(3), 0.0625
    firsts = []
    for _ in range(2000):
        n = 1
        while draw_stage(STAGES[:2], A, lambda node_id: rate(NEUTRAL, base), drawn.random) is None:
            n += 1
        firsts.append(n)
    assert np.mean([n <= 20 for n in firsts]) > 0.99
    assert np.mean(firsts) == pytest.approx(3.2, rel=0.1)
    assert 1 - (1 - rate(NEUTRAL, base) / 10) ** 100 > 0.9


def test_every_stage_elsewhere_is_drawn_as_often_as_its_node_asks_for() -> None:
    drawn, counts = random.Random(1), dict.fromkeys([None, 0, 1, 2, 3], 0)
    for _ in range(8000):
        counts[draw_stage(STAGES, A, lambda node_id: 0.25 if node_id == B else 0.05, drawn.random)] += 1
    assert counts[1] / 8000 == pytest.approx(0.24, abs=0.02)
    assert counts[2] / 8000 == pytest.approx(counts[3] / 8000, abs=0.01) == pytest.approx(0.045, abs=0.01)
    assert counts[0] == 0
    assert draw_stage(STAGES[:1], A, lambda node_id: 1.0, drawn.random) is None
    assert draw_stage(STAGES[:1], B, lambda node_id: 1.0, drawn.random) == 0
    assert draw_stage(STAGES, A, lambda node_id: 0.0, drawn.random) is None


@given(
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.sampled_from([16, 1024, 16384, 2**22, 2**24]),
    st.floats(0, 1, exclude_max=True),
)
def test_a_stretch_lies_among_the_rows_that_were_computed_and_fit(
    first: int, n_rows: int, row_bytes: int, chance: float
) -> None:
    stretch = draw_stretch(n_rows, row_bytes, lambda: chance, first)
    if stretch is None:
        assert first >= min(n_rows, EVIDENCE_BYTES_MAX // row_bytes)
        return
    assert first <= stretch.position < stretch.end <= n_rows
    assert 0 < stretch.n_rows <= STRETCH_ROWS
    assert stretch.end * row_bytes <= EVIDENCE_BYTES_MAX


def test_every_stretch_may_be_drawn() -> None:
    chances = [chance / 100 for chance in range(100)]
    drawn = {draw_stretch(100, 16, partial(float, chance), 7) for chance in chances}
    assert sorted(drawn) == [(7, 32), (39, 32), (71, 29)]


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 200))
def test_batches_are_the_prompts_chunks_and_then_small(n_rows: int, n_prompt: int, chunk: int) -> None:
    parts = list(batches(n_rows, n_prompt, chunk))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == n_rows
    for part in parts:
        if part.start < n_prompt:
            assert part.stop <= n_prompt
            assert part.start % chunk == 0
        else:
            assert part.stop - part.start <= STRETCH_ROWS


def rows(seed: int, n: int = 4) -> Tensor:
    return np.random.default_rng(seed).standard_normal((n, 64)).astype(np.float32)


CAME_IN, TRUE = rows(0), rows(0) + 2 * rows(1)
NEAR = (TRUE * 1.01).astype(np.float32)
FALSE = rows(2)


def test_the_distance_counts_what_the_layers_added() -> None:
    assert distance(TRUE, TRUE, CAME_IN) == 0
    assert distance(TRUE, CAME_IN, CAME_IN) == pytest.approx(1)
    assert distance(TRUE, TRUE + 0.1 * (TRUE - CAME_IN), CAME_IN) == pytest.approx(0.1, rel=1e-3)
    one = TRUE.copy()
    one[0] = 0
    assert 0.2 < distance(TRUE, one, CAME_IN) < 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_one_row_that_is_no_number_or_huge_is_wrong_in_a_whole_stretch(value: float) -> None:
    came_in, true = rows(3, STRETCH_ROWS), rows(3, STRETCH_ROWS) + rows(4, STRETCH_ROWS)
    reported = true.copy()
    reported[5, 7] = value
    assert distance(true, reported, came_in) == pytest.approx(2 / STRETCH_ROWS)
    assert compare(true, reported, came_in) is Match.WRONG


def test_rows_that_layers_did_not_change_are_compared_all_the_same() -> None:
    assert compare(CAME_IN, CAME_IN, CAME_IN) is Match.EQUAL
    assert compare(CAME_IN, NEAR, CAME_IN) is Match.WRONG
    assert compare(TRUE, TRUE[:2], CAME_IN) is Match.WRONG


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 200))
def test_other_batches_are_large_where_the_requests_were_small(
    n_rows: int, n_prompt: int, chunk: int
) -> None:
    parts = list(regrouped(n_rows, n_prompt, chunk))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == n_rows
    for part in parts[:-1]:
        n_usual = chunk if part.start < n_prompt else STRETCH_ROWS
        is_cut = part.stop == n_prompt
        assert (part.stop - part.start < 64) == (n_usual >= 64) or is_cut


def test_the_limit_is_that_of_both_nodes_kv_and_of_what_roundings_do() -> None:
    assert limits("f16", "f16") == limits("q8_0", "q8_0") == SAME_KV
    assert (
        limits("f16", "q8_0") == limits(None, None) == limits(None, "f16") == limits("f16", None) == OTHER_KV
    )
    for each in (SAME_KV, OTHER_KV):
        assert each.limit(0.0) == TOLERANCE, "other batches have shown nothing"
        assert each.limit(0.002) == each.least < TOLERANCE
        assert each.least < each.limit(0.012) == each.of_spread * 0.012 < TOLERANCE
        assert each.limit(1.0) == TOLERANCE
    assert SAME_KV.limit(0.0095) < 0.016 < OTHER_KV.limit(0.0095) < 0.025


@given(st.floats(0, 2))
def test_only_what_lies_beyond_the_tolerance_is_wrong(part: float) -> None:
    reported = (TRUE.astype(np.float64) + part * (TRUE.astype(np.float64) - CAME_IN)).astype(np.float32)
    match = compare(TRUE, reported, CAME_IN)
    if part < TOLERANCE * 0.999:
        assert match is not Match.WRONG
    if part > TOLERANCE * 1.001:
        assert match is Match.WRONG


def evidence(
    sent: Tensor | None, received: Tensor | None, *, here: bool = False, agreed: bool | None = True
) -> Evidence:
    return Evidence(CAME_IN, len(CAME_IN), sent, received, here, agreed)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (evidence(TRUE, TRUE), Verdict.RIGHT),
        (evidence(NEAR, NEAR), Verdict.RIGHT),
        (evidence(None, TRUE), Verdict.RIGHT),
        (evidence(TRUE, None), Verdict.RIGHT),
        (evidence(TRUE, TRUE, agreed=None), Verdict.RIGHT),
        (evidence(FALSE, FALSE), Verdict.WRONG),
        (evidence(FALSE, None), Verdict.WRONG),
        (evidence(FALSE, TRUE), Verdict.WRONG),
        (evidence(FALSE, rows(9)), Verdict.WRONG),
        (evidence(TRUE, FALSE, here=True), Verdict.WRONG),
        (evidence(None, FALSE, here=True), Verdict.WRONG),
        (evidence(TRUE, FALSE), Verdict.DISPUTED_AFTER),
        (evidence(NEAR, FALSE), Verdict.DISPUTED_AFTER),
        (evidence(None, FALSE), Verdict.DISPUTED_AFTER),
        (evidence(FALSE, FALSE, agreed=None), Verdict.DISPUTED_BEFORE),
        (evidence(TRUE, FALSE, agreed=None), Verdict.DISPUTED_BEFORE),
    ],
)
def test_who_is_charged_follows_from_what_both_sides_say(found: Evidence, verdict: Verdict) -> None:
    assert before_computing(found) is None
    assert judge(found, TRUE)[0] is verdict


def test_some_things_need_no_computing() -> None:
    assert before_computing(evidence(None, None)) is Verdict.UNKNOWN
    assert before_computing(evidence(FALSE, FALSE, agreed=False)) is Verdict.DISPUTED_BEFORE


@pytest.mark.parametrize("agreed", [True, None, False])
@pytest.mark.parametrize("here", [True, False])
@given(mine=st.sampled_from([TRUE, NEAR]), others=st.sampled_from([None, TRUE, NEAR, FALSE, CAME_IN]))
def test_an_honest_stage_is_never_wrong(
    agreed: bool | None, here: bool, mine: Tensor, others: Tensor | None
) -> None:
    """Whatever its neighbours say: it computed what it got, and says what it sent. A next stage that is the
    origin has got that."""
    found = evidence(mine, mine if here else others, here=here, agreed=agreed)
    verdicts: list[Callable[[], Verdict | None]] = [
        lambda: before_computing(found),
        lambda: judge(found, TRUE)[0],
    ]
    assert all(verdict() is not Verdict.WRONG for verdict in verdicts)


def reported(*tokens: int, agreed: bool | None = True, ended: bool = False) -> TokenEvidence:
    return TokenEvidence(CAME_IN, 3, (9, 9, 9), tokens, agreed, ended)


def again(*tokens: int, second: float = -1.0) -> list[Sampled]:
    """Each was drawn; 100 is the likeliest, and 101 nearly as likely or not."""
    return [Sampled(token, ((100, -0.2), (101, -0.2 + second), (5, -8.0))) for token in tokens]


@pytest.mark.parametrize(
    ("said", "sampled", "greedy", "verdict", "match"),
    [
        (reported(100, 5), again(100, 5), True, Verdict.RIGHT, Match.EQUAL),
        (reported(100, 101), again(100, 100), True, Verdict.RIGHT, Match.CLOSE),
        (reported(101), again(100, second=-2.1), True, Verdict.WRONG, Match.WRONG),
        (reported(7), again(100), True, Verdict.WRONG, Match.WRONG),
        (reported(7), again(100), False, Verdict.RIGHT, Match.CLOSE),
        (reported(7, 7, 100, 7), again(100, 100, 100, 100), False, Verdict.WRONG, Match.WRONG),
        (reported(5, 5, 5, 5), again(100, 100, 100, 100), False, Verdict.RIGHT, Match.CLOSE),
        (reported(7), [Sampled(100)], True, Verdict.RIGHT, Match.CLOSE),
        (reported(7, agreed=None), again(100), True, Verdict.DISPUTED_BEFORE, Match.WRONG),
        (reported(7), [], True, Verdict.UNKNOWN, Match.WRONG),
        (reported(*[7] * 12, *[100] * 4), again(*[100] * 16), False, Verdict.WRONG, Match.WRONG),
        (reported(*[7] * 11, *[100] * 5), again(*[100] * 16), False, Verdict.RIGHT, Match.CLOSE),
        (reported(100, 5, ended=True), again(100, 5), False, Verdict.WRONG, Match.WRONG),
        (
            reported(100, 5, ended=True),
            [*again(100), Sampled(5, is_end=True)],
            True,
            Verdict.RIGHT,
            Match.EQUAL,
        ),
        (reported(100, 5, ended=True), again(100), True, Verdict.RIGHT, Match.EQUAL),
        (reported(100, 101, ended=True), again(100, 5), False, Verdict.RIGHT, Match.CLOSE),
    ],
)
def test_tokens_are_wrong_where_the_model_would_hardly_give_them(
    said: TokenEvidence, sampled: list[Sampled], greedy: bool, verdict: Verdict, match: Match
) -> None:
    assert before_computing(said) is None
    assert judge_tokens(said, sampled, greedy=greedy) == (verdict, match)


def test_a_last_stage_that_denies_what_came_to_it_is_in_dispute() -> None:
    assert before_computing(reported(1, agreed=False)) is Verdict.DISPUTED_BEFORE


@given(
    st.integers(0, 300),
    st.integers(0, 600),
    st.integers(1, 600),
    st.sampled_from([16, 2**16]),
    st.floats(0, 0.999),
    st.sampled_from([CHECKED_TOKENS, DRAWN_TOKENS]),
    st.booleans(),
)
def test_tokens_are_drawn_among_those_of_this_pipeline(
    first: int, n_tokens: int, n_prompt: int, row_bytes: int, chance: float, n_wanted: int, is_ended: bool
) -> None:
    drawn = draw_tokens(
        first, n_tokens, n_prompt, row_bytes, lambda: chance, n_wanted=n_wanted, is_ended=is_ended
    )
    if drawn is None:
        return
    assert first <= drawn.position < drawn.end <= n_tokens
    assert drawn.n_rows <= n_wanted
    assert (n_prompt + drawn.end - 1) * row_bytes <= EVIDENCE_BYTES_MAX


def test_checks_cost_a_part_of_the_work_that_strangers_take_before_trusted_nodes() -> None:
    """Two strangers, the last stage one of them, and a check that costs an eighth of a request."""
    base, drawn = 0.0625, random.Random(2)
    stranger, trusted = rate(NEUTRAL, base), rate(1.0, base)
    budget, n_checks, n_requests = Budget(base), 0, 4000
    assert budget.scaled(stranger) == stranger
    for _ in range(n_requests):
        wanted = 1 - (1 - budget.scaled(stranger)) ** 2
        n_checks += (is_drawn := drawn.random() < wanted)
        budget.served(100.0)
        budget.spend(12.0 * is_drawn)
    assert n_checks * 0.12 / n_requests == pytest.approx(0.03, rel=0.05)
    assert budget.scaled(trusted) / trusted < budget.scaled(stranger) / stranger
    assert 0.01 < budget.scaled(stranger) < 0.9 * stranger


def test_the_part_of_requests_that_is_checked_never_jumps_to_nothing_after_a_check() -> None:
    """A node that was just checked is checked nearly as often afterwards."""
    budget = Budget(0.0625)
    budget.served(100.0)
    budget.spend(110.0)
    before = budget.scaled(0.25)
    budget.spend(12.0)
    assert 0.75 * before < budget.scaled(0.25) < before


def test_with_a_rate_of_one_nothing_limits_checks_and_with_none_nothing_is_drawn() -> None:
    for base in (0.0, 1.0):
        budget = Budget(base)
        budget.served(1.0)
        budget.spend(1e6)
        assert budget.scaled(rate(NEUTRAL, base)) == base


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e6)), max_size=30), st.floats(0, 1))
def test_no_rate_is_ever_more_than_what_is_wanted(work: list[tuple[float, float]], wanted: float) -> None:
    budget = Budget(0.0625)
    for served, spent in work:
        budget.served(served)
        budget.spend(spent)
        assert 0 <= budget.scaled(wanted) <= wanted
