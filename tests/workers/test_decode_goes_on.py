"""A real worker decodes on beside what takes long: seen in the order of its messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from bench.common.shapes import Shape, build
from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.ipc.kv import NAME_SIZE
from swarmllm_proto.tensors import encode_tensor

from .client import DEADLINE_S, Answer, Worker
from .conftest import StartWorker
from .test_exactness import GUIDE

pytestmark = pytest.mark.slow

PROMPT = np.array([72, 101, 108, 108, 111, 44], np.int32)
ENDLESS = ipc.Sampling(temperature=0.0, max_tokens=30_000, ignore_eos=True)
LARGE = Shape(n_layers=12, n_embd=1024, n_heads=8, n_kv_heads=4, n_ff=4096, n_vocab=512)
"""200 MB: to cut and to load it takes many steps' time."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(LARGE, tmp_path_factory.mktemp("large") / "large.gguf")


class Stream:
    """One request that decodes in a worker, and what is answered meanwhile."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.n_steps = 0

    def generate(self) -> None:
        self._worker.send(ipc.Generate, encode_tensor(PROMPT), request_id="stream", sampling=ENDLESS)
        self.take_steps(3)

    def forward(self, start: int, end: int, n_steps: int) -> None:
        """Steps of a stage, asked for ahead."""
        row = encode_tensor(np.ones((1, LARGE.n_embd), np.float32))
        for position in range(n_steps):
            self._worker.send(
                ipc.Forward,
                row,
                request_id="stream",
                start=start,
                end=end,
                position=position,
                want="hidden",
            )
        self.take_steps(3)

    def until(self, call_id: int) -> tuple[list[str], Answer]:
        """Kinds of the messages up to the one that answers a call ("step": one of the stream's), and that."""
        kinds = []
        while True:
            answer = self._worker.receive_any()
            message = answer.message
            if getattr(message, "request_id", "") == "stream":
                assert isinstance(message, ipc.Token | ipc.LayerResult), message
                kinds.append("step")
            elif message.id == call_id and not isinstance(message, ipc.Progress):
                assert not isinstance(message, ipc.Error), message
                return kinds, answer
            else:
                kinds.append(type(message).__name__)

    def take_steps(self, n: int) -> None:
        for _ in range(n):
            message = self._worker.receive_any().message
            assert isinstance(message, ipc.Token | ipc.LayerResult), message

    def goes_on_beside(self, kind: type[ipc.DaemonMessage], payload: Any = b"", **fields: Any) -> Answer:
        """Send a call that takes long, and one that does not: what was handled before the answer to the
        second began with the first. The answer, after at least two steps that came between."""
        worker = self._worker
        call_id = worker.send(kind, payload, **fields)
        marker = worker.send(ipc.ReleaseRequestKv, request_id="nobody")
        kinds, _ = self.until(marker)
        assert set(kinds) <= {"step", "Progress"}, f"the second call waited for the first: {kinds[-3:]}"
        kinds, answer = self.until(call_id)
        assert kinds.count("step") >= 2, f"nothing was decoded until the answer came: {kinds}"
        return answer


def test_layers_are_loaded_beside_a_stage_that_decodes(worker: Worker, large: Path) -> None:
    worker.open(large, (0, 1), n_ctx=4096)
    stream = Stream(worker)
    stream.forward(0, 1, 3000)
    loaded, _ = stream.goes_on_beside(ipc.Load, start=1, end=12)
    assert loaded.ranges == ((0, 12),)


def test_layers_are_unloaded_and_cut_anew_beside_a_stage_that_decodes(worker: Worker, large: Path) -> None:
    worker.open(large, (0, 1), (1, 12), n_ctx=4096)
    stream = Stream(worker)
    stream.forward(0, 1, 3000)
    loaded, _ = stream.goes_on_beside(ipc.Unload, start=1, end=2)
    assert loaded.ranges == ((0, 1), (2, 12))


def test_a_request_for_a_part_has_the_model_cut_beside_one_that_decodes(worker: Worker, large: Path) -> None:
    worker.open(large, (0, 12), n_ctx=4096)
    stream = Stream(worker)
    stream.generate()
    rows = encode_tensor(np.ones((2, LARGE.n_embd), np.float32))
    stream.goes_on_beside(ipc.Forward, rows, request_id="part", start=3, end=7, position=0, want="hidden")
    probed, _ = stream.goes_on_beside(ipc.PrefixFetchProbe, bytes(32), request_id="other", start=3, end=5)
    assert probed.n_blocks == 0


def test_a_long_prompt_is_tokenized_beside_a_request_that_decodes(worker: Worker) -> None:
    worker.open(GUIDE, (0, 12), n_ctx=32768)
    stream = Stream(worker)
    stream.generate()
    text = "A pipeline is an ordered list of stages that covers the layers once. " * 20_000
    stream.goes_on_beside(ipc.Tokenize, text=text)
    stream.goes_on_beside(ipc.Tokenize, messages=[{"role": "user", "content": text}])
    tokens = np.resize(PROMPT, 400_000)
    stream.goes_on_beside(ipc.Detokenize, encode_tensor(tokens))
    stream.goes_on_beside(ipc.Embed, encode_tensor(tokens[:60_000]))


@pytest.mark.parametrize("is_told", [True, False])
def test_a_worker_leaves_in_the_middle_of_a_load(worker: Worker, large: Path, is_told: bool) -> None:
    worker.open(large, (0, 1), n_ctx=4096)
    Stream(worker).forward(0, 1, 10)
    worker.send(ipc.Load, start=1, end=12)
    while not isinstance(worker.receive_any().message, ipc.Progress):
        pass
    if is_told:
        shutdown = worker.send(ipc.Shutdown)
        message = None
        while not isinstance(message, ipc.Bye):
            message = worker.receive_any().message
            assert not isinstance(message, ipc.Loaded)
        assert message.id == shutdown
    else:
        worker.socket.close()
    assert worker.process.wait(DEADLINE_S) == 0


WIDE = Shape(n_layers=12, n_embd=512, n_heads=8, n_kv_heads=8, n_ff=64, n_vocab=512)
"""Few weights and 24 KiB of keys and values per row."""
N_BLOCKS = 40


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(WIDE, tmp_path_factory.mktemp("wide") / "wide.gguf")


@pytest.fixture
def two_workers(start_worker: StartWorker, wide: Path) -> list[Worker]:
    workers = [start_worker(), start_worker()]
    for each in workers:
        each.open(wide, (0, 12), n_ctx=8192, prefill_chunk_tokens=500)
    return workers


def test_snapshots_leave_and_arrive_beside_requests_that_decode(two_workers: list[Worker]) -> None:
    source = two_workers[0]
    names = b"".join(bytes([i + 1]) * NAME_SIZE for i in range(N_BLOCKS))
    rows = np.random.default_rng(0).standard_normal((N_BLOCKS * BLOCK_TOKENS, WIDE.n_embd))
    where: dict[str, Any] = {"start": 0, "end": 12}
    source.call(ipc.PrefixFetchProbe, names, request_id="p", **where)
    source.call(
        ipc.Forward,
        encode_tensor(rows.astype(np.float32)),
        request_id="p",
        position=0,
        want="none",
        **where,
    )
    source.call(ipc.ReleaseRequestKv, request_id="p")
    streams = [Stream(each) for each in two_workers]
    for each in streams:
        each.generate()
    snapshot, data = streams[0].goes_on_beside(ipc.ExportPrefixSnapshot, names, **where)
    assert snapshot.n_blocks == N_BLOCKS
    assert len(data) > 50e6
    assert blake3(data).hexdigest() == snapshot.digest
    imported, _ = streams[1].goes_on_beside(
        ipc.ImportPrefixSnapshot,
        [names, data],
        n_blocks=N_BLOCKS,
        sizes=snapshot.sizes,
        digest=snapshot.digest,
        **where,
    )
    assert imported.n_blocks == N_BLOCKS
