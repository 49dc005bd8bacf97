"""The embedding shard: rows of `token_embd` as f32, looked up straight in the mapped GGUF.

It is part of no segment. Only the rows asked for are read and dequantised, by the functions of ggml that its
own `get_rows` calls, so the results are the same bit for bit (there is a test for every type that we build).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Type

from swarmllm_workers.engine.tap import ggml
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

_UNPACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Embedding:
    """f32 rows [n, n_embd] for i32 token ids [n]."""

    def __init__(self, source: GgufFile) -> None:
        tensor = source.tensors.get("token_embd.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise CallError("bad_model", f"{source.path.name} has no embedding matrix", "path")
        self.n_embd, self.n_vocab = tensor.shape
        self._type = tensor.type
        self._rows = source.tensor_data(tensor).reshape(self.n_vocab, -1)
        self._unpack = _unpacker(tensor.type)
        self._address = self._rows.ctypes.data
        self._row_bytes = self._rows.shape[1]
        self._row = np.empty((1, self.n_embd), np.float32)
        self._row_address = self._row.ctypes.data

    def check(self, tokens: np.ndarray) -> None:
        """Raises CallError bad_tensor for an id outside of the vocabulary."""
        if len(tokens) == 1:
            lowest = highest = int(tokens[0])
        elif len(tokens):
            lowest, highest = int(tokens.min()), int(tokens.max())
        else:
            return
        if not (lowest >= 0 and highest < self.n_vocab):
            raise CallError("bad_tensor", f"token ids lie in [0, {self.n_vocab})", "payload")

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """Raises CallError bad_tensor for an id outside of the vocabulary."""
        self.check(tokens)
        if len(tokens) == 1 and self._unpack is not None:
            # A decode step: each call of numpy that it can do without is ten microseconds less.
            self._unpack(self._address + int(tokens[0]) * self._row_bytes, self._row_address, self.n_embd)
            return self._row.copy()
        packed = self._rows[tokens]
        if self._type == Type.F32:
            return np.ascontiguousarray(packed.view(np.float32))
        if self._unpack is None:
            raise CallError("bad_model", f"embeddings of type {self._type.name} cannot be read")
        rows = np.empty((len(tokens), self.n_embd), np.float32)
        self._unpack(packed.ctypes.data, rows.ctypes.data, rows.size)
        return rows


def _unpacker(kind: Type) -> Any:
    """ggml's function from packed values to f32, None where it has none under the usual name."""
    names = {Type.F16: "ggml_fp16_to_fp32_row", Type.BF16: "ggml_bf16_to_fp32_row"}
    kind_name = kind.name.lower()
    if kind_name.endswith("_k"):
        kind_name = kind_name[:-1] + "K"
    try:
        return _UNPACK((names.get(kind, f"dequantize_row_{kind_name}"), ggml))
    except AttributeError:
        return None
