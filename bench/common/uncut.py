"""The rival: llama-cpp-python's own `Llama` on the same GGUF, uncut, in a process of its own.

Reads one JSON object per line on stdin ({"prompt": [token ids], "n_tokens": N}) and answers with one JSON
line: seconds of prefill and of decode, and the tokens. Greedy, no stop at EOS, sampling and detokenising
included, as in a plain script.

With llama-cpp-python as GCC 12 compiles it, ggml ends the process where the processor has AMX (see
`swarmllm_workers/kernels/amx.py`), so the rival is kept from it there. BENCH_LLAMA_CPP_LIBS names a folder
with another build of llama.cpp's libraries for the rival, such as one that can use AMX, which is not kept
from it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Uncut:
    """Handle on the rival's process."""

    def __init__(self, gguf: Path, n_ctx: int, n_threads: int) -> None:
        command = [sys.executable, "-m", "bench.common.uncut", str(gguf), str(n_ctx), str(n_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=other_libraries()
        )

    def generate(self, prompt: Sequence[int], n_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "n_tokens": n_tokens}) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def other_libraries() -> dict[str, str] | None:
    """The rival's environment, where it has libraries of its own."""
    libraries = os.environ.get("BENCH_LLAMA_CPP_LIBS")
    return {**os.environ, "LLAMA_CPP_LIB_PATH": libraries} if libraries else None


def keep_from_amx() -> None:
    """Before libllama is loaded, and without the worker's package, which would stand before more of it."""
    if os.environ.get("BENCH_LLAMA_CPP_LIBS"):
        return
    package = find_spec("swarmllm_workers")
    assert package is not None
    for folder in package.submodule_search_locations or ():
        for library in Path(folder).glob("_amx*.so"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def serve(gguf: str, n_ctx: int, n_threads: int) -> None:
    keep_from_amx()
    from llama_cpp import Llama

    llm = Llama(gguf, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, verbose=False)
    for line in sys.stdin:
        order = json.loads(line)
        llm.reset()
        llm._ctx.kv_cache_clear()
        start_s = time.perf_counter()
        first_s = start_s
        tokens: list[int] = []
        for token in llm.generate(order["prompt"], temp=0.0, reset=True):
            if not tokens:
                first_s = time.perf_counter()
            tokens.append(token)
            llm.detokenize([token])
            if len(tokens) == order["n_tokens"]:
                break
        end_s = time.perf_counter()
        answer = {"prefill_s": first_s - start_s, "decode_s": end_s - first_s, "tokens": tokens}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("n_ctx", type=int)
    parser.add_argument("n_threads", type=int)
    arguments = parser.parse_args()
    serve(arguments.gguf, arguments.n_ctx, arguments.n_threads)
