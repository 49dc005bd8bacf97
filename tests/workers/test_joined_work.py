"""A job that comes before the end of the prompt waits for it, and shares its batch where bits allow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from node_ids import A, B

from swarmllm_proto import ipc
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import decode_tensor, tensor_bytes
from swarmllm_workers.kernels.small_batches import ROWS_MAX

from .test_lone_steps import Stage

PROMPT = np.array([5, 90, 91, 92, 93, 94, 95, 96, 97, 98], np.int32)
GUESSES = (101, 102, 103, 104, 105, 106)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The first of two."""
    stage = Stage(tmp_path_factory.mktemp("stage"), 0, 6)
    yield stage
    stage.close()


@pytest.fixture
def batches(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of what runs, the rows of each span."""
    ran: list[list[int]] = []
    engine = stage.handlers.state.engine()
    run = engine.run

    def note(route: Any, spans: Any) -> Any:
        ran.append([len(span.data) for span in spans])
        return run(route, spans)

    monkeypatch.setattr(engine, "run", note)
    return ran


def take_seat(stage: Stage, request_id: str) -> None:
    seat = ipc.TakeSeat(
        id=7,
        request_id=request_id,
        stage=0,
        start=0,
        end=6,
        before=A,
        after=B,
        origin=B,
        n_prompt_tokens=len(PROMPT),
    )
    stage.handle(seat)


def bring(stage: Stage, request_id: str, position: int, tokens: np.ndarray) -> np.ndarray:
    """Rows of the prompt, which the daemon brings; what they give."""
    before = len(stage.payloads)
    forward = ipc.Forward(
        id=7,
        request_id=request_id,
        start=0,
        end=6,
        position=position,
        want="hidden",
        n_prompt_tokens=len(PROMPT),
    )
    stage.handle(forward, memoryview(tensor_bytes(tokens)))
    results = [each for each in stage.payloads[before:] if each]
    assert len(results) == 1
    return decode_tensor(memoryview(results[0]))


def job(request_id: str, tokens: tuple[int, ...], position: int, number: int, fresh: int = 1) -> Any:
    token, *guesses = tokens
    message = LayerForward(
        request_id=request_id,
        step="embed",
        stage=0,
        position=position,
        n_tokens=len(tokens),
        token=token,
        guesses=tuple(guesses),
        number=number,
        fresh=fresh,
    )
    return message, b""


@pytest.fixture(scope="module")
def alone(stage: Stage) -> np.ndarray:
    """What each row gives, one by one; the first window shows how many may run at once."""
    take_seat(stage, "alone")
    rows = [bring(stage, "alone", 0, PROMPT[:-3])]
    rows += [bring(stage, "alone", i, PROMPT[i : i + 1]) for i in range(len(PROMPT) - 3, len(PROMPT))]
    for i, token in enumerate(GUESSES):
        message = LayerForward(
            request_id="alone", step="embed", stage=0, position=len(PROMPT) + i, n_tokens=1, token=token
        )
        stage.deliver((message, b""))
    for _, payload in stage.passed_on():
        rows.append(decode_tensor(memoryview(payload)))
    stage.deliver(job("alone", GUESSES[:3], len(PROMPT), 1))
    stage.passed_on()
    stage.handle(ipc.CancelRequest(id=7, request_id="alone"))
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("n_last", "n_guessed", "due"),
    [
        (1, 3, [[4]]),
        (3, 4, [[7]]),
        (1, 6, [[7]]),
        (3, 6, [[7], [2]]),
    ],
)
def test_the_first_early_job_shares_the_batch_of_the_last_rows(
    stage: Stage,
    alone: np.ndarray,
    batches: list[list[int]],
    n_last: int,
    n_guessed: int,
    due: list[list[int]],
) -> None:
    request_id, n_first = f"joined {n_last} {n_guessed}", len(PROMPT) - n_last
    take_seat(stage, request_id)
    stage.deliver(job(request_id, GUESSES[:n_guessed], len(PROMPT), 1))
    bring(stage, request_id, 0, PROMPT[:n_first])
    assert stage.passed_on() == [], "it waits for the end of the prompt"
    batches.clear()
    last = bring(stage, request_id, n_first, PROMPT[n_first:])
    assert batches == due
    assert max(map(sum, due)) <= ROWS_MAX
    ((passed, payload),) = stage.passed_on()
    assert isinstance(passed, LayerForward)
    assert (passed.position, passed.n_tokens, passed.number) == (len(PROMPT), n_guessed, 1)
    assert passed.takes_early is True
    rows = np.concatenate((last, decode_tensor(memoryview(payload))))
    assert np.array_equal(rows, alone[n_first : n_first + len(rows)])
    stage.handle(ipc.CancelRequest(id=7, request_id=request_id))


def test_early_jobs_run_in_turn_and_refused_ones_do_not(
    stage: Stage, alone: np.ndarray, batches: list[list[int]]
) -> None:
    take_seat(stage, "turn")
    end = len(PROMPT)
    stage.deliver(job("turn", GUESSES[2:4], end + 2, 2), job("turn", GUESSES[:2], end, 1))
    bring(stage, "turn", 0, PROMPT[:-1])
    batches.clear()
    bring(stage, "turn", end - 1, PROMPT[-1:])
    assert batches == [[3], [2]]
    assert [each.number for each, _ in stage.passed_on()] == [1, 2]  # type: ignore[union-attr]
    take_seat(stage, "refused")
    stage.deliver(job("refused", (111, 112), end, 1), job("refused", GUESSES[:2], end, 2, fresh=2))
    bring(stage, "refused", 0, PROMPT[:-1])
    batches.clear()
    bring(stage, "refused", end - 1, PROMPT[-1:])
    assert batches == [[3]]
    ((passed, payload),) = stage.passed_on()
    assert isinstance(passed, LayerForward)
    assert passed.number == 2
    assert np.array_equal(decode_tensor(memoryview(payload)), alone[end : end + 2])
    for request_id in ("turn", "refused"):
        stage.handle(ipc.CancelRequest(id=7, request_id=request_id))


def test_a_request_that_ends_takes_its_early_jobs_along(stage: Stage, alone: np.ndarray) -> None:
    take_seat(stage, "ends")
    stage.deliver(job("ends", GUESSES[:2], len(PROMPT), 1))
    stage.handle(ipc.CancelRequest(id=7, request_id="ends"))
    take_seat(stage, "ends")
    bring(stage, "ends", 0, PROMPT)
    assert stage.passed_on() == []
    stage.handle(ipc.CancelRequest(id=7, request_id="ends"))
