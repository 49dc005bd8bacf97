"""When text leaves for its reader: at once, at most every 10 ms, and the end without delay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmllm.api.output.buffered_generation import MIN_FLUSH_INTERVAL_S, BufferedGeneration
from swarmllm.pipeline.origin.generation import GeneratedText


class Timed:
    """A generation whose pieces come at known times, in seconds, and which ends at the last one."""

    prompt = None

    def __init__(self, pieces: Sequence[tuple[float, str]]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[GeneratedText]:
        for index, (at_s, text) in enumerate(self._pieces):
            await trio.sleep_until(at_s)
            if text:
                yield GeneratedText(text, index, index)


@asynccontextmanager
async def opening(generation: Any) -> AsyncIterator[Any]:
    yield generation


async def taken(pieces: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """(second, text) of each passage, as its reader gets it."""
    began_s = trio.current_time()
    feed = BufferedGeneration(opening(Timed([(began_s + at_s, text) for at_s, text in pieces])))
    got: list[tuple[float, str]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        while not feed.finished or feed.has_pieces:
            text_delta = await feed.take(60.0)
            assert text_delta is not None
            if text_delta:
                got.append((round(trio.current_time() - began_s, 6), text_delta.text))
    return got


@pytest.mark.parametrize(
    ("pieces", "passages"),
    [
        ([(1.0, "a"), (2.0, "b")], [(1.0, "a"), (2.0, "b")]),
        ([(1.0, "a"), (1.002, "b"), (1.005, "c"), (2.0, "")], [(1.0, "a"), (1.01, "bc")]),
        ([(1.0, "a"), (1.002, "b"), (1.012, "c"), (1.02, "")], [(1.0, "a"), (1.01, "b"), (1.02, "c")]),
        ([(1.0, "a"), (1.002, "b")], [(1.0, "a"), (1.002, "b")]),
    ],
    ids=["slow", "fast", "faster than chunks", "the end"],
)
async def test_text_leaves_at_once_and_at_most_so_often(
    pieces: list[tuple[float, str]], passages: list[tuple[float, str]], autojump_clock: MockClock
) -> None:
    assert MIN_FLUSH_INTERVAL_S == 0.01
    assert await taken(pieces) == passages


async def test_a_reader_is_told_that_nothing_has_come(autojump_clock: MockClock) -> None:
    began_s = trio.current_time()
    feed = BufferedGeneration(opening(Timed([(began_s + 5.0, "a"), (began_s + 9.0, "b")])))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        assert await feed.take(2.0) is None
        assert trio.current_time() - began_s == pytest.approx(2.0)
        text_delta = await feed.take(60.0)
        assert text_delta is not None
        assert text_delta.text == "a"
        assert trio.current_time() - began_s == pytest.approx(5.0)
        feed.stop()
