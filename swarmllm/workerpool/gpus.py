"""The GPUs of this machine, as libllama sees them.

Workers say after each load what their GPUs have free. Before the first load a process of its own asks
libllama, but only where one is installed that was built for a GPU: on other machines nothing is started.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from swarmllm_proto.ipc import Gpu

log = logging.getLogger("swarmllm.workerpool")

BUILD_INFO_TIMEOUT_S: Final = 60.0
"""A driver may take a while at its first start."""
BACKENDS: Final = ("cuda", "vulkan", "hip", "metal", "sycl", "musa", "cann", "opencl")
"""Of ggml, as its libraries are called."""


class KnownGpus:
    def __init__(self, *, is_used: bool) -> None:
        """`is_used`: layers may be put on them."""
        self._is_used = is_used
        self.seen: tuple[Gpu, ...] = ()
        """As of the last look, or of the last load."""

    @property
    def room(self) -> tuple[int, int]:
        """(bytes in all, bytes free) for layers, beside the machine's memory."""
        own = [gpu for gpu in self.seen if gpu.has_own_memory and self._is_used]
        return sum(gpu.total_bytes for gpu in own), sum(gpu.free_bytes for gpu in own)

    def note(self, gpus: tuple[Gpu, ...]) -> None:
        """A worker has said it."""
        self.seen = gpus

    async def look(self) -> None:
        """Ask libllama, where it was built for a GPU. Never raises: what is not known is found out by the
        first load."""
        if not await trio.to_thread.run_sync(has_gpu_backend):
            return
        info = await trio.to_thread.run_sync(build_info)
        try:
            self.seen = msgspec.convert((info or {}).get("gpus", ()), tuple[Gpu, ...])
        except msgspec.ValidationError as error:
            log.warning("what libllama says of its GPUs cannot be read: %s", error)


def has_gpu_backend() -> bool:
    """Whether llama-cpp-python brought a library of ggml for GPUs, without loading it."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return False
    names = {path.name for path in (Path(spec.origin).parent / "lib").glob("libggml-*")}
    return any(name.startswith(f"libggml-{backend}") for name in names for backend in BACKENDS)


def build_info() -> dict[str, Any] | None:
    """How libllama was built and what it sees, from a process of its own; None where it does not load."""
    command = [sys.executable, "-m", "swarmllm_workers.build_info"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=BUILD_INFO_TIMEOUT_S, check=True)
        info = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return info if isinstance(info, dict) else None
