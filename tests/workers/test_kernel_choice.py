"""Which way computes products of so many rows: a table made of times, whatever the times are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_workers.kernels import kernel_choice
from swarmllm_workers.kernels.kernel_choice import (
    GAIN_MIN,
    HOPELESS,
    LARGE_MARGIN,
    NEVER_LARGE,
    PANEL_LOSS_MAX,
    ROUNDS_MAX,
    ROUNDS_MIN,
    ROW_CLASSES,
    ROWS_MAX,
    SINGLE_RUNS,
    MatrixType,
    RowChoice,
    RowClass,
    Way,
    choose,
    choose_all,
    ggmls_own,
    large_batch_from,
    may_differ,
    race,
    reference,
    ways_of,
)

PANELS = {Way.PANELS_AVX2, Way.PANELS_VNNI, Way.PANELS_AMX}
WITHOUT_FEW = tuple(way for way in Way if way != Way.PANELS_FEW)
BY_BLOCK = (MatrixType.Q4_0,)
"""Types that may come from panels in every batch."""
SINGLE, FEW, MANY = ROW_CLASSES[0], ROW_CLASSES[1], ROW_CLASSES[-1]
times_of_ways = st.fixed_dictionaries({way: st.integers(1, 10**9) for way in Way})


def test_classes_hold_every_number_of_rows_once() -> None:
    assert ROW_CLASSES[0].first == 1
    for rows, after in pairwise(ROW_CLASSES):
        assert rows.first <= rows.last == after.first - 1


def measured(kind: MatrixType, rows: RowClass, times: dict[Way, int]) -> dict[Way, int]:
    return {way: times[way] for way in ways_of(kind, rows.first, times)}


@given(
    st.sampled_from(MatrixType), st.sampled_from(ROW_CLASSES), times_of_ways, st.sets(st.sampled_from(Way))
)
def test_what_is_chosen_has_the_right_bits_and_is_not_slower_than_ggml(
    kind: MatrixType, rows: RowClass, times: dict[Way, int], unequal: set[Way]
) -> None:
    unequal -= {reference(kind, rows.first)}
    times = measured(kind, rows, times)
    choice = choose(kind, rows, times, unequal)
    assert choice.way not in unequal
    allowed = {way: time_ns for way, time_ns in times.items() if way not in unequal}
    theirs = [time_ns for way, time_ns in allowed.items() if way.is_ggmls]
    assert choice.ggml_ns == min(theirs)
    panels = {way: time_ns for way, time_ns in allowed.items() if way.has_own_sums and rows.first >= 64}
    others = {way: time_ns for way, time_ns in allowed.items() if not way.has_own_sums}
    if choice.way in panels:
        assert panels[choice.way] == min(panels.values()) <= PANEL_LOSS_MAX * min(others.values())
        return
    assert all(time_ns > PANEL_LOSS_MAX * min(others.values()) for time_ns in panels.values())
    allowed = others
    if may_differ(kind, choice.way, rows.first):
        assert all(allowed[choice.way] < GAIN_MIN * allowed[way] for way in allowed if not way.is_ggmls)
    elif choice.way.is_ggmls:
        assert times[choice.way] * GAIN_MIN <= min(theirs)
        assert all(allowed[way] >= GAIN_MIN * allowed[choice.way] for way in allowed)
    else:
        assert times[choice.way] == min(each for way, each in others.items() if not way.is_ggmls)
        assert times[choice.way] * GAIN_MIN <= min(theirs)
        assert times[choice.way] < min(theirs) or allowed.get(Way.TILES) == min(theirs)


@given(st.sampled_from(MatrixType), st.sampled_from(ROW_CLASSES), st.integers(1, 10**9))
def test_ties_go_to_what_ggml_does_by_itself(kind: MatrixType, rows: RowClass, time_ns: int) -> None:
    chosen = choose(
        kind, rows, measured(kind, rows, {way: time_ns for way in Way if not way.has_own_sums})
    ).way
    own = ggmls_own(kind, rows.first)
    assert chosen == (Way.AVX2 if may_differ(kind, own, rows.first) else own)


def test_tiles_with_other_bits_than_single_rows_have_to_be_faster_than_a_tie() -> None:
    times = {Way.DOTS: 2000, Way.TILES: 1000, Way.AVX512: 1050}
    assert choose(MatrixType.Q4_K, MANY, times).way == Way.AVX512
    assert choose(MatrixType.Q4_K, MANY, times | {Way.TILES: 990}).way == Way.TILES
    assert choose(MatrixType.Q4_K, MANY, {Way.DOTS: 2000, Way.TILES: 1000}).way == Way.TILES


def test_ggml_has_tiles_of_k_quants_only_for_eight_rows_and_more() -> None:
    for rows in ROW_CLASSES:
        assert (Way.TILES in ways_of(MatrixType.Q4_K, rows.first, Way)) == (rows.first >= 8)
        assert (Way.TILES in ways_of(MatrixType.Q8_0, rows.first, Way)) == (rows.first >= 2)


def chosen(n_large_ns: int, ns_of_first: dict[int, int]) -> list[RowChoice]:
    """Of panels that take so long, and of other ways by the first number of their class; else 1 ns."""
    return [
        RowChoice(rows, Way.PANELS_AMX if rows is MANY else Way.AVX512, 10**9, ns_of_first.get(rows.first, 1))
        for rows in ROW_CLASSES[:-1]
    ] + [RowChoice(MANY, Way.PANELS_AMX, 10**9, n_large_ns)]


def test_a_large_batch_is_worth_it_from_the_number_of_rows_that_take_longer() -> None:
    """On an Intel Xeon with AMX, 64 rows take as long as 24 in the other way."""
    linear = {9: 900, 17: 1700, 33: 3300}
    for n_as_long, expected in ((24.1, 25), (63.1, NEVER_LARGE), (16.1, 17), (32.1, 33), (10.1, 11)):
        large_ns = round(100 * n_as_long / LARGE_MARGIN)
        assert large_batch_from([(5, chosen(large_ns, linear))]) == expected
    assert large_batch_from([]) == NEVER_LARGE
    assert large_batch_from([(0, chosen(1600, linear))]) == NEVER_LARGE


def test_a_large_batch_has_to_be_worth_it_for_all_matrices_and_every_number_of_rows_behind_it() -> None:
    linear = {9: 900, 17: 1700, 33: 3300}
    both = [(3, chosen(2400, linear)), (1, chosen(4000, linear))]
    assert large_batch_from(both) == int(28 * LARGE_MARGIN) + 1
    assert large_batch_from([(1, chosen(2400, linear | {33: 100}))]) == NEVER_LARGE
    assert large_batch_from([(1, chosen(2400, {9: 100, 17: 100, 33: 9900}))]) == 33
    by_ggml = [RowChoice(rows, Way.TILES, 100 * rows.first, 1) for rows in ROW_CLASSES[:-1]]
    assert large_batch_from([(1, [*by_ggml, RowChoice(MANY, Way.PANELS_AMX, 9999, 3500)])]) == 39
    assert large_batch_from([(1, [*by_ggml, RowChoice(MANY, Way.TILES, 6400, 1)])]) == NEVER_LARGE


def test_types_have_ways_of_their_own_with_avx512() -> None:
    for kind in MatrixType:
        ours = [way for way in ways_of(kind, 1, WITHOUT_FEW) if not way.is_ggmls]
        wide = [Way.AVX512, Way.IN_ORDER] if kind.is_k_quant else [Way.PAIRS]
        wide = {MatrixType.IQ4_XS: [], MatrixType.Q8_0: [Way.AVX512, Way.IN_ORDER, Way.PAIRS]}.get(kind, wide)
        assert ours == [Way.AVX2, Way.AVX2_STREAMED, *wide, Way.NEON]


def test_tiles_of_k_quants_may_have_other_bits_only_beyond_small_batches() -> None:
    for rows in ROW_CLASSES:
        panels = PANELS | {Way.PANELS_FEW} if rows.first >= 64 else set()
        allowed = {way for way in Way if may_differ(MatrixType.Q4_K, way, rows.first)}
        assert allowed == panels | ({Way.TILES} if rows.first > ROWS_MAX else set())
        assert {way for way in Way if may_differ(MatrixType.Q8_0, way, rows.first)} == panels
        assert reference(MatrixType.Q4_K, rows.first) == Way.DOTS


def test_panels_are_for_batches_of_64_rows_and_some_types() -> None:
    for rows in ROW_CLASSES:
        for kind in MatrixType:
            found = PANELS.intersection(ways_of(kind, rows.first, WITHOUT_FEW))
            has_them = kind not in (MatrixType.IQ4_NL, MatrixType.IQ4_XS, MatrixType.MXFP4)
            without = Way.PANELS_VNNI if kind == MatrixType.Q6_K else Way.PANELS_AVX2
            expected = PANELS - (set() if kind in (MatrixType.Q4_K, MatrixType.Q5_K) else {without})
            assert found == (expected if rows.first >= 64 and has_them else set())


def test_panels_are_taken_where_they_are_not_much_slower() -> None:
    times = {Way.DOTS: 2000, Way.TILES: 1500, Way.AVX512: 1000, Way.PANELS_VNNI: 1251, Way.PANELS_AMX: 1300}
    assert choose(MatrixType.Q4_K, MANY, times).way == Way.AVX512
    assert choose(MatrixType.Q4_K, MANY, times | {Way.PANELS_VNNI: 1250}).way == Way.PANELS_VNNI
    assert choose(MatrixType.Q4_K, MANY, times | {Way.PANELS_VNNI: 940}, {Way.PANELS_VNNI}).way == Way.AVX512
    assert (
        choose(MatrixType.Q4_K, MANY, times | {Way.PANELS_VNNI: 500, Way.PANELS_AMX: 400}).way
        == Way.PANELS_AMX
    )


def test_where_few_rows_come_from_panels_all_batches_may() -> None:
    for kind in MatrixType:
        for rows in ROW_CLASSES:
            found = {way for way in ways_of(kind, rows.first, Way) if way.has_own_sums}
            before = {way for way in ways_of(kind, rows.first, WITHOUT_FEW) if way.has_own_sums}
            if kind not in BY_BLOCK:
                assert found == before
            elif rows.first < 17:  # the matrix unit computes sixteen at once
                assert found == {Way.PANELS_FEW}
            else:
                assert found == {Way.PANELS_FEW, Way.PANELS_VNNI, Way.PANELS_AMX}


times_of_classes = st.fixed_dictionaries(dict.fromkeys(ROW_CLASSES, times_of_ways))


@given(st.sampled_from(MatrixType), times_of_classes, st.sets(st.sampled_from(Way)), st.data())
def test_panels_are_in_all_batches_or_in_none_below_64_rows(
    kind: MatrixType, times: dict[RowClass, dict[Way, int]], wrong: set[Way], data: st.DataObject
) -> None:
    """A row has the bits in a batch that it has alone."""
    found_in = data.draw(st.sets(st.sampled_from(ROW_CLASSES)))
    unequal = {
        rows: (wrong - {reference(kind, rows.first)}) if rows in found_in else set() for rows in ROW_CLASSES
    }
    times = {rows: measured(kind, rows, of_rows) for rows, of_rows in times.items()}
    choices = choose_all(kind, times, unequal)
    assert [each.rows for each in choices] == list(ROW_CLASSES)
    assert len({each.way.has_own_sums for each in choices if each.rows.first < 64}) == 1
    alone = [choose(kind, rows, times[rows], unequal[rows]) for rows in ROW_CLASSES]
    for choice, before in zip(choices, alone, strict=True):
        assert choice.way not in unequal[choice.rows]
        if choice.rows.first < 64:
            assert times[choice.rows][choice.way] <= HOPELESS * times[choice.rows][before.way]
        assert choice == before or choice.ours_ns == times[choice.rows][choice.way]


def test_panels_are_in_all_batches_where_they_are_not_much_slower() -> None:
    """One size that another program disturbed decides nothing."""
    n = len(ROW_CLASSES)
    times: dict[RowClass, dict[Way, int]] = {
        rows: {Way.DOTS: 2000, Way.TILES: 1500, Way.PAIRS: 1000, Way.PANELS_FEW: 1200} for rows in ROW_CLASSES
    }
    right: dict[RowClass, set[Way]] = {rows: set() for rows in ROW_CLASSES}
    disturbed = times | {FEW: times[FEW] | {Way.PANELS_FEW: 1500}}
    assert {each.way for each in choose_all(MatrixType.Q4_0, disturbed, right)} == {Way.PANELS_FEW}
    slow_once = times | {FEW: times[FEW] | {Way.PANELS_FEW: 1501}}
    slow_in_all = {rows: of_rows | {Way.PANELS_FEW: 1251} for rows, of_rows in times.items()}
    found = [each.way for each in choose_all(MatrixType.Q4_0, slow_once, right)]
    assert found == [Way.PAIRS] * (n - 1) + [Way.PANELS_FEW]
    assert {each.way for each in choose_all(MatrixType.Q4_0, slow_in_all, right)} == {Way.PAIRS}
    wrong = right | {FEW: {Way.PANELS_FEW}}
    assert [each.way for each in choose_all(MatrixType.Q4_0, times, wrong)] == found


def test_panels_are_measured_in_every_round() -> None:
    """One that other programs disturbed for three rounds would be left out for good."""
    times = dict.fromkeys(Way, 100)
    seen = []

    def run(n_rows: int, way: Way) -> int:
        seen.append((n_rows, way))
        return 100_000 if way.has_own_sums and seen.count((n_rows, way)) < ROUNDS_MAX else times[way]

    found = race(MatrixType.Q4_K, list(Way), run, lambda: 0.0, 1.0)
    assert found[MANY][Way.PANELS_VNNI] == 100


def test_a_gain_of_a_few_percent_is_a_tie() -> None:
    times = {Way.DOTS: 1000, Way.AVX512: 950}
    assert choose(MatrixType.Q8_0, SINGLE, times).way == Way.DOTS
    assert choose(MatrixType.Q8_0, SINGLE, times | {Way.AVX512: 949}).way == Way.AVX512


def test_tiles_with_other_bits_leave_small_batches_to_dot_products_or_ours() -> None:
    """Even where they are the fastest: rows of a small batch have the bits of single rows."""
    times = {Way.DOTS: 2000, Way.TILES: 100, Way.AVX512: 500}
    assert choose(MatrixType.Q8_0, FEW, times, {Way.TILES}).way == Way.AVX512
    assert choose(MatrixType.Q8_0, FEW, times, {Way.TILES, Way.AVX512}).way == Way.DOTS
    assert choose(MatrixType.Q8_0, FEW, times, {Way.TILES, Way.AVX512}).ours_ns is None


def test_in_large_batches_the_bits_of_tiles_count() -> None:
    assert reference(MatrixType.Q8_0, ROW_CLASSES[6].first) == Way.DOTS
    assert (
        reference(MatrixType.Q8_0, ROW_CLASSES[7].first)
        == reference(MatrixType.Q8_0, MANY.first)
        == Way.TILES
    )
    assert (
        choose(MatrixType.Q8_0, MANY, {Way.DOTS: 1, Way.TILES: 100, Way.AVX2: 2}, {Way.DOTS, Way.AVX2}).way
        == Way.TILES
    )


def test_where_ggml_multiplies_two_rows_at_once_ours_have_the_bits_of_each_alone() -> None:
    """On ARM (i8mm), whatever it takes; where ours have not got them either, ggml computes."""
    times = {Way.DOTS: 100, Way.TILES: 150, Way.NEON: 400}
    chosen = choose(MatrixType.Q8_0, FEW, times, {Way.DOTS, Way.TILES})
    assert (chosen.way, chosen.ggml_ns, chosen.ours_ns) == (Way.NEON, 100, 400)
    chosen = choose(MatrixType.Q8_0, FEW, times, set(times))
    assert (chosen.way, chosen.ours_ns) == (Way.DOTS, None)


def test_on_arm_tiles_of_every_type_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "IS_ARM", True)
    for kind in MatrixType:
        assert reference(kind, MANY.first) == Way.DOTS
        assert may_differ(kind, Way.TILES, MANY.first)
        assert not may_differ(kind, Way.TILES, FEW.first)


class Machine:
    """A clock that only computing moves, and a way's time in each round; others disturb the first."""

    def __init__(self, rounds: Sequence[dict[Way, int]]) -> None:
        self.now_s = 0.0
        self.rounds = rounds
        self.runs: dict[tuple[int, Way], int] = {}

    def now(self) -> float:
        return self.now_s

    def run(self, n_rows: int, way: Way) -> int:
        n_round = self.runs.get((n_rows, way), 0)
        self.runs[n_rows, way] = n_round + 1
        time_ns = self.rounds[min(n_round, len(self.rounds) - 1)][way]
        self.now_s += time_ns / 1e9
        return time_ns


