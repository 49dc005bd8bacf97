"""The rival over several machines: llama.cpp's server with part of a model's layers on its RPC servers.

`ggml-rpc-server` comes from the same build as the server, with `-DGGML_RPC=ON` (docs/benchmarks.md). The
server itself computes the first layers, as the first of our nodes does, and each RPC server as many of the
others. What goes to an RPC server and comes from it passes the same proxy as between our nodes.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench.common.delay_proxy import delay_proxy, free_port
from bench.common.llama_server import START_TIMEOUT_S, llama_server, stop
from bench.common.streamed import Endpoint

NAME: Final = "llama.cpp's RPC"
PROGRAM: Final = "ggml-rpc-server"
HOST: Final = "127.0.0.1"


@contextmanager
def llama_over_rpc(
    program: Path, gguf: Path, n_layers: int, n_nodes: int, one_way_s: float, *, n_threads: int, n_ctx: int
) -> Iterator[Endpoint]:
    """`program`: llama.cpp's server, with `ggml-rpc-server` in its folder. `n_nodes`: that server and
    `n_nodes` - 1 others, `one_way_s` away from it. Raises RuntimeError where one does not start."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_rpc_server(program.with_name(PROGRAM), one_way_s, n_threads))
            for _ in range(n_nodes - 1)
        ]
        # The matrix of the output counts as one more layer, on the last server.
        n_elsewhere = n_layers - round(n_layers / n_nodes) + 1
        more = (
            *("--rpc", ",".join(servers), "--gpu-layers", str(n_elsewhere)),
            *("--tensor-split", ",".join("1" for _ in servers), "--fit", "off"),
        )
        endpoint = llama_server(program, gguf, n_threads=n_threads, n_ctx=n_ctx, n_slots=1, more=more)
        yield stack.enter_context(endpoint)


@contextmanager
def _rpc_server(program: Path, one_way_s: float, n_threads: int) -> Iterator[str]:
    """The address of its proxy."""
    port, far_port = free_port(HOST), free_port(HOST)
    command = [str(program), "--host", HOST, "--port", str(port), "--threads", str(n_threads)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{program} did not start")
            time.sleep(0.1)
        with delay_proxy([((HOST, far_port), (HOST, port))], one_way_s):
            yield f"{HOST}:{far_port}"
    finally:
        stop(process)


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True
