"""The batch planner alone: what every round keeps to, and that nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_workers.schedule.planner import (
    BESIDE,
    OWED,
    READING,
    Batch,
    Demand,
    FittedBatch,
    Planner,
    Share,
)

CAPACITY, CHUNK = 32, 8


def planner() -> Planner:
    return Planner(capacity=CAPACITY, chunk=CHUNK)


def decode(key: int, lane: str = "a", n_rows: int = 1, n_cells: int = 10) -> Demand:
    return Demand(key, lane, n_rows, is_decode=True, n_cells=n_cells, can_restart=True)


def prompt(key: int, n_rows: int, lane: str = "a", n_cells: int = 0) -> Demand:
    return Demand(key, lane, n_rows, is_decode=False, n_cells=n_cells, can_restart=True)


@st.composite
def demand_lists(draw: st.DrawFn) -> list[Demand]:
    demands = []
    for key in range(draw(st.integers(0, 12))):
        is_decode = draw(st.booleans())
        n_rows = draw(st.integers(1, 4 if is_decode else 100))
        lane = draw(st.sampled_from("ab"))
        n_cells = draw(st.integers(0, 20))
        demands.append(Demand(key, lane, n_rows, is_decode, n_cells, draw(st.booleans())))
    return demands


@given(demand_lists())
def test_round_keeps_capacity_lanes_pieces_and_the_prompt_budget(demands: list[Demand]) -> None:
    known = {demand.key: demand for demand in demands}
    batches = planner().schedule(demands)
    keys = [share.key for batch in batches for share in batch.shares]
    assert len(keys) == len(set(keys)), "one span per work and round"
    assert len({batch.lane for batch in batches}) == len(batches)
    n_prompt_rows = 0
    for batch in batches:
        assert 0 < batch.n_rows <= CAPACITY
        for share in batch.shares:
            demand = known[share.key]
            assert demand.lane == batch.lane
            if demand.is_decode:
                assert share.n_rows == demand.n_rows
            else:
                assert 0 < share.n_rows <= min(CHUNK, demand.n_rows)
                n_prompt_rows += share.n_rows
    if any(demand.is_decode for demand in demands):
        assert n_prompt_rows <= CHUNK
    assert bool(batches) == bool(demands)


@given(demand_lists())
def test_everybody_has_a_turn_within_as_many_rounds_as_there_are_works(demands: list[Demand]) -> None:
    plan = planner()
    waiting = {demand.key for demand in demands}
    for _ in demands:
        for batch in plan.schedule(demands):
            waiting -= {share.key for share in batch.shares}
            plan.postprocess(batch)
    assert not waiting


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(20, 80))
def test_generations_that_fit_alone_all_end_whatever_the_room(lengths: list[int], n_ctx: int) -> None:
    """Simulated: each work runs `length` rows and leaves. Restarts may repeat work, but never for ever."""
    lengths = [min(length, n_ctx) for length in lengths]
    plan = planner()
    cells = dict.fromkeys(range(len(lengths)), 0)
    for _ in range(2000):
        demands = [prompt(key, lengths[key] - n, n_cells=n) for key, n in cells.items()]
        if not demands:
            return
        for batch in plan.schedule(demands):
            fit = plan.preempt(batch, demands, n_ctx - sum(cells.values()))
            assert not fit.refused
            for key in fit.restarted:
                cells[key] = 0
            for share in fit.batch.shares:
                cells[share.key] += share.n_rows
            assert sum(cells.values()) <= n_ctx
            plan.postprocess(batch)
        for key in [key for key, n in cells.items() if n >= lengths[key]]:
            del cells[key]
            plan.forget(key)
    pytest.fail(f"still running: {cells}")


def test_decode_steps_of_a_lane_share_one_batch_with_a_piece_of_a_prompt() -> None:
    (batch,) = planner().schedule([prompt(1, 100), decode(2), decode(3)])
    assert batch.shares == (Share(2, 1), Share(3, 1), Share(1, CHUNK - 2))


@given(demand_lists(), st.dictionaries(st.sampled_from("ab"), st.integers(1, 6)))
def test_cohorts_bound_the_decode_steps_of_a_batch_and_lose_none(
    demands: list[Demand], cohorts: dict[str, int]
) -> None:
    plan = planner()
    known = {demand.key: demand for demand in demands if demand.is_decode}
    waiting = dict(known)
    for _ in demands:
        for batch in plan.schedule(waiting.values(), cohorts):
            n_rows = [known[share.key].n_rows for share in batch.shares]
            assert sum(n_rows) <= cohorts.get(str(batch.lane), CAPACITY) or len(n_rows) == 1
            plan.postprocess(batch)
            for share in batch.shares:
                del waiting[share.key]
    assert not waiting


def test_those_that_came_first_are_the_first_cohort() -> None:
    plan = planner()
    (first,) = plan.schedule([decode(key) for key in range(5)], {"a": 3})
    assert first.shares == (Share(0, 1), Share(1, 1), Share(2, 1))
    plan.postprocess(first)
    (second,) = plan.schedule([decode(3), decode(4), decode(5)], {"a": 3})
    assert second.shares == (Share(3, 1), Share(4, 1), Share(5, 1))


def test_where_a_piece_of_a_prompt_runs_all_decode_steps_run() -> None:
    """They would wait for it otherwise, which takes longer than they all."""
    (batch,) = planner().schedule([decode(1), decode(2), prompt(3, 100)], {"a": 1})
    assert batch.shares == (Share(1, 1), Share(2, 1), Share(3, CHUNK - 2))


def test_readers_that_are_owed_time_run_as_cohorts_beside_a_prompt_that_waits() -> None:
    plan = planner()
    demands = [decode(1), decode(2), prompt(3, 100)]
    plan.schedule(demands)
    plan.ran(2, 1, 1.0)
    (batch,) = plan.schedule(demands, {"a": 1})
    assert batch.shares == (Share(1, 1),)


def test_no_more_works_are_restarted_than_the_missing_rows_need() -> None:
    """A restart computes a whole sequence again: that of 3 frees exactly the rows that 1 lacks."""
    demands = [decode(1, n_rows=10), decode(2), decode(3)]
    fit = planner().preempt(Batch("a", (Share(1, 10),)), demands, 0)
    assert fit.restarted == (3,)
    assert fit.batch.shares == (Share(1, 10),)


def test_prompts_alone_fill_the_batch_a_chunk_each() -> None:
    (batch,) = planner().schedule([prompt(key, 100) for key in range(6)])
    assert batch.shares == tuple(Share(key, CHUNK) for key in range(4))


def test_two_prompts_take_turns_while_somebody_decodes() -> None:
    plan = planner()
    demands = [prompt(1, 100), prompt(2, 100), decode(3)]
    turns = []
    for _ in range(4):
        (batch,) = plan.schedule(demands)
        turns.append(batch.shares[1].key)
        plan.postprocess(batch)
    assert turns == [1, 2, 1, 2]


def test_without_batching_every_work_has_a_batch_of_its_own() -> None:
    plan = Planner(capacity=CAPACITY, chunk=CHUNK, batching=False)
    batches = plan.schedule([decode(1), prompt(2, 100)])
    assert batches == (Batch("a", (Share(1, 1),)), Batch("a", (Share(2, CHUNK),)))


def test_youngest_generation_starts_over_when_an_older_one_needs_its_cells() -> None:
    demands = [decode(1), decode(2), decode(3)]
    plan = planner()
    (batch,) = plan.schedule(demands)
    fit = plan.preempt(batch, demands, n_free=1)
    assert fit == FittedBatch(Batch("a", (Share(1, 1), Share(2, 1))), restarted=(3,))


def test_the_first_piece_of_a_forward_needs_room_for_no_more_than_itself() -> None:
    """Its sender brings the other pieces when this one is done; a generation has its whole prompt here."""
    batch = Batch("a", (Share(1, 10),))
    generation = prompt(1, 100)
    forward = replace(generation, can_restart=False)
    assert planner().preempt(batch, [forward], n_free=10).batch == batch
    assert planner().preempt(batch, [generation], n_free=10).batch == Batch("a", ())


def test_forward_is_never_thrown_out_and_never_waits() -> None:
    forward = replace(decode(1), can_restart=False)
    plan = planner()
    demands = [forward, decode(2)]
    assert plan.preempt(Batch("a", (Share(1, 1),)), demands, n_free=0).restarted == (2,)
    assert plan.preempt(Batch("a", (Share(1, 1),)), [forward], n_free=0).refused == (1,)
    assert plan.preempt(Batch("a", (Share(2, 1),)), demands, n_free=0).refused == (2,)


def test_prompt_waits_until_all_of_it_fits() -> None:
    plan = planner()
    demands = [decode(1), prompt(2, 30)]
    batch = Batch("a", (Share(1, 1), Share(2, CHUNK)))
    assert plan.preempt(batch, demands, n_free=20) == FittedBatch(Batch("a", (Share(1, 1),)))
    assert plan.preempt(batch, demands, n_free=31).batch == batch


def test_while_somebody_reads_all_prompts_together_have_one_piece() -> None:
    prompts = [prompt(1, 40), prompt(2, 1000), prompt(3, 1000)]
    (batch,) = Planner().schedule([*prompts, decode(4)])
    assert batch.shares == (Share(4, 1), Share(1, 40), Share(2, BESIDE - 41))
    (batch,) = Planner(chunk=200).schedule(prompts)
    assert batch.shares == (Share(1, 40), Share(2, 200), Share(3, 200))


@given(st.integers(1, 300))
def test_a_piece_beside_readers_fills_the_tiles_of_attention_that_these_have_begun(n_readers: int) -> None:
    (batch,) = Planner().schedule([*map(decode, range(n_readers)), prompt(999, 5000)])
    n_piece = batch.shares[-1].n_rows
    assert BESIDE / 2 <= n_piece <= BESIDE
    assert batch.n_rows % BESIDE == 0 or n_piece == BESIDE


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.001, 10.0), st.floats(0.001, 1.0))
def test_after_a_piece_of_a_prompt_readers_have_time_of_their_own(
    n_readers: int, n_prompts: int, piece_s: float, step_s: float
) -> None:
    plan = Planner()
    demands = [decode(key) for key in range(n_readers)]
    demands += [prompt(10 + key, 10_000) for key in range(n_prompts)]
    plan.schedule(demands)
    plan.ran(n_readers, 1, piece_s)
    had_s = 0.0
    while not any(share.key >= 10 for batch in plan.schedule(demands) for share in batch.shares):
        plan.ran(n_readers, 0, step_s)
        had_s += step_s
    owed_s = OWED * piece_s * min(1.0, n_readers / n_prompts)
    assert owed_s - 1e-6 <= had_s <= owed_s + step_s + 1e-6


def test_what_readers_are_owed_goes_where_they_have_nothing_to_run_or_no_room() -> None:
    plan = Planner()
    readers, late = [decode(1), decode(2)], prompt(3, 1000)
    plan.schedule([*readers, late])
    plan.ran(2, 1, 100.0)
    assert plan.schedule([late])[0].shares == (Share(3, BESIDE),), "they may come back any moment"
    assert plan.schedule([*readers, late])[0].shares == (Share(1, 1), Share(2, 1))
    # Nothing of that ran: the prompt may hold what they wait for.
    assert plan.schedule([*readers, late])[0].shares[-1] == Share(3, BESIDE - 2)


def test_a_reader_whose_next_step_is_on_its_way_counts_for_a_while() -> None:
    """In a pipeline the token goes round the other nodes first."""
    plan = Planner()
    plan.schedule([decode(1)])
    plan.ran(1, 0, 0.01)
    seen = []
    for _ in range(READING + 1):
        (batch,) = plan.schedule([prompt(2, 1000)])
        seen.append(batch.n_rows)
        plan.ran(0, 1, 0.1)
    assert seen == [BESIDE] * READING + [128]


def test_readers_that_fill_more_than_half_a_tile_get_another_one_beside_them() -> None:
    for n_readers, n_rows in ((BESIDE // 2, BESIDE), (BESIDE // 2 + 1, BESIDE // 2 + 1 + BESIDE)):
        (batch,) = Planner().schedule([*map(decode, range(n_readers)), prompt(999, 5000)])
        assert batch.n_rows == n_rows


def test_chunk_must_leave_room_in_a_batch() -> None:
    for chunk in (0, 8):
        with pytest.raises(ValueError, match="chunk"):
            Planner(capacity=8, chunk=chunk)
    assert Planner(capacity=8, chunk=1).schedule([prompt(1, 9)])[0].shares == (Share(1, 1),)


def test_nobody_is_owed_time_for_a_piece_that_ran_while_nobody_read() -> None:
    plan = Planner()
    demands = [decode(1), prompt(2, 10_000)]
    plan.schedule(demands[:1])
    plan.ran(1, 0, 0.01)
    for seconds in [0.01] * READING + [100.0]:
        plan.schedule(demands[1:])
        plan.ran(0, 1, seconds)
    plan.schedule(demands)
    plan.ran(1, 0, 0.1)
    (batch,) = plan.schedule(demands)
    assert [share.key for share in batch.shares] == [1, 2]


def test_what_readers_had_before_any_prompt_came_is_not_owed_again() -> None:
    plan = Planner()
    plan.schedule([decode(1)])
    plan.ran(1, 0, 0.01)
    (batch,) = plan.schedule([decode(1), prompt(2, 100)])
    assert [share.key for share in batch.shares] == [1, 2]


def test_readers_are_owed_no_more_than_what_the_latest_piece_took() -> None:
    """What they did not get of earlier pieces is gone, and so is what they had beyond it."""
    plan = Planner()
    demands = [decode(1), prompt(2, 10_000)]
    plan.schedule(demands)
    plan.ran(1, 1, 100.0)
    plan.schedule(demands[1:])
    plan.ran(0, 1, 1.0)
    n_alone = 0
    while len(plan.schedule(demands)[0].shares) == 1:
        plan.ran(1, 0, 0.125)
        n_alone += 1
    assert n_alone == OWED * 1.0 / 0.125


def test_where_nothing_is_owed_a_piece_of_a_prompt_runs_in_every_round() -> None:
    plan = Planner(owes=False)
    for _ in range(3):
        (batch,) = plan.schedule([decode(1), prompt(2, 10_000)])
        assert [share.key for share in batch.shares] == [1, 2]
        plan.ran(1, 1, 100.0)


def test_decode_steps_leave_room_for_a_piece_and_fill_the_batch_without_prompts() -> None:
    plan = planner()
    steps = [decode(key) for key in range(2 * CAPACITY)]
    (batch,) = plan.schedule(steps)
    assert batch.n_rows == CAPACITY
    (batch,) = plan.schedule([*steps, prompt(999, 100)])
    assert batch.shares[-1] == Share(999, CHUNK)
    assert batch.n_rows == CAPACITY


def test_steps_that_are_larger_than_a_batch_may_be_run_alone() -> None:
    (batch,) = planner().schedule([decode(1, n_rows=CAPACITY + 1), decode(2)])
    assert batch.shares == (Share(1, CAPACITY + 1),)


def test_a_piece_of_so_many_rows_runs_whole_and_one_a_round_beside_readers() -> None:
    exact = [replace(prompt(key, 100), rows_of_piece=CHUNK - 1) for key in (1, 2)]
    (batch,) = planner().schedule([*exact, decode(3), decode(4)])
    assert batch.shares == (Share(3, 1), Share(4, 1), Share(1, CHUNK - 1), Share(2, CHUNK - 1))
    exact = [replace(each, rows_of_piece=CHUNK + 3) for each in exact]
    (batch,) = planner().schedule([*exact, decode(3)])
    assert batch.shares == (Share(3, 1), Share(1, CHUNK + 3))
    (batch,) = planner().schedule([replace(exact[0], n_rows=2), decode(3)])
    assert batch.shares == (Share(3, 1), Share(1, 2)), "the last piece has what is left"


def test_a_work_that_is_new_goes_before_those_that_had_a_turn() -> None:
    plan = planner()
    (batch,) = plan.schedule([prompt(1, 100)])
    plan.postprocess(batch)
    (batch,) = plan.schedule([prompt(1, 100), prompt(2, 100), decode(3)])
    assert [share.key for share in batch.shares] == [3, 2]
    plan.forget(1)
    (batch,) = plan.schedule([prompt(1, 100), prompt(2, 100), decode(3)])
    assert [share.key for share in batch.shares] == [3, 1], "what is forgotten is new"


def test_a_work_that_may_wait_is_never_refused() -> None:
    plan = planner()
    forward = replace(decode(1), can_restart=False)
    batch = Batch("a", (Share(1, 1),))
    assert plan.preempt(batch, [forward], n_free=0) == FittedBatch(Batch("a", ()), refused=(1,))
    assert plan.preempt(batch, [replace(forward, can_wait=True)], n_free=0) == FittedBatch(Batch("a", ()))


def test_a_generation_waits_for_cells_of_another_one_that_ends_by_itself() -> None:
    plan = planner()
    young, old = prompt(2, 30), decode(1)
    batch = Batch("a", (Share(2, CHUNK),))
    assert plan.preempt(batch, [old, young], n_free=0).refused == ()
    for other in (replace(old, can_restart=False), replace(old, n_cells=0), replace(old, lane="b")):
        assert plan.preempt(batch, [other, young], n_free=0).refused == (2,)
    # One that gets its first cells in this batch will free them, too.
    both = Batch("a", (Share(1, 1), Share(2, CHUNK)))
    fit = plan.preempt(both, [replace(old, n_cells=0), young], n_free=1)
    assert (fit.batch.shares, fit.refused) == ((Share(1, 1),), ())


@given(demand_lists(), st.integers(0, 60))
def test_what_fits_fits_and_only_younger_generations_give_way(demands: list[Demand], n_free: int) -> None:
    plan = planner()
    for batch in plan.schedule(demands):
        known = {demand.key: demand for demand in demands if demand.lane == batch.lane}
        fit = plan.preempt(batch, demands, n_free)
        kept = {share.key: share.n_rows for share in fit.batch.shares}
        freed = {key: known[key].n_cells for key in fit.restarted}
        assert sum(kept.values()) <= n_free + sum(freed.values())
        assert all(known[key].can_restart and n_cells for key, n_cells in freed.items())
        assert not kept.keys() & freed.keys()
        assert not kept.keys() & set(fit.refused)
        for key in freed:
            assert any(x < key or not known[x].can_restart for x in kept), "it gave way to somebody"
        if sum(share.n_rows for share in batch.shares) <= n_free and all(
            known[share.key].n_cells or share.n_rows == known[share.key].n_rows for share in batch.shares
        ):
            assert fit == FittedBatch(batch)


def test_a_work_that_waits_or_gives_way_does_not_hold_up_those_after_it() -> None:
    plan = planner()
    waits = Batch("a", (Share(2, CHUNK), Share(1, 1)))
    assert plan.preempt(waits, [decode(1), prompt(2, 30)], n_free=1).batch.shares == (Share(1, 1),)
    gives_way = Batch("a", (Share(1, 1), Share(3, 1), Share(2, 1)))
    fit = plan.preempt(gives_way, [decode(1), decode(2), decode(3)], n_free=0)
    assert fit == FittedBatch(Batch("a", (Share(1, 1), Share(2, 1))), restarted=(3,))
    # The youngest one runs already in this batch.
    forward = replace(decode(9), can_restart=False)
    runs = Batch("a", (Share(3, 1), Share(9, 1)))
    fit = plan.preempt(runs, [decode(2), decode(3), forward], n_free=1)
    assert fit == FittedBatch(runs, restarted=(2,))
