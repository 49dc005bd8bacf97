"""Drafts with a small model of the same vocabulary (Leviathan et al. 2023).

It runs in the same process, with a KV cache of its own in which a request has the same slot. It guesses
greedily: a guess counts only where it is the very token that the large model's sampler draws, and the
likeliest token is the best bet on that at any temperature.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np

from swarmllm_workers.decode.bounded_call import mapping
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.libllama import N_BATCH, Context, ContextSettings, Model
from swarmllm_workers.engine.memory import (
    available_bytes,
    n_gpu_layers_of,
    predict,
    refuse_what_does_not_fit,
)
from swarmllm_workers.engine.probe import refuse_impossible_rotation, refuse_what_aborts
from swarmllm_workers.engine.segment_file import n_layers_of
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import open_source
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.speculation.drafting import Draft, Worth

KIND: Final = "model"
N_COMPARED: Final = 4096
"""Tokens, spread over the vocabulary, whose texts must be the same in both models."""


class DraftModel:
    """Raises CallError bad_model where the file cannot serve, with field draft_path."""

    def __init__(self, path: Path, vocabulary: Vocabulary, settings: EngineSettings) -> None:
        self.token_s = 0.0
        """Of a prompt, as measured last."""
        try:
            source = open_source(path)
            refuse_impossible_rotation(source)
            n_layers = n_layers_of(source)
            self.memory = predict(source, n_layers, [(0, n_layers)], settings)
            refuse_what_does_not_fit(self.memory, path.name, available_bytes())
            refuse_what_aborts(path)
            with mapping(self.memory.total_bytes + 2 * source.size_bytes):
                self._model = Model(
                    path,
                    use_mmap=settings.use_mmap,
                    use_mlock=settings.use_mlock,
                    n_gpu_layers=n_gpu_layers_of(source, n_layers, (0, n_layers), settings),
                )
        except CallError as error:
            raise CallError(error.kind, f"draft model: {error.message}", "draft_path") from None
        try:
            self._refuse_other_vocabulary(path, Vocabulary(self._model, source), vocabulary)
            self.context = Context(
                self._model,
                ContextSettings(
                    n_ctx=settings.n_ctx,
                    n_slots=settings.n_slots,
                    n_threads=settings.n_threads,
                    threads=settings.threads,
                    kv_type=settings.kv_type,
                    flash_attention=settings.flash_attention,
                    n_outputs_max=settings.n_slots,
                ),
            )
            self.context.fill_in()
        except CallError:
            self._model.close()
            raise

    def _refuse_other_vocabulary(self, path: Path, ours: Vocabulary, theirs: Vocabulary) -> None:
        if self._model.is_recurrent or not self._model.has_decoder or self._model.has_encoder:
            raise CallError("bad_model", f"draft model: {path.name} cannot take back a token", "draft_path")
        n = theirs.n_vocab
        same = ours.n_vocab == n and all(
            ours.full_piece(token) == theirs.full_piece(token)
            for token in range(0, n, max(1, n // N_COMPARED))
        )
        if not same:
            raise CallError(
                "bad_model",
                f"draft model: {path.name} ({ours.n_vocab} tokens) and the model ({n}) have other tokens",
                "draft_path",
            )

    def close(self) -> None:
        self.context.close()
        self._model.close()


class ModelDrafter:
    """Drafts for one request: knows what its slot in the draft model's cache holds, and guesses from
    there."""

    is_free = False

    def __init__(self, model: DraftModel, slot: int, n_tokens_max: int) -> None:
        self._model = model
        self._context = model.context
        self._slot = slot
        self._n_tokens_max = n_tokens_max
        self._known = np.empty(0, np.int32)
        self._context.truncate(slot, 0)

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        n = min(worth(KIND, self._catching_up_s(history)), self._n_tokens_max)
        if n < 1:
            return None
        try:
            once_s = self._catch_up(history)
            tokens = [self._likeliest(history[-1])]
            while len(tokens) < n:
                tokens.append(self._likeliest(tokens[-1]))
        except (
            CallError
        ):  # no cells are free, or its state is not finite: the request goes on without guesses
            self.close()
            return None
        return Draft(tuple(tokens), KIND, once_s)

    def _catching_up_s(self, history: np.ndarray) -> float:
        """What `_catch_up` would take, where that is more than a step's work."""
        n_missing = len(history) - len(self._known)
        return n_missing * self._model.token_s if n_missing > 2 * ROWS_MAX else 0.0

    def _catch_up(self, history: np.ndarray) -> float:
        """Hold all of `history` but its last token. Seconds, where that was more than a step's work."""
        started = time.perf_counter()
        n = min(len(self._known), len(history) - 1)
        other = np.flatnonzero(self._known[:n] != history[:n])
        n_same = int(other[0]) if len(other) else n
        self._context.truncate(self._slot, n_same)
        self._known = history[:n_same].copy()
        for at in range(n_same, len(history) - 1, N_BATCH):
            self._run(history[at : min(at + N_BATCH, len(history) - 1)], wants_logits=False)
        n_missing, seconds = len(history) - n_same, time.perf_counter() - started
        if n_missing <= 2 * ROWS_MAX:
            return 0.0
        self._model.token_s = seconds / n_missing
        return seconds

    def _likeliest(self, token: int) -> int:
        self._run(np.array([token], np.int32), wants_logits=True)
        return int(self._context.logits(0).argmax())

    def _run(self, tokens: np.ndarray, *, wants_logits: bool) -> None:
        at = len(self._known)
        self._context.decode(tokens, np.arange(at, at + len(tokens)), self._slot, wants_logits)
        self._known = np.concatenate([self._known, tokens])

    def close(self) -> None:
        self._context.truncate(self._slot, 0)
        self._known = np.empty(0, np.int32)
