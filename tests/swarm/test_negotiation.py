"""Agreeing on a protocol: among ourselves, with the library's own ways, and with whoever sends anything."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from swarmllm.swarm.libp2p.negotiation import (
    FIRST_MAX_BYTES,
    PROPOSALS_MAX,
    agree,
    propose,
    propose_without_waiting,
)

GREETING = b"\x13/multistream/1.0.0\n"
GIVEN = TProtocol("/given/1")
OTHER = TProtocol("/other/" + "long" * 40)


class End:
    """One end of a stream in memory, as libp2p's streams look."""

    def __init__(self, stream: trio.StapledStream) -> None:  # type: ignore[type-arg]
        self._stream = stream
        self.n_writes = 0
        self.muxed_stream = SimpleNamespace(conn=SimpleNamespace(stream_buffers={}), stream_id=1)

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        self.n_writes += 1
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()


def ends() -> tuple[End, End]:
    one, other = trio.testing.memory_stream_pair()
    return End(one), End(other)


async def negotiated(proposed: Sequence[TProtocol], supported: set[TProtocol]) -> tuple[TProtocol, TProtocol]:
    dialler, listener = ends()
    results: dict[str, TProtocol] = {}

    async def listen() -> None:
        results["listener"] = await agree(listener, lambda name: name in supported)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        results["dialler"] = await propose(dialler, proposed)
    return results["dialler"], results["listener"]


@pytest.mark.parametrize(
    ("proposed", "supported"),
    [([GIVEN], {GIVEN}), ([OTHER], {OTHER, GIVEN}), ([OTHER, GIVEN], {GIVEN})],
    ids=["the only one", "a long name", "the second"],
)
async def test_both_ends_agree_on_the_first_that_both_speak(
    proposed: list[TProtocol], supported: set[TProtocol]
) -> None:
    assert await negotiated(proposed, supported) == (proposed[-1], proposed[-1])


async def test_a_dialler_learns_that_nothing_it_proposes_is_spoken() -> None:
    dialler, listener = ends()

    async def listen() -> None:
        with pytest.raises(MultiselectError):
            await agree(listener, lambda name: False)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        with pytest.raises(StreamFailure):
            await propose(dialler, [GIVEN, OTHER])
        await dialler.close()


async def test_what_goes_with_the_proposal_is_the_beginning_of_the_stream() -> None:
    dialler, listener = ends()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(propose, dialler, [GIVEN], b"first words")
        assert await agree(listener, lambda name: name == GIVEN) == GIVEN
        assert await listener.read(100) == b"first words"
    assert dialler.n_writes == 1


async def test_a_listener_that_has_heard_all_answers_all_at_once() -> None:
    dialler, listener = ends()
    listener.muxed_stream.conn.stream_buffers[1] = b"the proposal is here"
    await dialler.write(GREETING + b"\x09/given/1\n")
    await agree(listener, lambda name: name == GIVEN)
    assert (listener.n_writes, await dialler.read(100)) == (1, GREETING + b"\x09/given/1\n")


@pytest.mark.parametrize(
    ("proposed", "first"), [([GIVEN, OTHER], b"x"), ([GIVEN], bytes(FIRST_MAX_BYTES + 1))]
)
async def test_only_one_proposal_may_have_company_and_little_of_it(
    proposed: list[TProtocol], first: bytes
) -> None:
    dialler, _ = ends()
    with pytest.raises(ValueError, match="short, and for one protocol"):
        await propose(dialler, proposed, first)
    assert dialler.n_writes == 0


async def test_the_librarys_dialler_is_understood() -> None:
    dialler, listener = ends()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agree, listener, lambda name: name == GIVEN)
        chosen = await MultiselectClient().select_one_of([OTHER, GIVEN], MultiselectCommunicator(dialler), 5)  # type: ignore[arg-type]
    assert chosen == GIVEN


async def test_the_librarys_listener_is_understood() -> None:
    dialler, listener = ends()

    async def handler(_: object) -> None: ...

    async with trio.open_nursery() as nursery:
        nursery.start_soon(Multiselect({GIVEN: handler}).negotiate, MultiselectCommunicator(listener), 5)  # type: ignore[arg-type]
        assert await propose(dialler, [OTHER, GIVEN]) == GIVEN


async def test_proposals_without_end_are_not_answered_without_end() -> None:
    dialler, listener = ends()
    await dialler.write(GREETING + b"\x08/nobody\n" * (PROPOSALS_MAX + 1))
    with pytest.raises(MultiselectError, match=str(PROPOSALS_MAX)):
        await agree(listener, lambda name: False)
    assert await listener.read(100) == b"\x08/nobody\n"


async def test_silence_ends_the_negotiation(autojump_clock: trio.testing.MockClock) -> None:
    for negotiation in (agree(ends()[0], lambda name: True), propose(ends()[0], [GIVEN])):
        with pytest.raises(MultiselectError, match="in time"):
            await negotiation


@given(junk=st.binary(max_size=300), greets=st.booleans())
def test_any_bytes_end_in_one_of_two_errors(junk: bytes, greets: bool) -> None:
    async def hear() -> None:
        for side in ("dialler", "listener"):
            here, there = ends()
            await there.write((GREETING if greets else b"") + junk)
            await there.close()
            with pytest.raises((MultiselectError, StreamFailure, trio.BrokenResourceError)):
                await (propose(here, [GIVEN]) if side == "dialler" else agree(here, lambda name: False))

    trio.run(hear)


@pytest.mark.parametrize("is_stock", [True, False], ids=["the library's listener", "ours"])
async def test_the_only_protocol_is_spoken_before_the_listener_has_answered(is_stock: bool) -> None:
    dialler, listener = ends()

    async def handler(_: object) -> None: ...

    await propose_without_waiting(dialler, GIVEN)
    await dialler.write(b"first words")
    async with trio.open_nursery() as nursery:
        if is_stock:
            stock = Multiselect({GIVEN: handler})
            await stock.negotiate(MultiselectCommunicator(listener), 5)  # type: ignore[arg-type]
        else:
            await agree(listener, lambda name: name == GIVEN)
        assert await listener.read(100) == b"first words"
        await listener.write(b"an answer")
        assert await dialler.read(3) == b"an "
        assert await dialler.read(100) == b"answer"
        nursery.cancel_scope.cancel()


async def test_a_listener_that_does_not_take_the_only_protocol_is_noticed_at_the_first_read() -> None:
    dialler, listener = ends()
    await propose_without_waiting(dialler, GIVEN)
    await listener.write(GREETING + b"\x03na\n" + bytes(100))
    with pytest.raises(MultiselectError, match="does not take /given/1"):
        await dialler.read(1)
