"""Stands before what libllama asks ggml for: room for a graph, and cells that are zero (`memory_calls.c`).

libllama says what its buffers will take. ggml's processor backend takes a further one when it computes: of
the largest product the second factor, in the type of the first. With plain attention these are the scores of
all heads in f16, which was up to 38 % more than all that libllama speaks of. Here the largest graphs come by
when libllama reserves room for them, and ggml is asked.

libllama has the cells of a context zeroed, page by page: 0.17 s for 192 MiB on a Zen 3, most of what it took
to load the three layers they were for. Memory that the system has just given is zero. So whole pages are
given back instead, which takes no time, and are filled in when the layers are ready (`huge_pages.fill_in`):
what was promised to layers has to be theirs, or it would be promised again. Huge pages take a sixth of the
time where the system has some at hand, and several times as long where it has to make them.

Where no compiler was at hand, or another module had loaded libllama before, everything is as ggml has it, and
nobody knows what it takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swarmllm_workers.kernels.interposing import stand_before_libllama, tell_ggmls_own

_library: ctypes.CDLL | None = None


def install() -> None:
    """Before libllama is loaded."""
    global _library
    if _library is None:
        _library = stand_before_libllama("memory_calls")
        if _library is not None:
            _library.swarmllm_watch.argtypes = (ctypes.c_int,)
            _library.swarmllm_watch.restype = None
            _library.swarmllm_work_bytes.argtypes = ()
            _library.swarmllm_work_bytes.restype = ctypes.c_int64
            _library.swarmllm_next_cleared.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
            _library.swarmllm_next_cleared.restype = ctypes.c_size_t


def connect() -> None:
    """After libllama is loaded: where the room for a graph is asked for."""
    if _library is not None and hasattr(_library, "swarmllm_graph_plan"):
        tell_ggmls_own(_library, "ggml_graph_plan", "swarmllm_graph_plan")


def cleared() -> list[tuple[int, int]]:
    """(address, bytes) of the pages that were cleared in this thread since it was asked last, and that are to
    be filled in."""
    found: list[tuple[int, int]] = []
    address = ctypes.c_void_p()
    while _library is not None and (size := int(_library.swarmllm_next_cleared(ctypes.byref(address)))):
        found.append((address.value or 0, size))
    return found


@contextmanager
def watching(n_threads: int) -> Iterator[Callable[[], int | None]]:
    """Within, a function: the bytes that the largest graph takes when so many threads compute it, of those of
    the contexts that this thread has made. None: nobody knows."""
    library = _library
    if library is None:
        yield lambda: None
        return

    def largest_bytes() -> int | None:
        n_bytes = int(library.swarmllm_work_bytes())
        return n_bytes if n_bytes >= 0 else None

    library.swarmllm_watch(n_threads)
    try:
        yield largest_bytes
    finally:
        library.swarmllm_watch(0)
