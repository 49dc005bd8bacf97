"""One member of an in-memory swarm tells well-formed untruths, and nobody else notices: some of what
`python -m bench.lies` tells. And what must not happen is reported."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from long_runs import part_or_whole

from bench.common.arithmetic import _Slot
from bench.common.patient_clock import patient_clock
from bench.lies import SEED, causes, run
from bench.lying.liar import Lie
from bench.lying.swarm import Broken, LyingSwarm, open_lying_swarm
from bench.lying.twists import TWISTS
from swarmllm.swarm.peers.trust import TrustEvent

N_LIES = part_or_whole(12, 30)
NOTHING = Lie(None, None, (), "yes", known=True, busy=False, twists=("nothing",), reactions=())


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
    figures = run(SEED, math.inf, lies_max=N_LIES)
    assert figures.broken == []
    assert figures.n_lies == N_LIES
