"""What an attempt asks of the checker, what a stage takes over, and whose pictures a node remembers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from swarmllm.pipeline.origin.attempts import Attempts
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.single_stage import RemoteChain
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.stage.lifecycle import SessionState
from swarmllm.pipeline.vision import checking
from swarmllm.pipeline.vision.checking import PictureChecker


@pytest.mark.parametrize(("kind", "is_whole"), [(RemoteChain, True), (Chain, False)])
def test_the_checker_is_told_whether_one_node_runs_the_whole_model(kind: type[Chain], is_whole: bool) -> None:
    reported: list[bool] = []

    def draws(_context: object, *, is_whole: bool) -> int:
        reported.append(is_whole)
        return 3

    attempts: Any = SimpleNamespace(_checker=SimpleNamespace(draws=draws))
    attempt: Any = SimpleNamespace(context=object(), request=SimpleNamespace(pictures=None))
    assert Attempts._drawn_stage(attempts, attempt, kind) == 3
    assert reported == [is_whole]


@pytest.mark.parametrize("state", [SessionState.HELD, SessionState.RUNNING])
async def test_a_session_that_is_held_is_taken_over_and_one_that_runs_is_stopped_first(
    state: SessionState,
) -> None:
    happened: list[str] = []

    async def resume(_model: object, **call: object) -> tuple[()]:
        happened.append(f"resume {call['resumes']}")
        return ()

    def stop(*, hold: bool) -> None:
        happened.append("hold" if hold else "stop")
        done.set()

    done = trio.Event()
    broken: Any = SimpleNamespace(
        state=state,
        done=done,
        stop=stop,
        context=SimpleNamespace(request_id="old"),
        taken_over=lambda: happened.append("taken over"),
    )
    sessions: Any = SimpleNamespace(compute=SimpleNamespace(resume=resume))
    context: Any = SimpleNamespace(model=None, request_id="new", n_given_tokens=4, view=None)
    with trio.fail_after(5):
        await Sessions._take_over(sessions, context, broken, ())
    assert happened == ["hold"] * (state is SessionState.RUNNING) + ["resume old", "taken over"]


def test_as_many_pictures_are_remembered_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "GIVEN_MAX", 2)
    dropped: list[object] = []
    parts: Any = SimpleNamespace(drop=dropped.append, score=lambda node_id: 1.0)
    checker = PictureChecker(parts, parts, parts, parts, parts, parts, parts, parts, 0.0, lambda: 1.0)
    for digest in ("a", "b", "c"):
        question: Any = SimpleNamespace(entry=SimpleNamespace(model_id="m"), key=("m", "p", digest))
        checker.came(question, parts, "node", ())
    checker._forget("node")
    assert dropped == [("m", "p", "b"), ("m", "p", "c")]
