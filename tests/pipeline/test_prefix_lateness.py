"""Nodes that are late with KV, or busy: they are asked again soon, and late ones ever more rarely."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from swarmllm.errors import DeadlineExceeded, NodeBusy, SwarmLLMError
from swarmllm.pipeline.prefix.choice import ALLOWED, REST_S, HolderPath, PrefixFetchSettings, Slices, choose
from swarmllm.pipeline.prefix.lateness import (
    BUSY_S,
    FORGOTTEN,
    HALF_LIFE_MAX_S,
    HALF_LIFE_S,
    IN_VAIN,
    NODES_MAX,
    LateHolders,
)
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm_proto.codec import decode_request, encode_response
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import PrefixKv, PrefixKvFetch

from .test_prefix_fetching import COLD_S, FAR, NEAR, ROW_BYTES, B, Store, handler_of, pair

SOON_S = 10.0
PAUSE_S = 0.5


class SometimesBusy:
    """A holder of ten blocks."""

    def __init__(self) -> None:
        self.is_busy = True
        self.asked_s: list[float] = []
        """When it was asked for first rows."""
        self._honest = handler_of(Store(n_kept=10))

    async def __call__(self, sender: NodeId, body: bytes) -> bytes:
        request = decode_request(body)
        assert isinstance(request, PrefixKvFetch)
        if request.first_row == 0:
            self.asked_s.append(trio.current_time())
        if self.is_busy:
            return encode_response(PrefixKv(status="busy"))
        return bytes(await self._honest(sender, body))


# How late somebody is expected to be.


def test_lateness_that_was_measured_is_expected_again_and_halves() -> None:
    late = LateHolders()
    assert late.expected_s(NEAR, 5.0) == 0
    late.gave(NEAR, 0.4, 5.0)
    assert late.expected_s(NEAR, 5.0) == pytest.approx(0.4)
    assert late.expected_s(NEAR, 5.0 + HALF_LIFE_S) == pytest.approx(0.2)
    assert late.expected_s(FAR, 5.0) == 0
    late.gave(NEAR, -0.1, 5.0)
    assert late.expected_s(NEAR, 5.0) == 0


def test_what_was_waited_for_in_vain_takes_twice_as_long_and_longer_each_time() -> None:
    late = LateHolders()
    late.gave_nothing(NEAR, 0.3, 5.0)
    assert late.expected_s(NEAR, 5.0) == pytest.approx(IN_VAIN * 0.3)
    assert late.expected_s(NEAR, 5.0 + HALF_LIFE_S) == pytest.approx(0.3)
    late.gave_nothing(NEAR, 0.3, 7.0)
    assert late.expected_s(NEAR, 7.0 + 2 * HALF_LIFE_S) == pytest.approx(0.3)
    for now_s in range(9, 29):
        late.gave_nothing(NEAR, 0.3, now_s)
    assert late.expected_s(NEAR, 28.0 + HALF_LIFE_MAX_S) == pytest.approx(0.3)
    late.gave(NEAR, 0.1, 29.0)
    late.gave_nothing(NEAR, 0.3, 29.0)
    assert late.expected_s(NEAR, 29.0 + HALF_LIFE_S) == pytest.approx(0.3)


def test_what_was_asked_for_at_the_same_time_counts_as_once() -> None:
    late = LateHolders()
    late.gave_nothing(NEAR, 1.0, 5.0)
    late.gave_nothing(NEAR, 0.3, 5.0)
    assert late.expected_s(NEAR, 5.0 + HALF_LIFE_S) == pytest.approx(1.0)
    late.gave_nothing(NEAR, 2.0, 6.5)
    assert late.expected_s(NEAR, 6.5 + HALF_LIFE_S) == pytest.approx(2.0)


def test_lateness_of_long_ago_does_not_count() -> None:
    late = LateHolders()
    late.gave_nothing(NEAR, 0.3, 5.0)
    after_s = 5.0 + FORGOTTEN * HALF_LIFE_S
    assert late.expected_s(NEAR, after_s - 0.01) > 0
    assert late.expected_s(NEAR, after_s) == 0
    late.gave_nothing(NEAR, 0.3, after_s)
    assert late.expected_s(NEAR, after_s + HALF_LIFE_S) == pytest.approx(0.3)


def test_who_says_that_it_is_busy_needs_a_moment_at_least() -> None:
    late = LateHolders()
    late.gave_nothing(NEAR, 0.01, 5.0, says_busy=True)
    assert late.expected_s(NEAR, 5.0) == pytest.approx(IN_VAIN * BUSY_S)
    late.gave_nothing(FAR, 2.0, 5.0, says_busy=True)
    assert late.expected_s(FAR, 5.0) == pytest.approx(IN_VAIN * 2.0)


def test_of_so_many_nodes_lateness_is_known() -> None:
    late = LateHolders()
    nodes = [node_id_named(str(i)) for i in range(NODES_MAX + 1)]
    for node_id in nodes:
        late.gave(node_id, 1.0, 5.0)
    assert [late.expected_s(each, 5.0) for each in (nodes[0], nodes[-2], nodes[-1])] == [1.0, 1.0, 0.0]
    late.gave(nodes[0], 2.0, 5.0)
    assert late.expected_s(nodes[0], 5.0) == 2.0
    late.gave(nodes[-1], 1.0, 5.0 + FORGOTTEN * HALF_LIFE_S)
    assert late.expected_s(nodes[-1], 5.0 + FORGOTTEN * HALF_LIFE_S) == 1.0


@given(st.floats(0, 10), st.floats(0.001, 1), st.floats(0.001, 0.1))
def test_nobody_is_asked_whose_lateness_takes_what_may_be_lost(
    late_s: float, spare_s: float, prefill_s: float
) -> None:
    slices, path = Slices(10 * B, ROW_BYTES), HolderPath(NEAR, 0.001, 1e9, late_s)
    offer = choose([path], slices, 0, prefill_s, spare_s)
    if offer is not None:
        assert late_s < spare_s
        assert offer.predicted_s >= late_s


def test_of_two_holders_the_one_that_was_late_is_asked_later() -> None:
    ways = [HolderPath(NEAR, 0.001, 1e9, 0.3), HolderPath(FAR, 0.02, 1e9)]
    offer = choose(ways, Slices(10 * B, ROW_BYTES), 0, 0.01)
    assert offer is not None
    assert offer.path.node_id == FAR


# Two nodes.


async def test_a_holder_that_was_busy_is_asked_again_soon(autojump_clock: MockClock) -> None:
    holder = SometimesBusy()
    async with pair(holder) as asker:
        assert await asker.ask() == 0
        assert asker.counts.prefix_missed.total() == 1
        holder.is_busy = False
        assert await asker.ask() == 0, "not at once"
        assert len(holder.asked_s) == 1
        assert asker.counts.prefix_not_asked.total() == 1
        await trio.sleep(SOON_S)
        assert await asker.ask() == 10 * B
        assert asker.events.noted == []


async def test_a_holder_that_was_late_is_asked_again_soon(autojump_clock: MockClock) -> None:
    holder = Store(n_kept=10, stands_still=True)
    async with pair(holder) as asker:
        assert await asker.ask() == 0
        holder.stands_still = False
        await trio.sleep(SOON_S)
        assert await asker.ask() == 10 * B


async def test_a_holder_that_was_late_until_the_requests_time_was_up_is_asked_again_soon(
    autojump_clock: MockClock,
) -> None:
    holder = Store(n_kept=10, stands_still=True)
    async with pair(holder) as asker:
        asker.fetcher.transfer.settings = PrefixFetchSettings(is_on=True, asker_timeout_s=0.2)
        assert await asker.ask() == 0
        holder.stands_still = False
        assert await asker.ask() == 0
        await trio.sleep(SOON_S)
        assert await asker.ask() == 10 * B


async def test_a_holder_that_gives_its_first_rows_only_is_asked_ever_more_rarely(
    autojump_clock: MockClock,
) -> None:
    holder = Store(n_kept=10, gives_rows=B)
    async with pair(holder) as asker:
        misses: list[float] = []
        while trio.current_time() < 300:
            asker.store.n_kept = 0
            before = asker.counts.prefix_missed.total()
            began_s = trio.current_time()
            n_came = await asker.ask()
            assert trio.current_time() - began_s <= n_came * COLD_S / (10 * B) + ALLOWED * COLD_S + 1e-6
            if asker.counts.prefix_missed.total() > before:
                misses.append(trio.current_time())
            await trio.sleep(PAUSE_S)
        gaps = [later - earlier for earlier, later in itertools.pairwise(misses)]
        assert gaps == sorted(gaps)
        assert gaps[0] < SOON_S
        assert gaps[-1] > REST_S / 2


async def test_a_holder_that_does_not_have_what_it_announced_rests_as_before(
    autojump_clock: MockClock,
) -> None:
    holder = Store(n_kept=3)
    async with pair(holder) as asker:
        assert await asker.ask() == 0
        holder.n_kept = 10
        await trio.sleep(REST_S - 1)
        assert await asker.ask() == 0
        await trio.sleep(1)
        assert await asker.ask() == 10 * B


@pytest.mark.parametrize("lie", [lambda: b"\xc1", lambda: encode_response(PrefixKv(status="ok"))])
async def test_a_holder_that_lied_rests_as_before(
    autojump_clock: MockClock, lie: Callable[[], bytes | bytearray]
) -> None:
    honest, lies = handler_of(Store(n_kept=10)), True

    async def answer(sender: NodeId, body: bytes) -> Any:
        return bytes(lie()) if lies else await honest(sender, body)

    async with pair(answer) as asker:
        assert await asker.ask() == 0
        lies = False
        await trio.sleep(REST_S - 1)
        assert await asker.ask() == 0
        await trio.sleep(1)
        assert await asker.ask() == 10 * B


async def test_another_holder_of_less_is_asked_where_the_first_one_is_late(
    autojump_clock: MockClock,
) -> None:
    holder = SometimesBusy()
    async with pair(holder, Store(n_kept=6), n_said_by_other=6) as asker:
        assert await asker.ask() == 6 * B, "after it was told that the first one is busy"
        asker.store.n_kept = 0
        assert await asker.ask() == 6 * B
        assert len(holder.asked_s) == 1
        assert asker.counts.prefix_not_asked.total() == 0


@pytest.mark.parametrize("error", [NodeBusy("it is busy"), DeadlineExceeded("it did not answer")])
async def test_a_holder_that_has_no_place_for_a_question_is_asked_again_soon(
    autojump_clock: MockClock, error: SwarmLLMError
) -> None:
    async with pair(Store(n_kept=10)) as asker:
        router = asker.fetcher.transfer.router

        async def fail(*_: Any, **__: Any) -> bytes:
            await trio.sleep(0.2)
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(router, "fetch", fail)
            assert await asker.ask() == 0
        await trio.sleep(SOON_S)
        assert await asker.ask() == 10 * B


async def test_what_a_holder_gives_late_and_wholly_ends_what_was_expected_of_it(
    autojump_clock: MockClock,
) -> None:
    honest, late_s = handler_of(Store(n_kept=10)), 0.3

    async def answer(sender: NodeId, body: bytes) -> Any:
        await trio.sleep(late_s)
        return await honest(sender, body)

    async with pair(answer) as asker:
        late = asker.fetcher.transfer.late
        late.gave_nothing(NEAR, 0.1, trio.current_time() - 1.0)
        assert await asker.ask() == 10 * B
        at_s = trio.current_time()
        assert 0.2 < late.expected_s(NEAR, at_s) <= late_s
        late.gave_nothing(NEAR, 1.0, at_s)
        assert late.expected_s(NEAR, at_s + HALF_LIFE_S) == pytest.approx(1.0), "it was the first time"
