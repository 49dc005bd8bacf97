"""A model that reads a whole text at once, in both directions, and gives a vector or scores for it.

Every token looks at all others, so a text is one batch, and memory grows with the square of its length. A
context has room for texts of a power of two of tokens and is made anew for a longer one; a text's bits do not
depend on that.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import numpy as np
from llama_cpp import llama_cpp as lib

from swarmllm_proto.ipc.texts import PoolingKind
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.errors import CallError

TOKENS_MAX: Final = 4096
"""Of a text. With 12 heads the attention of so many takes 0.8 GB."""
TOKENS_FIRST: Final = 512
"""A context has room for so many at least."""
_POOLING: Final[dict[int, PoolingKind]] = {
    lib.LLAMA_POOLING_TYPE_NONE: "none",
    lib.LLAMA_POOLING_TYPE_MEAN: "mean",
    lib.LLAMA_POOLING_TYPE_CLS: "cls",
    lib.LLAMA_POOLING_TYPE_LAST: "last",
    lib.LLAMA_POOLING_TYPE_RANK: "rank",
}


class TextEncoder:
    """Raises CallError bad_model for a file that cannot be loaded or is of another kind."""

    def __init__(self, path: Path, n_threads: int) -> None:
        self._model = Model(path)
        self._n_threads = n_threads
        self.n_tokens_max = min(self._model.context_length, TOKENS_MAX)
        self._room = 0
        self._context: Any = None
        self._make_room(min(TOKENS_FIRST, self.n_tokens_max))
        if lib.llama_get_memory(self._context) is not None:
            raise CallError(
                "bad_model", f"{path.name} goes on with texts; it does not encode whole ones", "path"
            )
        self.pooling = _POOLING.get(int(lib.llama_pooling_type(self._context)), "none")
        is_rank = self.pooling == "rank"
        self.n_outputs = int(
            lib.llama_model_n_cls_out(self._model.handle)
            if is_rank
            else lib.llama_model_n_embd_out(self._model.handle)
        )

    def tokens(self, text: str) -> np.ndarray:
        """The tokens of a text, i32 [n], with the special tokens that the model needs around it."""
        return np.array(self._tokenize(text, add_special=True), np.int32)

    def pair(self, text: str, document: str) -> np.ndarray:
        """The tokens of a question and a document, i32 [n], in the layout of llama.cpp's server."""
        if self.pooling != "rank":
            raise CallError("bad_message", "this model does not rank documents", "document")
        template = lib.llama_model_chat_template(self._model.handle, b"rerank")
        if template:
            both = (
                template.decode("utf-8", "replace").replace("{query}", text).replace("{document}", document)
            )
            return np.array(self._tokenize(both, add_special=False), np.int32)
        vocabulary = self._model.vocabulary
        end = lib.llama_vocab_eos(vocabulary)
        if end == lib.LLAMA_TOKEN_NULL:
            end = lib.llama_vocab_sep(vocabulary)
        ends = [end] if lib.llama_vocab_get_add_eos(vocabulary) else []
        tokens = [lib.llama_vocab_bos(vocabulary)] if lib.llama_vocab_get_add_bos(vocabulary) else []
        tokens += self._tokenize(text, add_special=False) + ends
        if lib.llama_vocab_get_add_sep(vocabulary):
            tokens.append(lib.llama_vocab_sep(vocabulary))
        return np.array([*tokens, *self._tokenize(document, add_special=False), *ends], np.int32)

    def encode(self, tokens: np.ndarray) -> np.ndarray:
        """f32 [n_outputs], or [n, n_outputs] where the model pools nothing, of i32 [n]. Raises CallError."""
        n = len(tokens)
        if not n:
            raise CallError("bad_tensor", "a text of no tokens", "payload")
        if n > self.n_tokens_max:
            raise CallError(
                "context_full", f"the text is too large: {n} tokens, and {self.n_tokens_max} are possible"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._model.n_vocab:
            raise CallError("bad_tensor", f"token ids lie in [0, {self._model.n_vocab})", "payload")
        if n > self._room:
            self._make_room(min(1 << (n - 1).bit_length(), self.n_tokens_max))
        batch = lib.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens.tolist()):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1
            status = lib.llama_encode(self._context, batch)
        finally:
            lib.llama_batch_free(batch)
        if status:
            raise CallError("engine", f"llama_encode failed with status {status}")
        lib.llama_synchronize(self._context)
        if self.pooling == "none":
            return np.stack([self._vector(lib.llama_get_embeddings_ith(self._context, i)) for i in range(n)])
        return self._vector(lib.llama_get_embeddings_seq(self._context, 0))

    def _vector(self, pointer: Any) -> np.ndarray:
        if not pointer:
            raise CallError("engine", "the model gives nothing for this text")
        return np.ctypeslib.as_array(pointer, (self.n_outputs,)).copy()

    def _make_room(self, n_tokens: int) -> None:
        if self._context is not None:
            lib.llama_free(self._context)
            self._context = None
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_tokens
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = self._n_threads
        params.embeddings = True
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model.handle, params)
        if self._context is None:
            raise CallError("bad_model", "no context can be made for this model", "path")
        self._room = n_tokens

    def _tokenize(self, text: str, *, add_special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        tokens = (lib.llama_token * room)()
        n = lib.llama_tokenize(
            self._model.vocabulary, data, len(data), tokens, ctypes.c_int32(room), add_special, True
        )
        if n < 0:
            tokens = (lib.llama_token * -n)()
            n = lib.llama_tokenize(self._model.vocabulary, data, len(data), tokens, -n, add_special, True)
        return list(tokens[:n])
