"""Rows as they leave a worker and come to it: the C against numpy, and rings whose rows are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto import ipc
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import HEAD, Q8_0_TAG, is_packed, pack_rows, rounded, tensor_bytes, unpack_rows
from swarmllm_workers.kernels import row_codec
from swarmllm_workers.kernels.interposing import find_library
from swarmllm_workers.kernels.row_codec import RowTaker, pack, round_and_pack, round_rows

from .client import Worker
from .ring_of_two import RingOfTwo, open_halves
from .test_lone_steps import N_EMBD, Stage, row

WIDTH = 64
BUILT = pytest.mark.skipif(find_library("row_codec") is None, reason="row_codec.c was not built")
any_rows = hnp.arrays(np.uint32, (3, WIDTH)).map(lambda bits: bits.view(np.float32)) | hnp.arrays(
    np.float32, (3, WIDTH), elements=st.floats(-1e7, 1e7, width=32)
)
N_TOKENS = 24
GREEDY = ipc.Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
QUESTION = "What is a pipeline?"


@BUILT
@given(any_rows)
def test_the_c_has_the_bits_of_numpy(rows: np.ndarray) -> None:
    assert row_codec._library() is not None
    once, data = round_and_pack(rows)
    assert once.tobytes() == rounded(rows).tobytes() == round_rows(rows).tobytes()
    assert data == pack_rows(rounded(rows), "q8_0") == pack(once, "q8_0")
    assert pack(rows, "q8_0") == pack_rows(rows, "q8_0")
    assert pack(rows, "f32") == tensor_bytes(rows)


def test_without_a_compiler_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = row(3, 2)
    native = round_and_pack(rows)
    monkeypatch.setattr(row_codec, "_library", lambda: None)
    plain = round_and_pack(rows)
    assert native[0].tobytes() == plain[0].tobytes()
    assert native[1] == plain[1] == pack(plain[0], "q8_0")
    assert not RowTaker(N_EMBD, 0).take(memoryview(plain[1]))


@BUILT
@given(hnp.arrays(np.uint8, (2, 34)), st.integers(0, 5))
def test_the_c_reads_what_numpy_reads(blocks: np.ndarray, n_before: int) -> None:
    data = HEAD.pack(2, 1, WIDTH, Q8_0_TAG) + blocks.tobytes()
    fed = np.empty((1, WIDTH), np.float32)
    taken = RowTaker(WIDTH, fed.ctypes.data).take(memoryview(bytes(n_before) + data)[n_before:])
    scales = blocks[:, :2].copy().view("<f2")
    assert taken == bool(np.isfinite(scales).all())
    if taken:
        assert fed.tobytes() == unpack_rows(data, n_rows=1, width=WIDTH).tobytes()


@BUILT
def test_the_c_takes_rows_of_its_own_shape_only() -> None:
    fed = np.empty((1, N_EMBD), np.float32)
    taker = RowTaker(N_EMBD, fed.ctypes.data)
    data = round_and_pack(row(1))[1]
    assert taker.take(memoryview(data))
    for other in (data[:-1], tensor_bytes(row(1)), HEAD.pack(1, 1, N_EMBD, Q8_0_TAG) + data[16:]):
        assert not taker.take(memoryview(other))


Closing = Callable[[Callable[[], None]], object]


@pytest.fixture
def closing() -> Iterator[Closing]:
    """What it is given is called in the end."""
    with ExitStack() as stack:
        yield stack.callback


class PackedStage(Stage):
    """Its rows leave in this format."""

    def __init__(self, folder: Path, start: int, end: int, row_format: str, *, native: bool) -> None:
        super().__init__(folder, start, end)
        self._row_format = row_format
        lone_steps = self.handlers._forwards._lone_steps
        if not native:
            lone_steps._take_packed = None

    def handle(self, message: object, payload: memoryview = memoryview(b"")) -> None:  # noqa: B008
        if isinstance(message, ipc.TakeSeat) and message.end < 12:
            message = ipc.TakeSeat(
                **{name: getattr(message, name) for name in message.__struct_fields__}
                | {"row_format": self._row_format}
            )
        elif isinstance(message, ipc.Forward) and message.end < 12:
            message = ipc.Forward(
                **{name: getattr(message, name) for name in message.__struct_fields__}
                | {"rounded": self._row_format == "q8_0"}
            )
        super().handle(message, payload)


@pytest.mark.parametrize("native", [pytest.param(True, marks=BUILT), False], ids=["C", "numpy"])
@pytest.mark.parametrize("row_format", ["lossless", "q8_0"])
def test_lone_steps_and_works_send_and_keep_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing: Closing, row_format: str, native: bool
) -> None:
    """A middle stage: packed rows come, packed rows leave, and what is kept of both are their f32 bits."""
    if not native:
        monkeypatch.setattr(row_codec, "_library", lambda: None)
    stage = PackedStage(tmp_path, 4, 8, row_format, native=native)
    closing(stage.close)
    stage.seat("r")
    stage.seat("s")
    came, sent = [], []
    for position in range(1, 70):
        job, _ = stage.job("r", position)
        # (Of one narrow row with all its digits zstd saves nothing.)
        rows = round_rows(row(position)) if row_format == "q8_0" else row(position).round(1)
        payload = pack_rows(rows, row_format)  # type: ignore[arg-type]
        assert is_packed(payload)
        other = LayerForward(
            request_id="s", step="layer", stage=1, position=position, n_tokens=1, digest=job.digest
        )
        assert stage.deliver((job, payload)) == 0
        assert stage.deliver((other, payload), alone=False) == 1
        lone, work = (payload for _, payload in stage.passed_on())
        assert lone == work
        came.append(rows)
        sent.append(unpack_rows(lone, n_rows=1, width=N_EMBD))
        assert is_packed(lone) or row_format == "lossless"
    assert not stage.refusals()
    engine = stage.handlers.state.model
    assert engine is not None
    for request_id in ("r", "s"):
        assert engine.journals.read(request_id, 8, 1, 69).tobytes() == np.concatenate(sent).tobytes()
        assert engine.received.read(request_id, 4, 1, 69).tobytes() == np.concatenate(came).tobytes()


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(HEAD.pack(2, 1, N_EMBD, Q8_0_TAG) + b"\x00\x7c" + bytes(270), id="an infinite scale"),
        pytest.param(pack_rows(round_rows(row(1, 2)), "q8_0"), id="more rows than announced"),
        pytest.param(round_and_pack(row(1))[1][:-1], id="too little"),
        pytest.param(HEAD.pack(2, 1, N_EMBD, 4) + b"no frame of zstd's", id="no zstd"),
        pytest.param(
            pack_rows(np.full((1, N_EMBD), np.nan, np.float32), "lossless"), id="NaN, packed without loss"
        ),
    ],
)
def test_broken_packed_rows_are_handed_to_the_daemon(
    tmp_path: Path, closing: Closing, payload: bytes
) -> None:
    """It refuses them too, and says whose they were."""
    stage = Stage(tmp_path, 4, 8)
    closing(stage.close)
    stage.seat("r")
    job, _ = stage.job("r", 1)
    stage.deliver((job, payload))
    assert [type(each) for each in stage.said[-1:]] == [ipc.Arrived]
    assert not stage.passed_on()
    good, rows = stage.job("r", 1)
    assert stage.deliver((good, rows)) == 0
    assert len(stage.passed_on()) == 1


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    folder = tmp_path_factory.mktemp("packed-ring")
    workers = (Worker(folder / "first"), Worker(folder / "last"))
    open_halves(workers, n_slots=3)
    yield workers
    for worker in workers:
        worker.close()


def generated(ring: RingOfTwo, prompt: np.ndarray, *, by_link: bool) -> list[int]:
    if by_link:
        ring.link(0)
        ring.link(1)
    ring.start("r", prompt, GREEDY)
    ring.run(lambda: ring.finished("r"))
    try:
        return ring.result("r")
    finally:
        ring.clean_up()


def test_packed_rings_give_the_same_text_by_links_and_by_daemons(resident: tuple[Worker, Worker]) -> None:
    prompt = resident[0].tokenize(messages=[{"role": "user", "content": QUESTION}])
    texts = {
        (row_format, by_link): generated(RingOfTwo(resident, row_format=row_format), prompt, by_link=by_link)
        for row_format in ("f32", "lossless", "q8_0")
        for by_link in (True, False)
    }
    assert texts["f32", True] == texts["f32", False] == texts["lossless", True] == texts["lossless", False]
    assert texts["q8_0", True] == texts["q8_0", False]
    assert len(texts["q8_0", True]) == N_TOKENS