WAYS = (Way.DOTS, Way.TILES, Way.AVX512)


def test_the_best_round_counts() -> None:
    slow, quick = dict.fromkeys(WAYS, 1000), {Way.DOTS: 700, Way.TILES: 900, Way.AVX512: 800}
    machine = Machine([slow, quick, slow])
    found = race(MatrixType.Q8_0, WAYS, machine.run, machine.now, budget_s=1.0)
    assert found[FEW] == quick
    assert found[SINGLE] == {Way.DOTS: 700, Way.AVX512: 800}  # ggml has no tiles for one row
    assert machine.runs[2, Way.DOTS] == ROUNDS_MAX
    assert machine.runs[1, Way.DOTS] == SINGLE_RUNS * ROUNDS_MAX


def test_another_program_in_the_first_rounds_leaves_no_way_out() -> None:
    disturbed, quick = dict.fromkeys(WAYS, 1000) | {Way.DOTS: 10**7}, dict.fromkeys(WAYS, 1000)
    machine = Machine([disturbed, disturbed, quick])
    found = race(MatrixType.Q8_0, WAYS, machine.run, machine.now, budget_s=0.0)
    assert found[SINGLE][Way.DOTS] == found[FEW][Way.DOTS] == 1000


def test_the_first_rounds_are_whole_and_the_budget_ends_the_others() -> None:
    machine = Machine([dict.fromkeys(WAYS, 10**6)])
    found = race(MatrixType.Q8_0, WAYS, machine.run, machine.now, budget_s=0.0)
    assert {n for (rows, _), n in machine.runs.items() if rows > 1} == {ROUNDS_MIN}
    assert machine.runs[1, Way.DOTS] == SINGLE_RUNS * ROUNDS_MIN
    assert all(set(times) >= {Way.DOTS, Way.AVX512} for times in found.values())
    assert [rows for rows, times in found.items() if Way.TILES not in times] == [SINGLE]
    machine = Machine([dict.fromkeys(WAYS, 10**6)])
    race(MatrixType.Q8_0, WAYS, machine.run, machine.now, budget_s=0.15)
    assert 150 <= sum(machine.runs.values()) < 150 + SINGLE_RUNS


def test_what_is_hopeless_is_left_out_of_later_rounds() -> None:
    times = {Way.DOTS: 1000, Way.TILES: int(1000 * HOPELESS) + 1, Way.AVX512: int(1000 * HOPELESS)}
    machine = Machine([times])
    race(MatrixType.Q8_0, WAYS, machine.run, machine.now, budget_s=1.0)
    assert machine.runs[2, Way.TILES] == ROUNDS_MIN
    assert machine.runs[2, Way.AVX512] == machine.runs[2, Way.DOTS] == ROUNDS_MAX
