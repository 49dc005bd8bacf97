"""Loads a model file in a child process first, where it can do no harm.

libllama answers some nonsense in a GGUF (three experts used of two, a head of size 0, a token listed twice)
with `abort()`, and checking all that it assumes would be writing it again. So a fork loads the file first,
without its weights, and makes a small context, which builds the graph: some 10 to 30 ms whatever the size.
Dying by a signal there is the answer; any lesser complaint is left to the real call, which may not need the
part that is broken.

Only where libllama was built without a GPU: a driver does not survive a fork.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Final

from llama_cpp import llama_cpp as lib

from swarmllm_proto.errors import without_folders
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import ARRAY, GgufFile

TIMEOUT_S: Final = 120
N_ROWS: Final = 32
_LAST_WORDS_MAX: Final = 8192


def refuse_impossible_rotation(source: GgufFile) -> None:
    """The one assumption that libllama checks only when it computes. Raises CallError bad_model."""
    name = source.text("general.architecture")
    n_heads = source.integer(f"{name}.attention.head_count", 0)
    head_size = source.integer(f"{name}.embedding_length", 0) // n_heads if n_heads > 0 else 0
    head_size = source.integer(f"{name}.attention.key_length", head_size)
    for key in (f"{name}.rope.dimension_count", f"{name}.rope.dimension_count_swa"):
        n_rotated = source.integer(key, 0)
        if n_rotated % 2 or n_rotated > head_size > 0:
            raise CallError("bad_model", f"{key} is {n_rotated} in heads of {head_size}", "path")
    sections = source.values.get(f"{name}.rope.dimension_sections")
    n_rotated = source.integer(f"{name}.rope.dimension_count", head_size)
    if sections is not None and sections.type == ARRAY and n_rotated > 0:
        n_in_sections = int(sections.numbers().sum())
        if n_in_sections > n_rotated:
            raise CallError(
                "bad_model", f"its rotation has {n_in_sections} pairs in {n_rotated} numbers", "path"
            )


def refuse_what_aborts(path: Path) -> None:
    """Raises CallError bad_model, with libllama's last words, where loading the file kills a process."""
    if lib.llama_supports_gpu_offload():
        return
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _try(path, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        words = pipe.read(_LAST_WORDS_MAX).decode("utf-8", "replace").strip()
        while pipe.read(_LAST_WORDS_MAX):
            pass
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        said = without_folders(words.splitlines()[-1])[:300] if words else "without a word"
        raise CallError("bad_model", f"{path.name} makes libllama die of {name}: {said}", "path")


def _try(path: Path, writer: int) -> None:
    """Never returns."""
    try:
        faulthandler.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TIMEOUT_S)
        os.environ["GGML_NO_BACKTRACE"] = "1"
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        lib.llama_log_set(_silent, None)
        params = lib.llama_model_default_params()
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        params.no_alloc = True  # neither reads nor makes room for the weights
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        params.load_mtp = False
        model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if model is not None:
            small = lib.llama_context_default_params()
            small.n_ctx = small.n_batch = small.n_ubatch = N_ROWS
            small.n_threads = small.n_threads_batch = 1
            small.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            lib.llama_init_from_model(model, small)
    finally:
        os._exit(0)


def _ignore(_level: int, _text: bytes, _user_data: int | None) -> None:
    pass


_silent = lib.llama_log_callback(_ignore)
