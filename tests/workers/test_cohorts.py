"""Cohorts alone: how many there are, how large, and that nobody's rows depend on anybody else's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_workers.schedule.cohorts import (
    JOIN_BATCHES,
    MEASURE_BATCHES,
    MEMBER_AWAY,
    MEMBER_AWAY_MIN_S,
    SAMPLES,
    Cohorts,
)

N_LAYERS = 24
HALF = (0, 12)
QUARTER = (0, 6)


def names(n: int) -> list[str]:
    return [f"r{index}" for index in range(n)]


def arrive(
    cohorts: Cohorts, layers: tuple[int, int], members: list[str], now: float, *, is_idle: bool
) -> None:
    for name in members:
        cohorts.arrived(layers, name, 1, now, is_idle=is_idle)


def turn(
    cohorts: Cohorts, layers: tuple[int, int], members: list[str], step_s: float, away_s: float, now: float
) -> float:
    """All of `members` run in one batch and come back to an idle stage; when that is."""
    cohorts.left(layers, members, step_s, now, is_pure=True)
    now += away_s
    arrive(cohorts, layers, members, now, is_idle=True)
    return now


def test_nothing_is_split_that_has_not_come() -> None:
    assert Cohorts(N_LAYERS).n_rows_max(HALF, 0.0) is None


@pytest.mark.parametrize(("layers", "n_stages"), [((0, 24), 1), (HALF, 2), ((0, 8), 3), (QUARTER, 4)])
@pytest.mark.parametrize("n_streams", [1, 3, 8, 17])
def test_before_anything_is_measured_layers_say_how_many_cohorts_there_are(
    layers: tuple[int, int], n_stages: int, n_streams: int
) -> None:
    cohorts = Cohorts(N_LAYERS)
    arrive(cohorts, layers, names(n_streams), 0.0, is_idle=True)
    assert cohorts.n_rows_max(layers, 0.0) == math.ceil(n_streams / n_stages)


def test_sizes_follow_streams_that_come_and_go() -> None:
    cohorts = Cohorts(N_LAYERS)
    arrive(cohorts, HALF, names(8), 0.0, is_idle=True)
    assert cohorts.n_rows_max(HALF, 0.0) == 4
    for name in names(4):
        cohorts.forget(name)
    assert cohorts.n_rows_max(HALF, 0.0) == 2
    for name in names(8):
        cohorts.forget(name)
    assert cohorts.n_rows_max(HALF, 0.0) is None


def test_steps_of_several_rows_count_as_rows() -> None:
    cohorts = Cohorts(N_LAYERS)
    cohorts.arrived(HALF, "guesses", 5, 0.0, is_idle=True)
    cohorts.arrived(HALF, "plain", 1, 0.0, is_idle=True)
    assert cohorts.n_rows_max(HALF, 0.0) == 3


def settle(cohorts: Cohorts, members: list[str], step_s: float, away_s: float, now: float) -> float:
    """Turns of all of `members` in one batch, until delay is measured next."""
    while cohorts._stages[HALF].n_batches < JOIN_BATCHES:
        now = turn(cohorts, HALF, members, step_s, away_s, now)
    return now


def test_long_ways_make_room_for_more_cohorts_and_only_once_they_have_been_measured() -> None:
    cohorts = Cohorts(N_LAYERS)
    arrive(cohorts, HALF, names(8), 0.0, is_idle=True)
    now = turn(cohorts, HALF, names(8), 0.1, 0.1, 0.0)
    for n_rows, step_s in ((1, 0.03), (2, 0.04), (4, 0.06)):
        now = turn(cohorts, HALF, names(n_rows), step_s, step_s, now)
    assert cohorts.n_rows_max(HALF, now) == 4
    now = settle(cohorts, names(8), 0.1, 0.1 + 0.3, now)
    assert cohorts.n_rows_max(HALF, now) == 4, "all of these may have waited for each other"
    now = turn(cohorts, HALF, names(8), 0.1, 0.1 + 0.3, now)
    assert cohorts.n_rows_max(HALF, now) == 1, "eight batches of 0.03 s end before a row is back"


def test_shortest_way_counts_and_not_those_of_rows_that_had_to_wait() -> None:
    cohorts = Cohorts(N_LAYERS)
    arrive(cohorts, HALF, names(8), 0.0, is_idle=True)
    now = settle(cohorts, names(8), 0.1, 0.1, 0.0)
    for away_s in (0.9, 0.1, 0.5, 0.9):
        now = turn(cohorts, HALF, names(8), 0.1, away_s, now)
    assert cohorts.n_rows_max(HALF, now) == 4


def test_delay_is_forgotten_and_measured_again_after_more_batches_each_time() -> None:
    cohorts = Cohorts(N_LAYERS)
    arrive(cohorts, HALF, names(8), 0.0, is_idle=True)
    now, lasted = 0.0, []
    for _ in range(3):
        now = settle(cohorts, names(8), 0.1, 0.4, now)
        lasted.append(-1)
        while cohorts._stages[HALF].n_batches:
            now = turn(cohorts, HALF, names(8), 0.1, 0.4, now)
            lasted[-1] += 1
        assert cohorts._stages[HALF].delay_s is None
    assert lasted[0] == MEASURE_BATCHES
    assert lasted[1] == 2 * lasted[0]
    assert lasted[2] == 2 * lasted[1]


def test_rows_that_come_while_a_batch_runs_say_nothing_of_delay() -> None:
    cohorts, now = Cohorts(N_LAYERS), 0.0
    arrive(cohorts, HALF, names(8), now, is_idle=True)
    for _ in range(JOIN_BATCHES + 5):
        cohorts.left(HALF, names(8), 0.1, now, is_pure=True)
        now += 0.9
        arrive(cohorts, HALF, names(8), now, is_idle=False)
    assert cohorts.n_rows_max(HALF, now) == 4


def test_first_stage_that_is_slow_has_fewer_cohorts_than_stages() -> None:
    """The others take a tenth of its time: while it runs one half, the other half is back."""
    cohorts, now = Cohorts(N_LAYERS), 0.0
    arrive(cohorts, QUARTER, names(8), now, is_idle=True)
    assert cohorts.n_rows_max(QUARTER, now) == 2
    for n_rows in (8, 4, 2, 1):
        now = turn(cohorts, QUARTER, names(n_rows), 0.5 + n_rows / 16, 0.05 + n_rows / 160, now)
    assert cohorts.n_rows_max(QUARTER, now) == 8


@pytest.mark.parametrize("per_row_s", [0.0, 0.01, 0.1])
def test_only_what_rows_cost_is_a_reason_to_split(per_row_s: float) -> None:
    """Two batches of two stages take what one takes, where rows cost nothing."""
    cohorts, now = Cohorts(N_LAYERS), 0.0
    arrive(cohorts, HALF, names(8), now, is_idle=True)
    for n_rows in (8, 4, 2, 1):
        step_s = 0.05 + per_row_s * n_rows
        now = turn(cohorts, HALF, names(n_rows), step_s, step_s, now)
    limit = cohorts.n_rows_max(HALF, now)
    assert limit == (8 if per_row_s == 0 else 4)


def test_batches_with_pieces_of_prompts_say_nothing() -> None:
    cohorts, now = Cohorts(N_LAYERS), 0.0
    arrive(cohorts, HALF, names(8), now, is_idle=True)
    for n_rows in (8, 4, 2, 1):
        now = turn(cohorts, HALF, names(n_rows), 0.05 + 0.01 * n_rows, 0.05 + 0.01 * n_rows, now)
    for _ in range(SAMPLES):
        cohorts.left(HALF, names(4), 5.0, now, is_pure=False)
        now += 0.001
        arrive(cohorts, HALF, names(4), now, is_idle=True)
    arrive(cohorts, HALF, names(8), now, is_idle=True)
    assert cohorts.n_rows_max(HALF, now) == 4


def test_seconds_of_a_batch_are_those_of_all_its_rows() -> None:
    cohorts = Cohorts(N_LAYERS)
    cohorts.arrived(HALF, "guesses", 5, 0.0, is_idle=True)
    cohorts.arrived(HALF, "plain", 1, 0.0, is_idle=True)
    cohorts.left(HALF, ["guesses", "plain"], 0.6, 1.0, is_pure=True)
    cohorts.left(HALF, ["plain"], 0.1, 2.0, is_pure=True)
    steps = cohorts._stages[HALF].steps
    assert steps.seconds(6) == 0.6
    assert steps.seconds(1) == 0.1
    assert steps.seconds(3.5) == pytest.approx(0.35)


def test_rows_that_are_held_back_elsewhere_do_not_make_cohorts_of_others_larger() -> None:
    cohorts, now = Cohorts(N_LAYERS), 0.0
    honest, held = names(4), ["h1", "h2", "h3", "h4"]
    arrive(cohorts, HALF, [*honest, *held], now, is_idle=True)
    cohorts.left(HALF, held, 0.1, now, is_pure=True)
    for _ in range(math.ceil(max(MEMBER_AWAY_MIN_S, MEMBER_AWAY * 0.1) / 0.1) + 1):
        now = turn(cohorts, HALF, honest, 0.1, 0.1, now)
    assert cohorts.n_rows_max(HALF, now) == 2
    arrive(cohorts, HALF, held, now, is_idle=True)
    assert cohorts.n_rows_max(HALF, now) == 4, "they are back, and count again"


def test_one_stage_knows_nothing_of_another() -> None:
    cohorts, now = Cohorts(N_LAYERS), 0.0
    arrive(cohorts, HALF, names(8), now, is_idle=True)
    arrive(cohorts, QUARTER, ["other"], now, is_idle=True)
    now = turn(cohorts, QUARTER, ["other"], 0.1, 9.0, now)
    cohorts.forget("other")
    assert cohorts.n_rows_max(HALF, now - 9.0) == 4


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "leave", "forget"]),
        st.sampled_from(names(6)),
        st.sampled_from([HALF, QUARTER]),
        st.integers(1, 16),
        st.floats(0, 20),
        st.booleans(),
    ),
    max_size=120,
)


@given(EVENTS)
def test_whatever_happens_a_batch_takes_at_least_one_row_and_no_more_than_all(
    events: list[tuple[str, str, tuple[int, int], int, float, bool]],
) -> None:
    """Also where a node sends steps that nobody asked for, twice, or of requests that are over."""
    cohorts, now = Cohorts(N_LAYERS), 0.0
    known: dict[tuple[int, int], dict[str, int]] = {HALF: {}, QUARTER: {}}
    for kind, name, layers, n_rows, wait_s, flag in events:
        now += wait_s
        if kind == "arrive":
            cohorts.arrived(layers, name, n_rows, now, is_idle=flag)
            known[layers][name] = n_rows
        elif kind == "leave":
            cohorts.left(layers, [name], wait_s, now, is_pure=flag)
        else:
            cohorts.forget(name)
            for members in known.values():
                members.pop(name, None)
        for each, members in known.items():
            limit = cohorts.n_rows_max(each, now)
            assert limit is None or 1 <= limit <= max(1, sum(members.values()))
            assert limit is not None or (kind, each) != ("arrive", layers)


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 2**32))
def test_streams_over_alike_stages_never_form_more_cohorts_than_there_are_stages(
    n_streams: int, n_stages: int, seed: int
) -> None:
    """Whatever clumps they begin as, and nobody's row waits for longer than all others take."""
    import random

    chance = random.Random(seed)
    layers = (0, N_LAYERS // n_stages)
    cohorts = Cohorts(N_LAYERS)
    waiting = names(n_streams)
    chance.shuffle(waiting)
    arrive(cohorts, layers, waiting, 0.0, is_idle=True)
    batches: list[list[str]] = []
    while waiting:
        limit = cohorts.n_rows_max(layers, 0.0)
        assert limit is not None
        batches.append(waiting[:limit])
        waiting = waiting[limit:]
        cohorts.left(layers, batches[-1], 0.1, 0.0, is_pure=True)
    assert len(batches) <= n_stages
    assert max(map(len, batches)) == math.ceil(n_streams / n_stages)
