"""One member of the swarm tells well-formed untruths, and nobody else notices: a minute of `python -m
bench.lies`.

And the proof that this would see it: every message type is told of, and what must not happen is reported.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from bench.common.arithmetic import _Slot
from bench.common.patient_clock import patient_clock
from bench.lies import SEED, causes, lie_of, router_lie_of, run
from bench.lying.liar import TWISTS, Lie
from bench.lying.swarm import (
    Broken,
    LyingSwarm,
    guide_world,
    open_lying_swarm,
)
from bench.lying.untruths import (
    ADDRESSES,
    HONEST,
    INSIDE,
    OWN,
    TOLD,
    all_message_types,
    drawn,
    encoded,
    filled,
    types_within,
    wire_values,
)
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm_proto import swarm as messages
from swarmllm_proto.swarm import ObservedLatency

N_IN_MEMORY = 60
N_WITH_DAEMONS = 8
NOTHING = Lie(None, None, (), "yes", known=True, busy=False, twists=("nothing",), reactions=())


def test_lies_are_told_of_every_message_type() -> None:
    told = {each for kind in TOLD for each in types_within(kind)}
    assert all_message_types() - told - INSIDE == set()


def test_a_message_type_that_nobody_tells_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class News(msgspec.Struct):
        node_id: str

    News.__module__ = messages.__name__
    monkeypatch.setattr(messages, "News", News, raising=False)
    assert News in all_message_types()


@pytest.mark.parametrize("kind", TOLD, ids=lambda kind: kind.__name__)
def test_most_untruths_are_well_formed_and_some_are_not(kind: type) -> None:
    names = {OWN: node_id_named("self")}
    names |= {name: node_id_named(f"honest{n}") for n, name in enumerate(HONEST)}
    names |= {address: f"/ip4/192.0.2.{n + 1}/tcp/4001" for n, address in enumerate(ADDRESSES)}
    n_read, n_refused = 0, 0
    for value in drawn(wire_values(kind, guide_world()), SEED, 240):
        try:
            msgspec.msgpack.decode(encoded(filled(value, names)), type=kind)
            n_read += 1
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
            n_refused += 1
    assert n_read > 10
    assert n_refused > 0


def test_numbers_stand_at_their_limits_and_beyond() -> None:
    seen = {
        value.get("decode_s")
        for value in drawn(wire_values(ObservedLatency, guide_world()), SEED, 400)
        if isinstance(value, dict) and isinstance(value.get("decode_s"), float)
    }
    assert {0.0, 1e9, 1e-300} <= seen
    assert any(math.isnan(each) or math.isinf(each) for each in seen)


def test_a_lie_is_the_same_whenever_it_is_told() -> None:
    first = (repr(lie_of(SEED, 17)), repr(router_lie_of(SEED, 17)))
    for other in range(40, 80, 10):
        lie_of(SEED, other)
        router_lie_of(SEED, other)
    assert first == (repr(lie_of(SEED, 17)), repr(router_lie_of(SEED, 17)))
    assert first != (repr(lie_of(SEED + 1, 17)), repr(router_lie_of(SEED + 1, 17)))


@asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[LyingSwarm]:
    async with open_lying_swarm(folder / "swarm") as opened:
        yield opened


def told(folder: Path, lie: Lie, sabotage: Any) -> None:
    async def tell() -> None:
        async with swarm(folder) as opened:
            sabotage(opened)
            await opened.tell(lie)

    with patient_clock() as clock:
        trio.run(tell, clock=clock)


@pytest.mark.parametrize("twist", TWISTS)
def test_every_twist_of_a_stage_is_survived(twist: str, tmp_path: Path) -> None:
    lie = Lie((4, 8), None, (), "yes", known=True, busy=False, twists=(twist,), reactions=())
    told(tmp_path, lie, lambda opened: None)


def _other_text(opened: LyingSwarm) -> None:
    opened.text = "something else"


def _distrust(opened: LyingSwarm) -> None:
    opened.nodes[0].trust.note(opened.nodes[1].router.node_id, TrustEvent.FAILED)


def _traceback(opened: LyingSwarm) -> None:
    opened.nodes[0].pool.before_forward = _log_traceback


async def _log_traceback(position: int, layers: Any) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("swarmllm.test").exception("failed")


def _much_in_the_log(opened: LyingSwarm) -> None:
    async def chat(position: int, layers: Any) -> None:
        for _ in range(100):
            logging.getLogger("swarmllm.test").info("again")

    opened.nodes[0].pool.before_forward = chat


def _kept_slot(opened: LyingSwarm) -> None:
    opened.nodes[1].pool.slots["nobody's"] = _Slot()


def _more_work(opened: LyingSwarm) -> None:
    opened.n_forwards //= 4


@pytest.mark.parametrize(
    ("sabotage", "complaint"),
    [
        (_other_text, "is due"),
        (_distrust, "trusts an honest one"),
        (_traceback, "traceback"),
        (_much_in_the_log, "lines in the log"),
        (_kept_slot, "not freed"),
        (_more_work, "forwards where"),
    ],
)
def test_what_must_not_happen_is_reported(sabotage: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises((Broken, BaseExceptionGroup)) as caught:
        told(tmp_path, NOTHING, sabotage)
    assert any(complaint in str(cause) for cause in causes(caught.value))


@pytest.mark.slow
def test_a_member_of_an_in_memory_swarm_lies_and_nobody_else_notices() -> None:
    figures = run(SEED, math.inf, lies_max=N_IN_MEMORY)
    assert figures.broken == []
    assert figures.n_lies == N_IN_MEMORY


@pytest.mark.slow
def test_a_member_lies_to_real_daemons_and_all_go_on() -> None:
    figures = run(SEED, math.inf, lies_max=N_WITH_DAEMONS, daemons=True)
    assert figures.broken == []
    assert figures.n_lies == N_WITH_DAEMONS
