"""Models and contexts of libllama, through its C interface (which only the tap and the probe touch beside
this file). What enters here has been validated by the caller.

libllama answers bad input with `abort()` in places, so nothing from outside reaches it unchecked: shapes,
token ids, positions and free cells are looked at before each call, and the one exception that remains (a
native crash) costs this process alone.

Context settings that decide the last bit of a logit are by default those of `llama_cpp.Llama`: f16 KV, no
flash attention. Sliding-window caches are always full-size (so that any position can be truncated).
`kv_unified` lets one request use all cells instead of a fixed share.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as lib

from swarmllm_proto.errors import without_folders
from swarmllm_proto.ipc import FlashAttention, KvType
from swarmllm_workers import partial_packages
from swarmllm_workers.engine import huge_pages, shared_weights
from swarmllm_workers.engine.positions import SECTIONS
from swarmllm_workers.errors import CallError, Interrupted, Stopped
from swarmllm_workers.gguf_file import files_of
from swarmllm_workers.kernels import cpu_variants, memory_calls, repacking, row_attention, small_batches

log = logging.getLogger(__name__)

N_BATCH: Final = 512
"""Rows of one `llama_decode`; longer forwards are run in parts."""
WATCHED_ROWS_MIN: Final = 16
WATCHED_FROM_S: Final = 0.1
"""A batch of so many rows that is expected to take so long may be left before its end. To be asked costs a
microsecond for each operation of the graph."""

_LEVELS: Final = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
"""libllama warns of every dummy vocabulary; its warnings are logged as information."""

_LOAD_MODES: Final = {
    (True, False): lib.LLAMA_LOAD_MODE_MMAP,
    (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
    (False, False): lib.LLAMA_LOAD_MODE_NONE,
    (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
}
_FLASH_ATTENTION: Final = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_GRID_ROTATIONS: Final = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)
_KV_TYPES: Final = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}


class _LibraryMessages(threading.local):
    """Of the calls of one thread: libllama says what it dislikes in the thread that calls it."""

    def __init__(self) -> None:
        self.recent: deque[str] = deque(maxlen=8)


_library_messages = _LibraryMessages()


class _CapturedLog(threading.local):
    lines: list[str] | None = None


_captured_log = _CapturedLog()


@contextlib.contextmanager
def capture_log() -> Iterator[list[str]]:
    """Collects the log lines of libllama in this thread."""
    lines: list[str] = []
    _captured_log.lines = lines
    try:
        yield lines
    finally:
        _captured_log.lines = None


def _on_log(level: int, text: bytes, _user_data: int | None) -> None:
    shared_weights.on_log(text)
    line = text.decode("utf-8", "replace").strip()
    if _captured_log.lines is not None:
        _captured_log.lines.append(line)
        return
    if level == 4:
        _library_messages.recent.append(line)
    if line:
        log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


_log_callback = lib.llama_log_callback(_on_log)
partial_packages.keep_set(lambda: lib.llama_log_set(_log_callback, ctypes.c_void_p()))
cpu_variants.load()
lib.llama_backend_init()
small_batches.connect()
memory_calls.connect()


def engine_version() -> str:
    return f"llama-cpp-python {llama_cpp.__version__}"


def _complaint(what: str) -> CallError:
    said = "; ".join(_library_messages.recent) or "libllama gave no reason"
    kind = "out_of_memory" if "alloc" in said or "memory" in said else "bad_model"
    return CallError(kind, f"{what}: {without_folders(said)[:600]}")  # type: ignore[arg-type]


def _read_in(files: Collection[Path], on_progress: Callable[[float], None] | None) -> None:
    """Half of what loading takes, at most."""
    with contextlib.suppress(OSError):  # libllama meets it again and reports it
        total = sum(file.stat().st_size for file in files)
        done = 0

        def on_read(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            if on_progress is not None:
                on_progress(done / total / 2)

        for file in files:
            huge_pages.read_in(file, on_read)


class Model:
    """A loaded GGUF: the original, a part of it, a segment file, or (`vocab_only`) its vocabulary alone.

    Raises CallError bad_model or out_of_memory with libllama's own words.
    """

    def __init__(
        self,
        path: Path,
        *,
        use_mmap: bool = True,
        use_mlock: bool = False,
        n_gpu_layers: int = 0,
        vocab_only: bool = False,
        on_progress: Callable[[float], None] | None = None,
        numbers: Mapping[str, int] | None = None,
        part: shared_weights.Part | None = None,
        no_alloc: bool = False,
    ) -> None:
        """`on_progress` may raise Stopped, and loading ends there. `numbers`: metadata that counts instead of
        the file's. `part`: what of the file is loaded, without a copy; for mmap on the CPU only.
        `no_alloc`: neither this nor its contexts have any memory, and libllama says what they would
        take."""
        params = lib.llama_model_default_params()
        params.load_mode = _LOAD_MODES[use_mmap, use_mlock]
        params.n_gpu_layers = n_gpu_layers
        params.vocab_only = vocab_only
        params.use_extra_bufts = vocab_only or not repacking.keeps_rows(files_of(path))
        params.load_mtp = False
        params.no_alloc = no_alloc
        self._stub = None if part is None else shared_weights.Stub(part)
        reads = use_mmap and not vocab_only and part is None
        if on_progress is not None or self._stub is not None:

            def progressed(fraction: float, _user_data: int | None) -> bool:
                try:
                    if self._stub is not None:
                        self._stub.weights_are_next()
                    if on_progress is not None:
                        on_progress((1 + fraction) / 2 if reads else fraction)
                except (Stopped, CallError):
                    return False
                return True

            params.progress_callback = lib.llama_progress_callback(progressed)
        if numbers:
            params.kv_overrides = _overrides(numbers)
        _library_messages.recent.clear()
        if reads:
            _read_in(files_of(path), on_progress)
        self.private_bytes: int | None = None
        """Of the weights those that are not pages of the file; None: nobody knows."""
        self.own_bytes: int | None = None
        """Those that no other part of the file can have, too; None: nobody knows."""
        self._in_use = _mark_used(path)
        try:
            self.handle = handle = self._load(path, params)
        except BaseException:
            self._let_go()
            raise
        if part is None and not vocab_only and not no_alloc:
            self.private_bytes = self.own_bytes = shared_weights.private_bytes(handle)
        self.path = path
        self.vocabulary = lib.llama_model_get_vocab(handle)
        self.n_embd = int(lib.llama_model_n_embd(handle))
        self.n_embd_input = int(lib.llama_model_n_embd_inp(handle))
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocabulary))
        self.n_layers = int(lib.llama_model_n_layer(handle))
        self.context_length = int(lib.llama_model_n_ctx_train(handle))
        self.has_encoder = bool(lib.llama_model_has_encoder(handle))
        self.has_decoder = bool(lib.llama_model_has_decoder(handle))
        self.n_window = int(lib.llama_model_n_swa(handle))
        self.has_grid_positions = lib.llama_model_rope_type(handle) in _GRID_ROTATIONS
        """Rows have several positions each (M-RoPE)."""
        self.is_hybrid = bool(lib.llama_model_is_hybrid(handle))
        self.is_recurrent = self.is_hybrid or bool(lib.llama_model_is_recurrent(handle))
        self.size_bytes = int(lib.llama_model_size(handle))

    def _load(self, path: Path, params: Any) -> Any:
        if self._stub is None:
            handle = lib.llama_model_load_from_file(os.fsencode(path), params)
            if handle is None:
                raise _complaint(f"{path.name} cannot be loaded")
            return handle
        with self._stub:
            handle = lib.llama_model_load_from_file(os.fsencode(self._stub.path), params)
        try:
            if handle is None:
                raise _complaint(f"a part of {path.name} cannot be loaded")
            self._stub.fill(handle)
            self.private_bytes, self.own_bytes = self._stub.private_bytes, self._stub.own_bytes
        except CallError:
            if handle is not None:
                lib.llama_model_free(handle)
            self._stub.close()
            raise
        return handle

    @property
    def n_heads(self) -> int:
        """Of the first layer. Not for a model of which only the vocabulary is loaded: libllama aborts."""
        return int(lib.llama_model_n_head(self.handle))

    def number(self, key: str) -> int | None:
        """A whole number of the metadata. None: it is missing or has another type."""
        buffer = ctypes.create_string_buffer(24)
        size = lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return int(buffer.value) if size > 0 and buffer.value.isdigit() else None

    def close(self) -> None:
        if self.handle is not None:
            lib.llama_model_free(self.handle)
            self.handle = None
            if self._stub is not None:
                self._stub.close()
            self._let_go()

    def _let_go(self) -> None:
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None


def _mark_used(path: Path) -> int | None:
    """A descriptor with a shared lock on a file, for as long as it stays open: the daemon removes no segment
    file that has one. None: there is no such file, which libllama will say."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    # Without a lock, a file that was removed stays for as long as it is mapped.
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def _abort_callback(is_unwanted: Callable[[], bool] | None) -> Any:
    if is_unwanted is None:
        return None

    def asked(_user_data: int | None) -> bool:
        return is_unwanted()

    return lib.ggml_abort_callback(asked)


