"""Everything wrong is answered with a typed error that names the field, and disturbs nobody else."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_proto.tensors import encode_tensor

from .client import GREEDY, Worker
from .conftest import MakeModel
from .factory import N_VOCAB, Spec, build

pytestmark = pytest.mark.slow

ROWS = np.zeros((3, 64), np.float32)
TOKENS = np.array([1, 2, 3], np.int32)


@pytest.fixture
def half(worker: Worker, make_model: MakeModel) -> Worker:
    """A worker with layers 0:2 and 2:4, 64 cells and two slots."""
    worker.open(make_model("llama"), (0, 2), (2, 4), n_ctx=64, n_slots=2)
    return worker


@pytest.fixture(scope="module")
def shared_half(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("worker") / "s")
    worker.open(make_model("llama"), (0, 2), (2, 4), n_ctx=64, n_slots=2)
    yield worker
    worker.close()


def with_value(value: float) -> np.ndarray:
    rows = ROWS.copy()
    rows[1, 7] = value
    return rows


FORWARD = {"request_id": "r", "start": 2, "end": 4, "position": 0, "want": "none"}


@pytest.mark.parametrize(
    ("payload", "changes", "kind", "field"),
    [
        (np.zeros((3, 63), np.float32), {}, "bad_tensor", "payload"),
        (np.zeros((3, 64), np.float16), {}, "bad_tensor", "payload"),
        (np.zeros(64, np.float32), {}, "bad_tensor", "payload"),
        (np.zeros((0, 64), np.float32), {}, "bad_tensor", "payload"),
        (with_value(np.nan), {}, "bad_tensor", "payload"),
        (with_value(-np.inf), {}, "bad_tensor", "payload"),
        (TOKENS, {}, "bad_tensor", "payload"),
        (np.array([N_VOCAB], np.int32), {"start": 0}, "bad_tensor", "payload"),
        (np.array([-1], np.int32), {"start": 0}, "bad_tensor", "payload"),
        (np.zeros((1, 3), np.int32), {"start": 0}, "bad_tensor", "payload"),
        (ROWS, {"position": 1}, "position_gap", "position"),
        (ROWS, {"position": 62}, "context_full", "position"),
        (np.zeros((65, 64), np.float32), {}, "context_full", "position"),
        (ROWS, {"picture_runs": (PictureRun(0, 2, 1),)}, "bad_message", "picture_runs"),
        (ROWS, {"picture_runs": (PictureRun(0, 4), PictureRun(3, 2))}, "bad_message", "picture_runs"),
        (ROWS, {"picture_runs": (PictureRun(0, 65),)}, "bad_message", "picture_runs"),
        (
            ROWS,
            {"picture_runs": (PictureRun(1, 2, is_causal=False),), "want": "normed"},
            "bad_message",
            "picture_runs",
        ),
        (ROWS, {"picture_runs": (PictureRun(1, 9, is_causal=False),)}, "bad_message", "position"),
        (ROWS, {"start": 5, "end": 6}, "cannot_cut", "start"),
        (ROWS, {"start": 2, "end": 5}, "cannot_cut", "end"),
        (ROWS, {"want": "hidden"}, "bad_message", "want"),
        (ROWS, {"start": 0, "end": 2, "want": "token"}, "bad_message", "want"),
        (ROWS, {"want": "token"}, "bad_message", "sampling"),
        (ROWS, {"want": "token", "sampling": GREEDY, "n_prompt_tokens": 9}, "bad_message", "n_prompt_tokens"),
        (
            ROWS,
            {"want": "token", "sampling": GREEDY, "n_prompt_tokens": 1},
            "position_gap",
            "n_prompt_tokens",
        ),
    ],
)
def test_wrong_forward_is_refused_and_others_go_on(
    shared_half: Worker, payload: np.ndarray, changes: dict[str, object], kind: str, field: str
) -> None:
    half = shared_half
    before = half.hidden(TOKENS, request_id="other", start=0, end=2, position=0)
    error = half.refused(ipc.Forward, encode_tensor(payload), **{**FORWARD, **changes})
    assert (error.kind, error.field) == (kind, field), error
    assert error.message
    after = half.hidden(TOKENS, request_id="other", start=0, end=2, position=0)
    np.testing.assert_array_equal(before, after)
    for request_id in ("r", "other"):
        half.call(ipc.ReleaseRequestKv, request_id=request_id)


def test_refused_forward_takes_no_slot(half: Worker) -> None:
    for i in range(5):
        error = half.refused(
            ipc.Forward, encode_tensor(ROWS), **{**FORWARD, "request_id": f"r{i}", "position": 9}
        )
        assert error.kind == "position_gap"
    half.hidden(TOKENS, request_id="r", start=0, end=2, position=0)


def test_layers_that_are_not_loaded_are_named(worker: Worker, make_model: MakeModel) -> None:
    worker.open(make_model("llama"), (1, 3))
    error = worker.refused(ipc.Forward, encode_tensor(ROWS), **{**FORWARD, "start": 1})
    assert error.kind == "not_loaded"
    assert "3:4" in error.message
    assert "1:3" in error.message
    assert worker.refused(ipc.Generate, encode_tensor(TOKENS), request_id="r").kind == "not_loaded"


def test_slots_run_out_and_come_back(half: Worker) -> None:
    for request in ("a", "b"):
        half.hidden(TOKENS, request_id=request, start=0, end=2, position=0)
    third = {"request_id": "c", "start": 0, "end": 2, "position": 0, "want": "hidden"}
    error = half.refused(ipc.Forward, encode_tensor(TOKENS), **third)
    assert (error.kind, error.request_id) == ("no_slot", "c")
    assert isinstance(half.call(ipc.ReleaseRequestKv, request_id="a").message, ipc.Done)
    half.forward(TOKENS, **third)


def test_context_is_shared_and_a_forward_waits_for_room(half: Worker) -> None:
    half.hidden(np.resize(TOKENS, 40), request_id="a", start=0, end=2, position=0)
    fields = {"request_id": "b", "start": 0, "end": 2, "position": 0, "want": "hidden"}
    call_id = half.send(ipc.Forward, encode_tensor(np.resize(TOKENS, 30)), **fields)
    half.hidden(TOKENS[:0:-1], request_id="a", start=0, end=2, position=8)  # truncated to 8: room again
    answer = half.receive_any().message
    assert isinstance(answer, ipc.LayerResult)
    assert answer.id == call_id
    too_long = half.refused(ipc.Forward, encode_tensor(np.resize(TOKENS, 35)), **{**fields, "position": 30})
    assert too_long.kind == "context_full"
    assert "64" in too_long.message


def test_generation_past_the_context_ends_with_length(worker: Worker, make_model: MakeModel) -> None:
    worker.open(make_model("llama"), (0, 4), n_ctx=64, n_slots=2)
    sampling = ipc.Sampling(temperature=0.0, max_tokens=1000, ignore_eos=True)
    generated = worker.generate(np.resize(TOKENS, 50), sampling=sampling)
    assert generated.done.finish_reason == "length"
    assert len(generated.tokens) == 15  # the last needs no cell of its own
    error = worker.refused(ipc.Generate, encode_tensor(np.resize(TOKENS, 65)), request_id="r")
    assert (error.kind, error.field) == ("context_full", "payload")
    assert worker.refused(ipc.Generate, encode_tensor(TOKENS[:0]), request_id="r").kind == "bad_tensor"


def test_messages_before_open_and_a_second_open_are_refused(worker: Worker, make_model: MakeModel) -> None:
    assert worker.refused(ipc.Load, start=0, end=1).kind == "bad_message"
    path = make_model("llama")
    worker.open(path)
    error = worker.refused(ipc.Open, path=str(path), cache_dir=str(path.parent))
    assert (error.kind, error.field) == ("bad_message", "type")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"type": "Forward", "start": 0}, "request_id"),
        ({"type": "Load", "start": "0", "end": 4}, "start"),
        ({"type": "Load", "start": 0, "end": -1}, "end"),
        ({"type": "Dance"}, "type"),
        ({"type": "Generate", "request_id": "r", "sampling": {"top_p": 2}}, "sampling.top_p"),
    ],
)
def test_malformed_message_is_answered_under_its_own_call_id(
    worker: Worker, fields: dict[str, object], field: str
) -> None:
    header = json.dumps({"id": 77, **fields}).encode()
    worker.socket.sendall(struct.pack("<I", len(header)) + header + struct.pack("<I", 0))
    error = worker.receive(ipc.Error)
    assert (error.id, error.kind, error.field) == (77, "bad_message", field)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "empty"), (b"GGUF", "truncated"), (b"not a model, whatever its name", "not a GGUF")],
)
def test_file_that_is_no_model_is_refused(worker: Worker, tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    error = worker.refused(ipc.Open, path=str(path), cache_dir=str(tmp_path))
    assert (error.kind, error.field) == ("bad_model", "path")
    assert said in error.message


def test_missing_file_and_missing_tensor_are_refused(
    worker: Worker, make_model: MakeModel, tmp_path: Path
) -> None:
    error = worker.refused(ipc.Open, path=str(tmp_path / "nothing.gguf"), cache_dir=str(tmp_path))
    assert error.kind == "bad_model"
    whole = make_model("llama").read_bytes()
    at = whole.index(b"blk.1.ffn_up.weight")
    path = tmp_path / "missing.gguf"
    path.write_bytes(whole[:at] + b"blk.1.ffn_xp.weight" + whole[at + 19 :])
    worker.open(path)
    error = worker.refused(ipc.Load, start=1, end=2)
    assert error.kind == "bad_model"
    assert "ffn_up" in error.message
    assert worker.call(ipc.Load, start=2, end=4).message.ranges == ((2, 4),)


def test_split_gguf_is_refused_with_the_remedy(worker: Worker, tmp_path: Path) -> None:
    path = build(tmp_path / "part.gguf", Spec("llama", n_layers=1, plain_keys={"split.count": 3}))
    error = worker.refused(ipc.Open, path=str(path), cache_dir=str(tmp_path))
    assert error.kind == "bad_model"
    assert "3 parts" in error.message


def test_tokenize_wants_either_text_or_messages(half: Worker) -> None:
    assert half.refused(ipc.Tokenize).kind == "bad_message"
    assert half.refused(ipc.Tokenize, text="a", messages=[]).kind == "bad_message"


def test_two_generations_of_one_request_are_refused(worker: Worker, make_model: MakeModel) -> None:
    worker.open(make_model("llama"), (0, 4), n_ctx=1024)
    sampling = ipc.Sampling(temperature=0.0, max_tokens=900, ignore_eos=True)
    first = worker.send(ipc.Generate, encode_tensor(TOKENS), request_id="r", sampling=sampling)
    second = worker.send(ipc.Generate, encode_tensor(TOKENS), request_id="r", sampling=sampling)
    while isinstance(message := worker.receive_any().message, ipc.Token):
        assert message.id == first
    assert isinstance(message, ipc.Error)
    assert (message.id, message.kind, message.field) == (second, "bad_message", "request_id")
