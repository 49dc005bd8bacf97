"""Threads among workers that compute at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st
from pool_parts import MODEL, OTHER_MODEL, fake_pool

from swarmllm.models.layers import LayerRange
from swarmllm.workerpool import WorkerPool
from swarmllm.workerpool.thread_shares import ThreadShares
from swarmllm_proto.ipc import Sampling

ENDLESS = Sampling(max_tokens=2**20)


def test_a_lone_worker_is_told_nothing() -> None:
    shares = ThreadShares[str]()
    assert shares.share("a") is None
    assert shares.note("a", 8, is_at_work=True) == []
    assert shares.share("a") == 8
    assert shares.note("a", 8, is_at_work=False) == []
    assert shares.note("a", 8, is_at_work=True) == []


def test_who_begins_and_who_is_at_work_share_and_get_all_back() -> None:
    shares = ThreadShares[str]()
    shares.note("a", 7, is_at_work=True)
    assert shares.note("b", 7, is_at_work=True) == ["a", "b"]
    assert (shares.share("a"), shares.share("b")) == (4, 3)
    assert shares.note("a", 7, is_at_work=False) == ["b"], "who rests learns its share when it begins"
    assert shares.share("b") == 7
    assert shares.note("a", 7, is_at_work=True) == ["b", "a"], "who began first has the odd one"
    assert (shares.share("a"), shares.share("b")) == (3, 4)


def test_a_worker_gets_no_more_than_it_is_configured_to_use_and_one_at_least() -> None:
    shares = ThreadShares[str]()
    for who, n_threads in (("a", 8), ("b", 2), ("c", 1)):
        shares.note(who, n_threads, is_at_work=True)
    assert [shares.share(who) for who in "abc"] == [3, 2, 1]
    for who in map(str, range(9)):
        shares.note(who, 8, is_at_work=True)
    assert {shares.share(who) for who in "abc"} == {1}


def test_a_worker_that_has_ended_leaves_its_share_and_nothing_else() -> None:
    shares = ThreadShares[str]()
    shares.note("a", 4, is_at_work=True)
    shares.note("b", 4, is_at_work=True)
    assert shares.forget("a") == ["b"]
    assert (shares.share("a"), shares.share("b")) == (None, 4)
    assert shares.forget("a") == []


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["begins", "rests", "ends"])), max_size=40),
    st.integers(1, 16),
)
def test_whoever_is_at_work_has_been_told_its_share(events: list[tuple[str, str]], n_threads: int) -> None:
    shares = ThreadShares[str]()
    told: dict[str, int] = {}
    at_work: set[str] = set()
    for who, event in events:
        if event == "begins":
            at_work.add(who)
            told.setdefault(who, n_threads)
            changed = shares.note(who, n_threads, is_at_work=True)
        elif event == "rests":
            at_work.discard(who)
            changed = shares.note(who, n_threads, is_at_work=False)
        else:
            at_work.discard(who)
            told.pop(who, None)
            changed = shares.forget(who)
        assert set(changed) <= at_work
        for each in changed:
            share = shares.share(each)
            assert share is not None
            assert share != told[each]
            told[each] = share
        in_use = sorted(told[each] for each in at_work)
        assert sum(in_use) == max(n_threads, len(at_work)) or not at_work
        assert not in_use or in_use[-1] - in_use[0] <= 1


def threads_of(pool: WorkerPool) -> dict[str, int]:
    return {each.model_id: each.n_threads for each in pool.statistics()}


async def until(pool: WorkerPool, *expected: int) -> None:
    with trio.fail_after(DEADLINE_S):
        while list(threads_of(pool).values()) != list(expected):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_two_workers_that_generate_share_the_threads(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, n_threads=5) as pool:
        for model in (MODEL, OTHER_MODEL):
            await pool.load(model, LayerRange(0, 4))
        assert list(threads_of(pool).values()) == [5, 5]
        tokens = await pool.tokenize(MODEL, text="a")
        async with pool.generate(MODEL, request_id="a", tokens=tokens, sampling=ENDLESS) as first:
            await anext(first)
            async with pool.generate(OTHER_MODEL, request_id="b", tokens=tokens, sampling=ENDLESS) as second:
                await anext(second)
                await until(pool, 3, 2)
            await until(pool, 5, 2)
            async with pool.generate(OTHER_MODEL, request_id="c", tokens=tokens, sampling=ENDLESS) as second:
                await anext(second)
                await until(pool, 3, 2)
                await pool.unload(MODEL.model_id)
                with trio.fail_after(DEADLINE_S):
                    while threads_of(pool)[OTHER_MODEL.model_id] != 5:  # noqa: ASYNC110
                        await trio.sleep(0.01)


@pytest.mark.parametrize("habit", ["refuses-threads"])
async def test_a_worker_that_refuses_its_share_goes_on(tmp_path: Path, habit: str) -> None:
    async with fake_pool(tmp_path, habit, n_threads=2) as pool:
        tokens = await pool.tokenize(MODEL, text="a")
        async with (
            pool.generate(MODEL, request_id="a", tokens=tokens, sampling=ENDLESS) as first,
            pool.generate(OTHER_MODEL, request_id="b", tokens=tokens, sampling=ENDLESS) as second,
        ):
            for _ in range(20):
                await anext(first)
                await anext(second)
        assert list(threads_of(pool).values()) == [2, 2]
