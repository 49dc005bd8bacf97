"""The rival: llama.cpp's own server on the same GGUF.

Which program that is says `--llama-server PATH` or SWARMLLM_BENCH_LLAMA_SERVER; docs/benchmarks.md has how to
build it from the sources that llama-cpp-python brings along. It runs with its own defaults (continuous
batching, flash attention, batches of 512 rows, its prompt cache) but for threads, context and slots, which
are ours.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.common.streamed import Endpoint

VARIABLE = "SWARMLLM_BENCH_LLAMA_SERVER"
NAME = "llama-server"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--llama-server",
        type=Path,
        default=os.environ.get(VARIABLE),
        metavar="PATH",
        help=f"llama.cpp's server, to be measured in the same run; default: ${VARIABLE}",
    )


@contextmanager
def llama_server(
    program: Path, gguf: Path, *, n_threads: int, n_ctx: int, n_slots: int, more: Sequence[str] = ()
) -> Iterator[Endpoint]:
    """Where it listens, once it has loaded the model. `n_ctx`: cells for all slots together.
    `more`: options."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        *(str(program), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
        *("--ctx-size", str(n_ctx), "--parallel", str(n_slots)),
        *("--threads", str(n_threads), "--threads-batch", str(n_threads), "--no-webui"),
        *more,
    ]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    log.seek(0)
                    raise RuntimeError(
                        f"{program} did not start: {log.read()[-2000:].decode(errors='replace')}"
                    )
                time.sleep(0.1)
            yield Endpoint(NAME, url, "any", (process.pid,))
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
