"""Loads ggml's functions for the processor where a build has them in variants, and names the one in use.

A portable build of libllama (GGML_BACKEND_DL, GGML_CPU_ALL_VARIANTS) has a library for each family of
processors, `libggml-cpu-haswell.so` and so on. libllama is linked with none of them: ggml loads the one with
the highest score of those that this processor can run. It would look beside the interpreter and in the
working directory, where anybody may have put something, so the folder is given here. A build for one kind of
processor is linked with its only `libggml-cpu.so`, and nothing is loaded.

Loading takes 20 ms: ggml opens all of them to ask for their scores.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from swarmllm_workers.kernels import interposing

_PREFIX: Final = "libggml-cpu"
_REGISTRY: Final = "libggml.so"


def load() -> None:
    """After libllama is loaded, before anything is computed; a second call does nothing."""
    for path in interposing.mapped_paths(_REGISTRY):
        registry = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        registry.ggml_backend_dev_count.restype = ctypes.c_size_t
        if registry.ggml_backend_dev_count() == 0:
            registry.ggml_backend_load_all_from_path.argtypes = (ctypes.c_char_p,)
            registry.ggml_backend_load_all_from_path.restype = None
            registry.ggml_backend_load_all_from_path(os.fsencode(path.parent))


def in_use() -> str:
    """As ggml calls it, such as "haswell"; "": libllama was built for one kind of processor."""
    return next((variant_of(path) for path in interposing.mapped_paths(_PREFIX)), "")


def variant_of(library: Path) -> str:
    return library.name.partition(".")[0].removeprefix(_PREFIX).removeprefix("-")
