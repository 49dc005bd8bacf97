"""A projector (mmproj) ready to run: libmtmd over its file, and a text model without its weights.

Of the text model libmtmd wants the width, the kind of positions and the vocabulary. Loaded with `no_alloc` it
takes milliseconds and no memory, and works where the weights are absent. Without one libmtmd reads
uninitialised memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as lib
from llama_cpp import mtmd_cpp as mtmd

from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_proto.errors import without_folders
from swarmllm_proto.ipc import EncodeSound
from swarmllm_proto.picture_runs import WHOLE_RUN_ROWS_MAX
from swarmllm_workers import partial_packages
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels import cpu_variants, small_batches
from swarmllm_workers.vision.sounds import samples_of

PROBE_SIZE: Final = 48
"""Pixels on each side of the grey picture."""
PROBE_S: Final = 0.5
"""Of silence."""
_ERROR_LEVEL: Final = 4

_library_messages: list[str] = []


def _on_log(level: int, text: bytes, _user_data: int | None) -> None:
    if level == _ERROR_LEVEL:
        _library_messages.append(text.decode("utf-8", "replace").strip())
        del _library_messages[:-8]


_log_callback = lib.llama_log_callback(_on_log)
partial_packages.keep_set(lambda: lib.llama_log_set(_log_callback, ctypes.c_void_p()))
_set_helper_log = mtmd._libmtmd.mtmd_helper_log_set
_set_helper_log.argtypes = [type(_log_callback), ctypes.c_void_p]
_set_helper_log.restype = None
_set_helper_log(_log_callback, None)
lib.llama_backend_init()
cpu_variants.load()
small_batches.connect()


class EncodedPart(NamedTuple):
    """A run of positions: `tokens` of the vocabulary, or f32 `rows` [n, n_embd]."""

    tokens: tuple[int, ...]
    rows: np.ndarray | None
    grid_width: int = 0
    """Columns of the grid on which the rows stand, line by line; 0: they stand one after the other."""
    is_causal: bool = True
    """False: each row sees all of them."""


class Projector:
    """Raises CallError bad_model for files that do not fit, or that need what no pipeline does. A damaged
    file may end the process."""

    def __init__(self, model: Path, projector: Path, n_threads: int) -> None:
        params = lib.llama_model_default_params()
        params.no_alloc = True
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(os.fsencode(model), params)
        if not self._model:
            raise _complaint(f"{model.name} cannot be read", "path")
        self.n_embd: int = lib.llama_model_n_embd_inp(self._model)
        """Width of a row, with all of its parts."""
        self.n_vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        if self.n_embd != lib.llama_model_n_embd(self._model) and not _takes_parts(self._model):
            raise CallError("bad_model", f"{model.name} takes rows beside its hidden states", "path")
        settings = mtmd.mtmd_context_params_default()
        settings.use_gpu = False
        settings.n_threads = n_threads
        settings.print_timings = False
        settings.warmup = False
        self._context = mtmd.mtmd_init_from_file(os.fsencode(projector), self._model, settings)
        if not self._context:
            raise _complaint(f"{projector.name} cannot be used with {model.name}", "projector")
        sees, hears = mtmd.mtmd_support_vision(self._context), mtmd.mtmd_support_audio(self._context)
        if not (sees or hears):
            raise CallError("bad_model", f"{projector.name} encodes neither pictures nor sounds", "projector")
        self.takes = ("picture",) * sees + ("sound",) * hears

    def probe(self) -> int:
        """Encode a grey picture, and silence, as the projector takes them; how many rows they became. Raises
        CallError."""
        parts: list[EncodedPart] = []
        if "picture" in self.takes:
            parts += self.encode(np.full((PROBE_SIZE, PROBE_SIZE, 3), 127, np.uint8))
        if "sound" in self.takes:
            n_samples = int(PROBE_S * mtmd.mtmd_get_audio_sample_rate(self._context))
            parts += self.encode_sound(np.zeros(n_samples, np.float32))
        return sum(len(part.rows) for part in parts if part.rows is not None)

    def encode(self, pixels: np.ndarray) -> list[EncodedPart]:
        """Of u8 [height, width, 3]. Raises CallError bad_picture, bad_model, engine."""
        height, width, _ = pixels.shape
        data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return self._parts(mtmd.mtmd_bitmap_init(width, height, data))

    def decode_sound(self, message: EncodeSound, data: memoryview) -> np.ndarray:
        """f32 [n] as `encode_sound` takes it. Raises CallError bad_picture, also where this projector takes
        no sounds."""
        if "sound" not in self.takes:
            raise CallError("bad_picture", "this projector encodes no sounds", "kind")
        return samples_of(self._context, message, data)

    def encode_sound(self, samples: np.ndarray) -> list[EncodedPart]:
        """Of f32 [n], at the projector's rate. Raises as `encode` does."""
        data = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return self._parts(mtmd.mtmd_bitmap_init_from_audio(len(samples), data))

    def _parts(self, bitmap: Any) -> list[EncodedPart]:
        """Of a bitmap, which is freed."""
        with self._chunks(bitmap) as chunks:
            parts = [self._part(chunk) for chunk in chunks]
        if not any(part.rows is not None for part in parts):
            raise CallError("engine", "the projector gives no rows")
        return parts

    @contextmanager
    def _chunks(self, bitmap: Any) -> Iterator[list[Any]]:
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            if failed := self._tokenize(bitmap, chunks):
                raise CallError("bad_picture", f"libmtmd does not take this ({failed})", "payload")
            n = mtmd.mtmd_input_chunks_size(chunks)
            yield [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(n)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _tokenize(self, bitmap: Any, chunks: Any) -> int:
        """Fill `chunks` with those of a bitmap. 0, or what libmtmd says went wrong."""
        if hasattr(mtmd, "mtmd_tokenize_from_parts"):
            part = mtmd.mtmd_input_part()
            part.bitmap = bitmap
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            return int(mtmd.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False))
        # Before llama-cpp-python 0.3.36 it wants a text, with a marker where the bitmap belongs.
        marker = mtmd.mtmd_default_marker()
        text = mtmd.mtmd_input_text(marker, len(marker), False, False)
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        return int(mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1))

    def _part(self, chunk: Any) -> EncodedPart:
        kind, n = mtmd.mtmd_input_chunk_get_type(chunk), mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        if kind == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            size = ctypes.c_size_t()
            found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(size))
            tokens = tuple(int(found[index]) for index in range(size.value))
            if not all(0 <= token < self.n_vocab for token in tokens):
                raise CallError("bad_model", "the vocabulary lacks the projector's special tokens", "path")
            return EncodedPart(tokens, None)
        grid_width = 0
        if kind == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            grid_width = self._grid_width(chunk, n)
        elif kind != mtmd.MTMD_INPUT_CHUNK_TYPE_AUDIO:
            raise CallError("bad_model", "the projector gives neither rows nor tokens", "projector")
        is_causal = not mtmd.mtmd_decode_use_non_causal(self._context, chunk)
        if not is_causal and n > WHOLE_RUN_ROWS_MAX:
            raise CallError(
                "bad_picture",
                f"the picture becomes {n} rows that see each other, and a batch has {WHOLE_RUN_ROWS_MAX}",
                "payload",
            )
        if failed := mtmd.mtmd_encode_chunk(self._context, chunk):
            raise CallError("engine", f"libmtmd cannot encode this ({failed})")
        output = mtmd.mtmd_get_output_embd(self._context)
        rows = np.ctypeslib.as_array(output, (n, self.n_embd)).copy()
        if not np.isfinite(rows).all():
            raise CallError("engine", "the projector gives rows that are no numbers")
        return EncodedPart((), rows, grid_width, is_causal)

    def _grid_width(self, chunk: Any, n: int) -> int:
        """Of a picture's n rows; 0: they stand one after the other. Raises CallError bad_model where they
        stand otherwise."""
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        found = [mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, i) for i in range(n)]
        n_positions = mtmd.mtmd_input_chunk_get_n_pos(chunk)
        if not mtmd.mtmd_decode_use_mrope(self._context):
            if n_positions == n and all(place.t == i for i, place in enumerate(found)):
                return 0
            raise CallError("bad_model", "the projector wants positions that no pipeline gives", "projector")
        width = 1 + max(int(place.x) for place in found)
        on_grid = [(0, i // width, i % width, 0) for i in range(n)]
        if n % width or n_positions != max(width, n // width):
            on_grid = []
        if on_grid != [(place.t, place.y, place.x, place.z) for place in found]:
            raise CallError("bad_model", "the projector wants positions that no pipeline gives", "projector")
        return width


def _takes_parts(model: Any) -> bool:
    """Whether the first layers take further parts of rows, as pipelines give them."""
    name = ctypes.create_string_buffer(64)
    lib.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
    row = ARCHITECTURES.get(name.value.decode("utf-8", "replace"))
    return row is not None and row.deepstack_key != ""


def _complaint(what: str, field: str) -> CallError:
    said = "; ".join(_library_messages) or "libmtmd gave no reason"
    return CallError("bad_model", f"{what}: {without_folders(said)[:600]}", field)
