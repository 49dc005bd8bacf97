"""Where a hop's time goes beside computing: serialising, and the way to the worker and back.

    python -m bench.hop

The rival of every figure is the compute of the stage in the same run: what a hop costs only matters beside
it. The way between two nodes is `python -m bench.swarm_link`; queue and network of whole pipelines are in
`bench.decode`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import trio

from bench.common.figures import Figure, ratios, table, write
from bench.common.models import half_billion
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.codec import decode_job, decode_worker_message, encode_ipc, encode_job
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.ipc import LayerResult
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import decode_tensor, encode_tensor

N_EMBD = 896
LAYERS = LayerRange(0, 12)
N_TOKENS = 100
N_REPEATS = 200


def milliseconds(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    for _ in range(N_REPEATS):
        act()
    return (time.perf_counter() - start_s) / N_REPEATS * 1e3


def between_daemon_and_worker(row: np.ndarray) -> None:
    pieces = encode_ipc(LayerResult(id=1, request_id="r"), encode_tensor(row))
    (frame,) = FrameDecoder().feed(b"".join(pieces))
    decode_worker_message(frame)
    decode_tensor(frame.payload)


def between_nodes(row: np.ndarray) -> None:
    message = LayerForward(request_id="r", step="layer", stage=1, position=7, n_tokens=1)
    header, payload = encode_job(message, encode_tensor(row))
    decode_job(header, payload)
    decode_tensor(payload)


async def main() -> None:
    row = np.random.default_rng(0).standard_normal((1, N_EMBD)).astype(np.float32)
    compute = Figure("compute of 12 of 24 layers", "ms")
    ipc = Figure("to the worker and back, beside computing", "ms")
    local = Figure("serialise: daemon and worker, one message", "ms")
    remote = Figure("serialise: node to node, with digest", "ms")
    n_threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        settings = WorkerSettings(cache_dir=Path(folder) / "cache", n_threads=n_threads)
        pool = WorkerPool(settings, Path(folder) / "run")
        async with pool.running():
            model = ModelFile("0" * 64, half_billion())
            await pool.load(model, LAYERS, None)
            for position in range(N_TOKENS):
                start_s = time.perf_counter()
                result = await pool.forward(
                    model, request_id="r", layers=LAYERS, position=position, tensor=row, want="hidden"
                )
                total_s = time.perf_counter() - start_s
                compute.values.append(result.compute_s * 1e3)
                ipc.values.append((total_s - result.compute_s) * 1e3)
                local.values.append(milliseconds(lambda: between_daemon_and_worker(row)))
                remote.values.append(milliseconds(lambda: between_nodes(row)))
    rows = [(compute, None), *((figure, ratios(figure, compute)) for figure in (ipc, local, remote))]
    text = table(rows)
    print(text)
    write("hop", "python -m bench.hop", rows, text)


if __name__ == "__main__":
    trio.run(main)