def _overrides(numbers: Mapping[str, int]) -> Any:
    """A list that ends with an empty key."""
    overrides = (lib.llama_model_kv_override * (len(numbers) + 1))()
    for override, (key, number) in zip(overrides, numbers.items(), strict=False):
        override.tag = lib.LLAMA_KV_OVERRIDE_TYPE_INT
        override.key = key.encode()
        override.value.val_i64 = number
    return overrides


class Threads:
    """The number of threads that compute. A change takes effect with the next batch."""

    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n


@dataclass(frozen=True)
class ContextSettings:
    n_ctx: int
    n_slots: int
    n_threads: int
    threads: Threads | None = None
    """Count in the place of `n_threads`."""
    kv_type: KvType = "f16"
    flash_attention: FlashAttention = "off"
    n_outputs_max: int = N_BATCH
    n_batch: int = N_BATCH
    """Rows of one `decode`, at most N_BATCH."""
    eval_callback: Any = None
    """A `ggml_backend_sched_eval_callback` and the pointer it is called with; both must outlive the
    context."""
    eval_user_data: int | None = None
    is_unwanted: Callable[[], bool] | None = None
    """Asked while a long batch runs: whether to leave it. Must not raise."""


class Context:
    """KV cells, compute buffers and one reusable batch for a model."""

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx = settings.n_ctx
        params.n_batch = params.n_ubatch = settings.n_batch
        params.n_seq_max = settings.n_slots
        params.n_outputs_max = settings.n_outputs_max
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.flash_attn_type = _FLASH_ATTENTION[
            row_attention.chosen(settings.flash_attention, settings.kv_type)
        ]
        params.type_k = params.type_v = _KV_TYPES[settings.kv_type]
        params.kv_unified = True
        params.swa_full = True
        params.no_perf = True
        params.offload_kqv = True
        # Rows are wanted, not what a model that was made for embeddings makes of them all.
        params.pooling_type = lib.LLAMA_POOLING_TYPE_NONE
        if settings.eval_callback is not None:
            params.cb_eval = settings.eval_callback
            params.cb_eval_user_data = settings.eval_user_data
        self._keep = settings
        self._threads = settings.threads or Threads(settings.n_threads)
        self._n_threads = settings.n_threads
        self._gives_normed = False
        _library_messages.recent.clear()
        memory_calls.cleared()
        handle = lib.llama_init_from_model(model.handle, params)
        self._to_fill = memory_calls.cleared()
        if handle is None:
            raise _complaint("no context can be made")
        self.handle = handle
        self._memory = lib.llama_get_memory(handle)
        if self._memory is None:
            self.close()
            raise CallError("bad_model", "the model keeps no state between tokens: it generates nothing")
        self.n_vocab = model.n_vocab
        self._n_embd = model.n_embd
        self._embd = np.zeros((N_BATCH, model.n_embd_input), np.float32)
        self._tokens = np.zeros(N_BATCH, np.int32)
        self._positions = np.zeros(N_BATCH * (SECTIONS if model.has_grid_positions else 1), np.int32)
        self._is_causal = True
        self._n_sequences = np.ones(N_BATCH, np.int32)
        self._sequences = np.zeros(N_BATCH, np.int32)
        self._outputs = np.zeros(N_BATCH, np.int8)
        first = self._sequences.ctypes.data
        self._sequence_pointers = np.arange(first, first + 4 * N_BATCH, 4, dtype=np.uint64)
        self._is_unwanted = _abort_callback(settings.is_unwanted)
        self._row_s = math.inf
        self._logits_at, self._logits = 0, np.empty(0, np.float32)
        """Where the last view of a row's logits is, and the view."""
        """What a row took in the latest batch of many."""
        self._row_batch = self._batch(rows=True)
        self._token_batch = self._batch(rows=False)

    def _batch(self, *, rows: bool) -> Any:
        batch = lib.llama_batch()
        if rows:
            batch.embd = self._embd.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        else:
            batch.token = self._tokens.ctypes.data_as(ctypes.POINTER(lib.llama_token))
        batch.pos = self._positions.ctypes.data_as(ctypes.POINTER(lib.llama_pos))
        batch.n_seq_id = self._n_sequences.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.seq_id = self._sequence_pointers.ctypes.data_as(
            ctypes.POINTER(ctypes.POINTER(lib.llama_seq_id))
        )
        batch.logits = self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        return batch

    def decode(
        self,
        data: np.ndarray,
        positions: np.ndarray | int,
        sequences: np.ndarray | int,
        outputs: np.ndarray | bool,
        *,
        normed: bool = False,
        is_causal: bool = True,
    ) -> None:
        """One `llama_decode` of n <= N_BATCH rows.

        `data`: f32 [n, n_embd_input], or i32 [n] token ids. `positions`: i32 [n]; of a model whose rows have
        several each, with f32 rows, [SECTIONS, n]. `is_causal`: no row sees those behind it; without, all of
        one sequence that see each other are to be here. `outputs`: which rows the head computes (tap: all of
        them), at most `n_outputs_max`: libllama aborts. `normed`: `normed` has something to give afterwards.
        Raises CallError context_full where no cells are free, engine for anything else; Interrupted where
        it turned out to be unwanted.
        """
        n = len(data)
        if data.ndim == 2:
            self._embd[:n] = data
            batch = self._row_batch
        else:
            self._tokens[:n] = data
            batch = self._token_batch
        if n == 1 and isinstance(positions, int):
            # A lone decode step: what is done below, with less code of numpy.
            self._positions[0], self._sequences[0], self._outputs[0] = positions, sequences, outputs
        else:
            if isinstance(positions, np.ndarray) and positions.ndim == 2:
                self._positions[: positions.size] = positions.ravel()
            else:
                self._positions[:n] = positions
            self._sequences[:n] = sequences
            self._outputs[:n] = outputs
        batch.n_tokens = n
        if self._threads.n != self._n_threads:
            self._n_threads = self._threads.n
            lib.llama_set_n_threads(self.handle, self._n_threads, self._n_threads)
        if normed != self._gives_normed:
            lib.llama_set_embeddings(self.handle, normed)
            self._gives_normed = normed
        if is_causal is not self._is_causal:
            lib.llama_set_causal_attn(self.handle, is_causal)
            self._is_causal = is_causal
        if n >= WATCHED_ROWS_MIN and self._is_unwanted is not None:
            status = self._decode_watched(batch, n, self._is_unwanted)
        else:
            status = lib.llama_decode(self.handle, batch)
        if status == 0:
            lib.llama_synchronize(self.handle)
        elif status == 2:
            raise Interrupted
        elif status == 1:
            raise CallError("context_full", f"no KV cells are free for {n} more rows")
        else:
            raise CallError("engine", f"llama_decode failed with status {status}")

    def _decode_watched(self, batch: Any, n: int, is_unwanted: Any) -> int:
        is_long = n * self._row_s >= WATCHED_FROM_S
        if is_long:
            lib.llama_set_abort_callback(self.handle, is_unwanted, None)
        started = time.perf_counter()
        status = int(lib.llama_decode(self.handle, batch))
        if is_long:
            lib.llama_set_abort_callback(self.handle, lib.ggml_abort_callback(), None)
        if status == 0:
            self._row_s = (time.perf_counter() - started) / n
        return status

    def logits(self, row: int) -> np.ndarray:
        """f32 [n_vocab] of a row that was marked as output: a view that the next decode overwrites."""
        pointer = lib.llama_get_logits_ith(self.handle, row)
        if not pointer:
            raise CallError("engine", f"row {row} has no logits")
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_at:
            self._logits_at, self._logits = address, np.ctypeslib.as_array(pointer, (self.n_vocab,))
        return self._logits

    def normed(self, row: int) -> np.ndarray:
        """f32 [n_embd]: the state after the final norm of a row that was marked as output. A view that the
        next decode overwrites."""
        pointer = lib.llama_get_embeddings_ith(self.handle, row)
        if not pointer:
            raise CallError("engine", f"row {row} has no state after the final norm")
        return np.ctypeslib.as_array(pointer, (self._n_embd,))

    def logits_of_rows(self, first: int, n: int) -> np.ndarray:
        """f32 [n, n_vocab] of rows that follow each other and were all marked as outputs; as `logits`."""
        pointer = lib.llama_get_logits_ith(self.handle, first)
        if not pointer:
            raise CallError("engine", f"row {first} has no logits")
        return np.ctypeslib.as_array(pointer, (n, self.n_vocab))

    def share(self, source: int, target: int, length: int) -> None:
        """Give `target`, which must be empty, the first `length` rows of `source`: the same cells."""
        self.share_rows(source, target, 0, length)

    def share_rows(self, source: int, target: int, first: int, end: int) -> None:
        """As `share`, with the rows at positions [first, end) only."""
        lib.llama_memory_seq_cp(self._memory, source, target, first, end)

    def state_size(self, sequence: int) -> int:
        return int(lib.llama_state_seq_get_size(self.handle, sequence))

    def save(self, sequence: int) -> memoryview:
        """The rows of the sequence, in libllama's own format. Read-only."""
        buffer = np.empty(self.state_size(sequence), np.uint8)
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n = lib.llama_state_seq_get_data(self.handle, pointer, len(buffer), sequence)
        return buffer[:n].data.toreadonly()

    def restore(self, sequence: int, state: bytes | memoryview) -> bool:
        """False where libllama refuses: too few cells, or not of this model and these settings."""
        array = np.frombuffer(state, np.uint8)
        pointer = array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return bool(lib.llama_state_seq_set_data(self.handle, pointer, len(state), sequence) == len(state))

    def truncate(self, sequence: int, length: int) -> bool:
        """Drop the positions from `length` on. False: the model cannot drop a part (recurrent state)."""
        return bool(lib.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def fill_in(self) -> None:
        """Have memory behind all cells; without, those get it that are used. May run beside `decode`."""
        while self._to_fill:
            huge_pages.fill_in(*self._to_fill.pop())

    def close(self) -> None:
        if self.handle is not None:
            lib.llama_free(self.handle)
            self.handle = None
            self._to_fill = []
