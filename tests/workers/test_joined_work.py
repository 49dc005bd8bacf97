"""A job that comes before the end of the prompt waits for it, and shares its batch where bits allow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from node_ids import A, B

from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_job
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.swarm import LayerForward, StreamingToken
from swarmllm_proto.tensors import decode_tensor, tensor_bytes
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.ring.seat import Limits

from .test_lone_steps import GREEDY, N_EMBD, Stage, row

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
    start, end = stage.range
    seat = ipc.TakeSeat(
        id=7,
        request_id=request_id,
        stage=min(start, 1),
        start=start,
        end=end,
        before=A,
        after=B,
        origin=B,
        n_prompt_tokens=len(PROMPT),
        sampling=GREEDY if start else None,
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


def test_rows_that_the_origin_has_embedded_share_no_batch_with_tokens(
    stage: Stage, alone: np.ndarray, batches: list[list[int]]
) -> None:
    take_seat(stage, "embedded")
    stage.deliver(job("embedded", GUESSES[:3], len(PROMPT), 1))
    bring(stage, "embedded", 0, PROMPT[:-1])
    batches.clear()
    bring(stage, "embedded", len(PROMPT) - 1, row(1))
    assert batches == [[1], [3]]
    assert len(stage.passed_on()) == 1
    stage.handle(ipc.CancelRequest(id=7, request_id="embedded"))


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    settings = {"ngram_max_size": 4, "ngram_num_pred_tokens": 10}
    stage = Stage(tmp_path_factory.mktemp("last"), 6, 12, **settings)
    yield stage
    stage.close()


def bring_last(stage: Stage, request_id: str, position: int, rows: np.ndarray) -> None:
    is_end = position + len(rows) == len(PROMPT)
    forward = ipc.Forward(
        id=7,
        request_id=request_id,
        start=6,
        end=12,
        position=position,
        want="token" if is_end else "none",
        sampling=GREEDY if is_end else None,
        n_prompt_tokens=len(PROMPT),
        seat=1 if is_end else None,
    )
    stage.handle(forward, memoryview(tensor_bytes(rows)))


def hidden_job(request_id: str, position: int, rows: np.ndarray, number: int | None = None) -> Any:
    numbers = {} if number is None else {"number": number, "fresh": 1}
    message = LayerForward(
        request_id=request_id, step="layer", stage=1, position=position, n_tokens=len(rows), **numbers
    )
    return message, tensor_bytes(rows)


def tokens_of(stage: Stage, passed: list[Any]) -> list[int]:
    """By the link, and of what was said since the last call by way of the daemon."""
    told = [each.token for each, _ in passed if isinstance(each, StreamingToken)]
    for message, payload in zip(stage.said, stage.payloads, strict=True):
        if isinstance(message, ipc.Relay):
            (frame,) = FrameDecoder().feed(payload)
            relayed = decode_job(frame.header, frame.payload)
            told += [relayed.token] if isinstance(relayed, StreamingToken) else []
        elif isinstance(message, ipc.Token) and not message.onward:
            told.append(message.token)
    stage.said.clear()
    stage.payloads.clear()
    return told


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("is_joined", [True, False], ids=["in one batch", "apart"])
def test_the_last_stage_judges_early_jobs_once_it_has_the_first_token(
    last: Stage, is_right: bool, is_joined: bool
) -> None:
    end, rows = len(PROMPT), row(3, len(PROMPT) + 3)
    name = f"{is_right} {is_joined}"
    take_seat(last, f"plain {name}")
    bring_last(last, f"plain {name}", 0, rows[: end - 1])
    bring_last(last, f"plain {name}", end - 1, rows[end - 1 : end])
    for i in range(3):
        last.deliver(hidden_job(f"plain {name}", end + i, rows[end + i : end + i + 1]))
    due = tokens_of(last, last.passed_on())
    assert len(due) == 4
    last.handle(ipc.CancelRequest(id=7, request_id=f"plain {name}"))

    speculation = last.handlers.state.speculation
    assert speculation is not None
    remembered = [due[0] if is_right else due[0] + 1, *due[1:]]
    prompt = PROMPT + len(speculation.continuations)  # another one each time
    speculation.answered(prompt, remembered)
    take_seat(last, name)
    seat = last.handlers.ring.seat(name, 1)
    assert seat is not None
    assert seat.guesser is not None
    seat.set_limits_before(Limits(16, 16, takes_early=True))
    seat.guesser.gate.measured("ngram-again", 0.1, 6, 0.1)
    told = ipc.TakePrompt(id=7, request_id=name, stage=1, begins=True)
    last.handle(told, memoryview(tensor_bytes(prompt.astype(np.int32))))
    launched = [each for each, _ in last.passed_on() if isinstance(each, LayerForward)]
    sent = [token for each in launched for token in (each.token, *(each.guesses or ()))]
    assert sent == remembered[: len(sent)]
    assert [each.number for each in launched] == list(range(1, len(launched) + 1))
    n_first = launched[0].n_tokens
    assert n_first >= 3
    last.deliver(hidden_job(name, end, np.resize(rows[end:], (n_first, N_EMBD)), 1))
    at = end - 1 if is_joined else 0
    if at:
        bring_last(last, name, 0, rows[:at])
    tokens_of(last, [])
    bring_last(last, name, at, rows[at:end])
    passed = last.passed_on()
    assert any(isinstance(each, ipc.Done) and each.id == 7 for each in last.said), "the daemon sends nothing"
    assert not any(isinstance(each, ipc.Token) for each in last.said)
    assert tokens_of(last, passed)[:3] == due[: 3 if is_right else 1], "of rows that were refused none counts"
    fresh = [each for each, _ in passed if isinstance(each, LayerForward) and each.number == each.fresh]
    if not is_right:
        assert [(each.position, each.token) for each in fresh] == [(end, due[0])]
    last.handle(ipc.CancelRequest(id=7, request_id=name))


def test_a_request_that_ends_takes_its_early_jobs_along(stage: Stage, alone: np.ndarray) -> None:
    take_seat(stage, "ends")
    stage.deliver(job("ends", GUESSES[:2], len(PROMPT), 1))
    stage.handle(ipc.CancelRequest(id=7, request_id="ends"))
    take_seat(stage, "ends")
    bring(stage, "ends", 0, PROMPT)
    assert stage.passed_on() == []
    stage.handle(ipc.CancelRequest(id=7, request_id="ends"))
