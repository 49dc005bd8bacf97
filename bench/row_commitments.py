"""What it costs a node to sign for 32 rows, and those who hear of it: `python -m bench.row_commitments`.

Per 32 rows of one stage: both sides are read from a real worker (the guide, so 32 rows of f32 x 512 or what
its width is), hashed, signed and encoded; the next stage and the origin decode and verify. Hashing is shown
for wider models as well, because it grows with the width and the rest does not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import trio

from bench.common.figures import Figure, table, write
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.hashing import build_manifest
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.stage.row_committer import digests_of
from swarmllm.swarm.membership.signer import open_signer
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.codec import decode_job, encode_job
from swarmllm_proto.row_commitments import (
    STRETCH_ROWS,
    RowsCommitment,
    is_signed_by,
    pipeline_digest,
    signed,
)

LAYERS = LayerRange(4, 8)
N_REPEATS = 200
WIDTHS = (1024, 4096, 8192)


def microseconds(act: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(N_REPEATS):
        began_s = time.perf_counter()
        act()
        taken.append((time.perf_counter() - began_s) * 1e6)
    return taken


async def main() -> None:
    manifest = await trio.to_thread.run_sync(build_manifest, GUIDE_PATH)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((STRETCH_ROWS, manifest.n_embd)).astype(np.float32)
    compute, read = (Figure(name, "us") for name in ("32 rows as a prompt, 4 layers", "read both sides"))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        signer = open_signer(home)
        pool = WorkerPool(WorkerSettings(cache_dir=home / "cache", n_threads=1), home / "run")
        async with pool.running():
            model = ModelFile("0" * 64, GUIDE_PATH)
            await pool.load(model, LAYERS, None)
            for turn in range(N_REPEATS):
                position = turn % 32 * STRETCH_ROWS
                if not position:
                    await pool.cancel(model.model_id, "r")
                call = {"request_id": "r", "layers": LAYERS, "position": position, "tensor": rows}
                result = await pool.forward(model, want="hidden", **call)  # type: ignore[arg-type]
                compute.values.append(result.compute_s * 1e6)
                began_s = time.perf_counter()
                for end in (LAYERS.start, LAYERS.end):
                    await pool.read_journal(
                        model, request_id="r", end=end, position=position, n_rows=STRETCH_ROWS
                    )
                read.values.append((time.perf_counter() - began_s) * 1e6)
    pipeline = pipeline_digest("r", "0" * 64, signer.node_id, ())  # type: ignore[arg-type]
    digests = digests_of(rows)
    said = RowsCommitment(
        request_id="r",
        stage=1,
        position=0,
        n_rows=STRETCH_ROWS,
        sent=digests,
        received=digests,
        signature=bytes(64),
    )
    said = signed(said, pipeline, signer.sign)
    header, _ = encode_job(said)
    figures = [
        compute,
        read,
        Figure(
            f"hash both sides, width {manifest.n_embd}",
            "us",
            microseconds(lambda: (digests_of(rows), digests_of(rows))),
        ),
        Figure(
            "sign and encode", "us", microseconds(lambda: encode_job(signed(said, pipeline, signer.sign)))
        ),
        Figure(
            "decode and verify (next stage, origin)",
            "us",
            microseconds(lambda: is_signed_by(decode_job(header), pipeline, signer.node_id, signer.verify)),  # type: ignore[arg-type]
        ),
    ]
    for width in WIDTHS:
        wide = rng.standard_normal((STRETCH_ROWS, width)).astype(np.float32)
        taken = microseconds(lambda wide=wide: (digests_of(wide), digests_of(wide)))  # type: ignore[misc]
        figures.append(Figure(f"hash both sides, width {width}", "us", taken))
    shown = [(figure, None) for figure in figures]
    text = table(shown)  # type: ignore[arg-type]
    print(text)
    print(f"{len(header)} bytes")
    write("row_commitments", "python -m bench.row_commitments", shown, text)  # type: ignore[arg-type]


if __name__ == "__main__":
    trio.run(main)
