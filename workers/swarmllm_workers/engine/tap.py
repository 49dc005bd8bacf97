"""Read the hidden state after a segment's last layer, and set the one before its first, inside libllama's
graph.

libllama calls `cb_eval(tensor, ask=True)` for every tensor of the graph; where the answer is yes it
computes up to that tensor and calls again with ask=False, and a "no" there ends the computation (so the
dummy head of a segment costs nothing). `tap.c` answers in C, this file answers in Python where no compiler
was at hand.

Alternatives, and why not: `llama_set_embeddings_nextn` gives the state before the norm without a callback,
but only in architectures with multi-token prediction (llama, qwen2, qwen3, gemma and phi have none);
`llama_set_embeddings_layer_inp` gives a layer's *input*, so the last layer's output would cost one layer
too many; `llama_get_embeddings` is the state after the final norm. Reading the tensor after the graph has
run does not work: its memory is reused.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels import interposing

ggml = interposing.mapped_libraries("libggml-base")[0]

_get_name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("ggml_get_name", ggml))
_op_name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("ggml_op_desc", ggml))
_n_bytes = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(("ggml_nbytes", ggml))
_TRANSFER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_read = _TRANSFER(("ggml_backend_tensor_get", ggml))
_write = _TRANSFER(("ggml_backend_tensor_set", ggml))


class _State(ctypes.Structure):
    """`struct swarmllm_tap` of tap.c, field for field."""

    _fields_ = (
        ("get_name", ctypes.c_void_p),
        ("n_bytes", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("output_name", ctypes.c_char_p),
        ("input_name", ctypes.c_char_p),
        ("output", ctypes.c_void_p),
        ("input", ctypes.c_void_p),
        ("output_size", ctypes.c_size_t),
        ("input_size", ctypes.c_size_t),
        ("n_read", ctypes.c_int32),
        ("n_written", ctypes.c_int32),
        ("n_mismatched", ctypes.c_int32),
        ("n_rescaled", ctypes.c_int32),
        ("op_name", ctypes.c_void_p),
        ("operand_offset", ctypes.c_size_t),
        ("factor_offset", ctypes.c_size_t),
        ("wrong_factor", ctypes.c_float),
        ("right_factor", ctypes.c_float),
    )


class TensorHead(ctypes.Structure):
    """The first fields of `struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("factor", ctypes.c_float),
        ("more_op_params", ctypes.c_int32 * 15),
        ("flags", ctypes.c_int32),
        ("operand", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Rescaling:
    """Queries are to be scaled by `right` in each of `n_layers`, where the graph has `wrong`. f32 values."""

    wrong: float
    right: float
    n_layers: int


def find_library() -> Path | None:
    """tap.c as it was built beside this file, or None."""
    return next(iter(sorted(Path(__file__).parents[1].glob("_tap*.so"))), None)


class Tap:
    """What a context's `cb_eval` needs. Must outlive the context.

    output_name: the tensor to read; "" reads nothing (the segment with the head). input_name: the tensor to
    overwrite with the rows that are fed; "" where the graph uses them as they are.
    """

    def __init__(
        self,
        *,
        output_name: str,
        input_name: str,
        n_embd: int,
        n_rows_max: int,
        native: bool = True,
        rescaling: Rescaling | None = None,
    ) -> None:
        self._rows = np.zeros((n_rows_max, n_embd), np.float32)
        self._row_bytes = n_embd * 4
        self._reads, self._writes = bool(output_name), False
        self._names = (output_name or "\x00").encode(), input_name.encode() or None
        self._state = _State(
            get_name=_address(_get_name),
            n_bytes=_address(_n_bytes),
            read=_address(_read),
            write=_address(_write),
            output_name=output_name.encode() or b"\xff",
            input_name=self._names[1],
            output=self._rows.ctypes.data,
        )
        self._rescaling = rescaling
        if rescaling is not None:
            self._state.op_name = _address(_op_name)
            self._state.operand_offset = TensorHead.operand.offset
            self._state.factor_offset = TensorHead.factor.offset
            self._state.wrong_factor, self._state.right_factor = rescaling.wrong, rescaling.right
        library = find_library() if native else None
        self.is_native = library is not None
        if library is not None:
            function = ctypes.CDLL(str(library)).swarmllm_tap
            self.callback: Any = ctypes.cast(function, lib.ggml_backend_sched_eval_callback)
            self.user_data = ctypes.addressof(self._state)
        else:
            self.callback = lib.ggml_backend_sched_eval_callback(self._on_tensor)
            self.user_data = 0

    def arm(self, rows: np.ndarray, *, is_fed: bool = False) -> None:
        """Before a decode of `rows`: f32 [n, n_embd], or token ids [n], over which nothing is written, nor
        where rows are fed that the graph takes as they are (`is_fed`)."""
        size = len(rows) * self._row_bytes
        state = self._state
        state.output_size = state.input_size = size
        state.n_read = state.n_written = state.n_mismatched = state.n_rescaled = 0
        self._writes = self._names[1] is not None and rows.ndim == 2 and not is_fed
        state.input_name = self._names[1] if self._writes else None
        if self._writes:
            self._input = np.ascontiguousarray(rows, np.float32)
            state.input = self._input.ctypes.data

    def take(self, n_rows: int) -> np.ndarray:
        """After the decode: f32 [n_rows, n_embd], a view that the next decode overwrites; [0, n_embd] where
        this tap reads nothing. Raises CallError engine where the graph did not hold what the table
        promises."""
        state = self._state
        n_rescaled = self._rescaling.n_layers if self._rescaling is not None else 0
        if (
            state.n_mismatched
            or state.n_read != self._reads
            or state.n_written != self._writes
            or state.n_rescaled != n_rescaled
        ):
            raise CallError(
                "engine",
                f"the graph has no single {self._names} tensor of {n_rows} rows: this model cannot be cut",
            )
        return self._rows[: n_rows if self._reads else 0]

    def _on_tensor(self, tensor: int, ask: bool, _user_data: int | None) -> bool:
        name = _get_name(tensor)
        state = self._state
        if ask and self._rescaling is not None:
            self._rescale(TensorHead.from_address(tensor), self._rescaling)
        if name == self._names[0]:
            if not ask:
                if _n_bytes(tensor) == state.output_size:
                    _read(tensor, state.output, 0, state.output_size)
                    state.n_read += 1
                else:
                    state.n_mismatched += 1
            return ask
        if self._writes and name == self._names[1]:
            if not ask:
                if _n_bytes(tensor) == state.input_size:
                    _write(tensor, state.input, 0, state.input_size)
                    state.n_written += 1
                else:
                    state.n_mismatched += 1
            return True
        return not ask

    def _rescale(self, tensor: TensorHead, rescaling: Rescaling) -> None:
        is_scaling = _op_name(ctypes.addressof(tensor)) == b"SCALE"
        if not is_scaling or not _get_name(tensor.operand).startswith(b"Qcur-"):
            return
        if tensor.factor in (rescaling.wrong, rescaling.right):
            tensor.factor = rescaling.right
            self._state.n_rescaled += 1
        else:
            self._state.n_mismatched += 1


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
