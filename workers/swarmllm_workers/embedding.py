"""The embedding shard: rows of `token_embd` as f32, looked up straight in the mapped GGUF.

It is part of no segment. Only the rows asked for are read and dequantised, in numpy with gguf-py's kernels,
whose results equal libllama's `get_rows` bit for bit (there is a test for every type that we build).
"""

from __future__ import annotations

import numpy as np
from gguf.quants import dequantize

from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile


class Embedding:
    """f32 rows [n, n_embd] for i32 token ids [n]."""

    def __init__(self, source: GgufFile) -> None:
        tensor = source.tensors.get("token_embd.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise CallError("bad_model", f"{source.path.name} has no embedding matrix", "path")
        self.n_embd, self.n_vocab = tensor.shape
        self._type = tensor.type
        self._rows = source.tensor_data(tensor).reshape(self.n_vocab, -1)

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """Raises CallError bad_tensor for an id outside of the vocabulary."""
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < self.n_vocab):
            raise CallError("bad_tensor", f"token ids lie in [0, {self.n_vocab})", "payload")
        packed = np.ascontiguousarray(self._rows[tokens])
        try:
            rows = dequantize(packed, self._type)
        except NotImplementedError:
            raise CallError("bad_model", f"embeddings of type {self._type.name} cannot be read") from None
        return np.ascontiguousarray(rows, np.float32)
