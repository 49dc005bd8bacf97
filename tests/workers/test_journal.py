"""What a stage has sent on can be read again; whoever takes the next stage's place gets exactly its KV."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_proto.tensors import decode_tensor
from swarmllm_workers.cache.journal import BLOCK_ROWS, Journals
from swarmllm_workers.engine.slots import HeldRequests
from swarmllm_workers.errors import CallError

from .blueprint import write
from .client import GREEDY, Worker
from .conftest import StartWorker
from .families import FAMILIES
from .test_exactness import GUIDE

N_EMBD = 3
BLOCK_BYTES = BLOCK_ROWS * N_EMBD * 4


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, N_EMBD)).astype(np.float32)


@pytest.mark.parametrize("seed", range(8))
def test_a_journal_says_what_was_written_last_at_every_position(seed: int) -> None:
    random, journals = Random(seed), Journals(2**30)
    known = np.empty((0, N_EMBD), np.float32)
    for step in range(60):
        # Mostly on at the end; now and then from an earlier position on, as after damage.
        position = len(known) if random.random() < 0.8 else random.randrange(len(known) + 1)
        new = rows(random.choice([1, 1, 1, 7, BLOCK_ROWS, 150]), seed * 100 + step)
        if len(new) == 1:
            journals.append("r", 4, position, b"head" + new.tobytes(), 1)
        else:
            journals.write("r", 4, position, new)
        known = np.concatenate((known[:position], new))
        assert journals.n_rows("r", 4) == len(known)
        if random.random() < 0.5:
            continue
        first = random.randrange(len(known))
        n = random.randrange(1, len(known) - first + 1)
        np.testing.assert_array_equal(journals.read("r", 4, first, n), known[first : first + n])
    journals.forget("r")
    assert journals.n_bytes == 0


def test_a_journal_has_no_gaps() -> None:
    journals = Journals(2**30)
    journals.write("gap", 4, 0, rows(3))
    journals.write("gap", 4, 4, rows(3))
    assert journals.n_rows("gap", 4) == journals.n_bytes == 0
    with pytest.raises(CallError, match="rows 0:1 of a journal that has 0:0"):
        journals.read("gap", 4, 0, 1)


def test_a_journal_that_begins_later_can_be_read_and_builds_no_stage_again() -> None:
    journals, known = Journals(2**30), rows(200)
    journals.write("late", 4, 64, known[64:190])
    for position in range(190, 200):
        journals.append("late", 4, position, known[position].tobytes(), 0)
    assert journals.n_rows("late", 4) == 0
    assert journals.has("late", 4)
    for first, n in ((64, 136), (150, 41), (199, 1)):
        np.testing.assert_array_equal(journals.read("late", 4, first, n), known[first : first + n])
    for first, n in ((63, 2), (0, 1), (199, 2), (200, 1)):
        with pytest.raises(CallError, match="of a journal that has 64:200"):
            journals.read("late", 4, first, n)
    # Rows before its first one: what it has is of another text.
    journals.write("late", 4, 63, known[63:70])
    assert not journals.has("late", 4)
    assert journals.n_bytes == 0


def test_what_goes_beyond_the_bound_costs_its_own_journal_only() -> None:
    journals = Journals(3 * BLOCK_BYTES)
    journals.write("small", 4, 0, rows(5))
    journals.write("small", 8, 0, rows(5))
    journals.write("large", 4, 0, rows(BLOCK_ROWS))
    assert journals.n_bytes == 3 * BLOCK_BYTES
    journals.write("large", 4, BLOCK_ROWS, rows(1))
    assert not journals.has("large", 4)
    assert journals.n_rows("small", 4) == journals.n_rows("small", 8) == 5
    assert journals.n_bytes == 2 * BLOCK_BYTES
    journals.rename("small", "new")
    assert (journals.n_rows("small", 4), journals.n_rows("new", 4)) == (0, 5)
    journals.forget("new")
    assert journals.n_bytes == 0


def test_rows_that_are_appended_count() -> None:
    journals = Journals(2 * BLOCK_BYTES - 1)
    journals.write("r", 4, 0, rows(1))
    for position in range(1, BLOCK_ROWS):
        journals.append("r", 4, position, rows(1).tobytes(), 0)
    assert journals.n_bytes == BLOCK_BYTES + (BLOCK_ROWS - 1) * N_EMBD * 4
    journals.append("r", 4, BLOCK_ROWS, rows(1).tobytes(), 0)
    assert (journals.n_rows("r", 4), journals.n_bytes) == (0, 0)


def test_without_room_nothing_is_written() -> None:
    journals = Journals(0)
    journals.write("r", 4, 0, rows(1))
    assert journals.n_rows("r", 4) == 0


KEYS = [("", bytes([at]) * 32) for at in range(4)]


def test_a_request_that_goes_on_with_kept_rows_shows_those_of_earlier_ones() -> None:
    journals, known = Journals(2**30, 60.0), rows(200)
    journals.write("first", 4, 0, known[:150])
    journals.keep("first", 4, KEYS)  # of two whole blocks
    journals.forget("first")
    assert journals.n_bytes == 2 * BLOCK_BYTES
    journals.write("second", 4, 128, known[128:200])
    for first, n in ((0, 200), (63, 2), (0, 64), (100, 40), (130, 5)):
        np.testing.assert_array_equal(journals.read("second", 4, first, n, KEYS), known[first : first + n])
    assert journals.n_rows("second", 4) == 0  # It builds no stage again.
    for keys in ([], KEYS[:1], [KEYS[0], KEYS[2]], [("other", key) for _, key in KEYS]):
        with pytest.raises(CallError, match="of a journal that has 128:200"):
            journals.read("second", 4, 0, 200, keys)
    journals.keep("second", 4, KEYS)
    journals.forget("second")
    journals.write("third", 4, 192, known[192:])
    np.testing.assert_array_equal(journals.read("third", 4, 0, 200, KEYS), known)
    with pytest.raises(CallError):
        journals.read("third", 8, 0, 200, KEYS)


def test_kept_rows_are_few_give_way_and_expire() -> None:
    journals = Journals(8 * BLOCK_BYTES, 60.0)
    for number in range(3):
        journals.write("r", number, 0, rows(BLOCK_ROWS))
        journals.keep("r", number, KEYS)
    journals.forget("r")
    assert journals.n_bytes == 2 * BLOCK_BYTES  # a quarter
    assert (journals.kept.read(0, KEYS, 0, 1), 0 < (journals.kept.next_expiry_s() or 0) <= 60) == (None, True)
    journals.kept.touch(1, KEYS[0])
    journals.write("running", 4, 0, rows(7 * BLOCK_ROWS))
    assert journals.n_bytes == 8 * BLOCK_BYTES
    assert journals.kept.read(1, KEYS, 0, 1) is not None  # the one that was used last
    journals.write("running", 4, 7 * BLOCK_ROWS, rows(BLOCK_ROWS))
    assert (journals.n_rows("running", 4), journals.n_bytes) == (8 * BLOCK_ROWS, 8 * BLOCK_BYTES)
    journals.forget("running")
    assert (journals.n_bytes, journals.kept.next_expiry_s()) == (0, None)
    passing = Journals(2**30)
    passing.write("r", 4, 0, rows(BLOCK_ROWS))
    passing.keep("r", 4, KEYS)
    passing.forget("r")
    passing.kept.expire()
    assert passing.n_bytes == 0


def test_the_request_that_was_held_longest_goes_first() -> None:
    released: list[str] = []

    def release(request_id: str) -> None:
        held.discard(request_id)
        released.append(request_id)

    held = HeldRequests(release)
    assert (held.let_go(), held.next_expiry_s()) == (False, None)
    for request_id, hold_s in (("a", 60.0), ("b", 30.0), ("c", 0.0), ("a", 60.0)):
        held.add(request_id, hold_s)
    held.expire()
    assert released == ["c"]
    assert 0 < (held.next_expiry_s() or 0) <= 30
    assert held.let_go()
    assert released == ["c", "b"]
    assert "a" in held


N_PROMPT = 70
N_TOKENS = 8
SPLIT = 6


@pytest.fixture
def halves(start_worker: StartWorker) -> tuple[Worker, Worker]:
    first, last = start_worker(), start_worker()
    first.open(GUIDE, (0, SPLIT))
    last.open(GUIDE, (SPLIT, 12))
    return first, last


def prompt(worker: Worker) -> np.ndarray:
    words = " ".join(f"point {i}" for i in range(N_PROMPT))
    return worker.tokenize(text=words)[:N_PROMPT]


def walk(first: Worker, last: Worker, request_id: str, data: np.ndarray, position: int) -> int:
    """Rows through both halves; the token."""
    hidden = first.hidden(data, request_id=request_id, start=0, end=SPLIT, position=position)
    answer = last.forward(
        hidden,
        request_id=request_id,
        start=SPLIT,
        end=12,
        position=position,
        want="token",
        sampling=GREEDY,
        n_prompt_tokens=N_PROMPT,
    )
    assert isinstance(answer.message, ipc.Token)
    return answer.message.token


def continued(first: Worker, last: Worker, request_id: str, tokens: list[int], n: int) -> list[int]:
    """`n` more tokens after those of this request."""
    for _ in range(n):
        data = np.array(tokens[-1:], np.int32)
        tokens.append(walk(first, last, request_id, data, N_PROMPT + len(tokens) - 1))
    return tokens


def test_a_last_half_is_built_again_from_the_journal_of_the_first(
    halves: tuple[Worker, Worker], start_worker: StartWorker
) -> None:
    first, last = halves
    data = prompt(first)
    whole = continued(first, last, "whole", [walk(first, last, "whole", data, 0)], N_TOKENS)
    tokens = continued(first, last, "old", [walk(first, last, "old", data, 0)], 3)
    assert tokens == whole[:4]
    n_due = N_PROMPT + len(tokens) - 1

    # One row further than its token came: the worker dies with it.
    first.hidden(np.array(tokens[-1:], np.int32), request_id="old", start=0, end=SPLIT, position=n_due)
    last.process.kill()
    assert isinstance(first.call(ipc.HoldRequest, request_id="old", hold_s=60.0).message, ipc.Done)
    resumed = first.call(
        ipc.ResumeRequest, request_id="new", resumes="old", n_rows=n_due, ranges=((0, SPLIT), (2, 4))
    ).message
    assert resumed.kept == (ipc.KeptRows(n_due, n_due), ipc.KeptRows())

    standby = start_worker()
    standby.open(GUIDE, (SPLIT, 12))
    for position in range(0, n_due, 32):
        n = min(32, n_due - position)
        rows = first.call(ipc.ReadJournal, request_id="new", end=SPLIT, position=position, n_rows=n)
        where = {"request_id": "new", "start": SPLIT, "end": 12, "position": position}
        standby.forward(decode_tensor(rows.payload), want="none", **where)
    hidden = first.hidden(
        np.array(tokens[-1:], np.int32), request_id="new", start=0, end=SPLIT, position=n_due
    )
    answer = standby.forward(
        hidden,
        request_id="new",
        start=SPLIT,
        end=12,
        position=n_due,
        want="token",
        sampling=GREEDY,
        n_prompt_tokens=N_PROMPT,
        generated=tuple(tokens),
    )
    tokens.append(answer.message.token)
    assert continued(first, standby, "new", tokens, N_TOKENS - 4) == whole


def test_what_is_not_held_is_not_resumed(worker: Worker) -> None:
    worker.open(GUIDE, (0, SPLIT))
    data = prompt(worker)
    worker.hidden(data, request_id="running", start=0, end=SPLIT, position=0)
    nothing = (ipc.KeptRows(),)
    fields = {"n_rows": 10, "ranges": ((0, SPLIT),)}
    for resumes in ("running", "unknown"):
        answer = worker.call(ipc.ResumeRequest, request_id="new", resumes=resumes, **fields)
        assert answer.message.kept == nothing
    worker.call(ipc.HoldRequest, request_id="running", hold_s=60.0)
    error = worker.refused(ipc.ResumeRequest, request_id="running", resumes="running", **fields)
    assert (error.kind, error.field) == ("bad_message", "request_id")
    answer = worker.call(ipc.ResumeRequest, request_id="new", resumes="running", **fields)
    assert answer.message.kept == (ipc.KeptRows(10, 10),)
    # Cut to ten rows: the eleventh comes next, and the journal goes on there.
    worker.hidden(data[10:12], request_id="new", start=0, end=SPLIT, position=10)
    error = worker.refused(ipc.ReadJournal, request_id="new", end=SPLIT, position=10, n_rows=3)
    assert (error.kind, error.field) == ("position_gap", "position")


def test_a_held_request_makes_room_for_others(worker: Worker) -> None:
    worker.open(GUIDE, (0, SPLIT), n_slots=2, n_ctx=96)
    data = prompt(worker)
    fields = {"start": 0, "end": SPLIT, "position": 0}
    resume = {"n_rows": 4, "ranges": ((0, SPLIT),)}

    # Rows: 70 of 96 are held, and 70 are wanted.
    worker.hidden(data, request_id="a", **fields)
    worker.call(ipc.HoldRequest, request_id="a", hold_s=60.0)
    worker.hidden(data, request_id="b", **fields)
    answer = worker.call(ipc.ResumeRequest, request_id="new", resumes="a", **resume)
    assert answer.message.kept == (ipc.KeptRows(),)
    worker.call(ipc.CancelRequest, request_id="b")

    # Slots: both are taken, one of them is held.
    for request_id in "cd":
        worker.hidden(data[:4], request_id=request_id, **fields)
    worker.call(ipc.HoldRequest, request_id="d", hold_s=60.0)
    worker.hidden(data[:4], request_id="e", **fields)
    answer = worker.call(ipc.ResumeRequest, request_id="new", resumes="d", **resume)
    assert answer.message.kept == (ipc.KeptRows(),)


def test_a_held_request_leaves_its_rows_to_one_that_begins_alike_and_finds_no_slot(worker: Worker) -> None:
    worker.open(GUIDE, (0, SPLIT), n_slots=2, n_ctx=512)
    data, names = np.arange(70, dtype=np.int32), bytes(32)
    layers = {"start": 0, "end": SPLIT}
    worker.call(ipc.PrefixFetchProbe, names, request_id="checked", **layers)
    worker.hidden(data, request_id="checked", position=0, **layers)
    worker.call(ipc.HoldRequest, request_id="checked", hold_s=60.0)
    worker.hidden(data[:4], request_id="other", position=0, **layers)
    probed = worker.call(ipc.PrefixFetchProbe, names, request_id="next", **layers).message
    assert probed.n_blocks == 1


def test_a_request_with_a_kept_beginning_shows_all_its_rows(worker: Worker) -> None:
    """Of what came in and of what went out, in a stage between two others."""
    worker.open(GUIDE, (4, 8), n_slots=2, n_ctx=512)
    names, layers = bytes(range(64)), {"start": 4, "end": 8}
    came_in = np.random.default_rng(1).standard_normal((140, 256)).astype(np.float32)
    sent = []
    for request_id, first in (("one", 0), ("two", 128)):
        probed = worker.call(ipc.PrefixFetchProbe, names, request_id=request_id, **layers).message
        assert probed.n_blocks == first // 64
        sent.append(worker.hidden(came_in[first:], request_id=request_id, position=first, **layers))
        if request_id == "one":
            worker.call(ipc.CancelRequest, request_id=request_id)
    for boundary, known in ((4, came_in), (8, np.concatenate((sent[0][:128], sent[1])))):
        shown = worker.call(ipc.ReadJournal, request_id="two", end=boundary, position=0, n_rows=140)
        np.testing.assert_array_equal(decode_tensor(shown.payload), known)
    # Also to one that goes on in its place: a stage behind it that is built again gets all rows from here.
    worker.call(ipc.HoldRequest, request_id="two", hold_s=60.0)
    resumed = worker.call(ipc.ResumeRequest, request_id="three", resumes="two", n_rows=139, ranges=((4, 8),))
    assert resumed.message.kept == (ipc.KeptRows(139, 139),)
    shown = worker.call(ipc.ReadJournal, request_id="three", end=8, position=0, n_rows=139)
    np.testing.assert_array_equal(decode_tensor(shown.payload), known[:139])


def test_a_state_that_cannot_be_cut_is_not_kept(worker: Worker, tmp_path: Path) -> None:
    worker.open(write(tmp_path / "mamba.gguf", FAMILIES["mamba"]), (0, 2))
    data = np.arange(5, dtype=np.int32)
    for n_rows, kept in ((4, 0), (5, 5)):
        worker.hidden(data, request_id="old", start=0, end=2, position=0)
        worker.call(ipc.HoldRequest, request_id="old", hold_s=60.0)
        answer = worker.call(
            ipc.ResumeRequest, request_id="new", resumes="old", n_rows=n_rows, ranges=((0, 2),)
        )
        assert answer.message.kept == (ipc.KeptRows(kept, n_rows),)
        worker.call(ipc.CancelRequest, request_id="new")
