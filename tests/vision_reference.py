"""Answers prompts with pictures in one process, with libmtmd and libllama on the uncut model: what pipelines
are compared with. A program that reads questions (JSON) from its input, because in a process that runs tests
the way in which products are computed may have been changed; here it is that of a new worker."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np

import swarmllm_workers  # noqa: F401  (before libllama is loaded: small_batches.py)
from swarmllm_workers.engine.libllama import engine_version
from swarmllm_workers.kernels import repacking, row_attention

from llama_cpp import llama_cpp as lib  # isort: skip
from llama_cpp import mtmd_cpp as mtmd  # isort: skip

FLASH_ATTENTION = {"off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED, "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO}


def answer(
    model_path: str,
    projector_path: str,
    prompt: str,
    given: str,
    found: str,
    n_tokens: int,
    n_batch: int,
    n_threads: int = 1,
    flash_attention: str = "off",
    n_ctx: int = 1024,
) -> None:
    """`given`: the pictures, and files of sounds, `found`: tokens and logits, as .npz."""
    assert engine_version(), "imported, and so its products are a worker's"
    loading = lib.llama_model_default_params()
    loading.use_extra_bufts = not repacking.keeps_rows([Path(model_path)])
    model = lib.llama_model_load_from_file(model_path.encode(), loading)
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, 512, 512, 1
    params.n_threads = params.n_threads_batch = n_threads
    params.flash_attn_type = FLASH_ATTENTION[row_attention.chosen(flash_attention, "f16")]
    params.swa_full = True
    context = lib.llama_init_from_model(model, params)
    settings = mtmd.mtmd_context_params_default()
    settings.use_gpu, settings.n_threads = False, n_threads
    settings.print_timings, settings.warmup = False, False
    encoder = mtmd.mtmd_init_from_file(projector_path.encode(), model, settings)
    bitmaps = []
    with np.load(given) as images:
        for image in (np.ascontiguousarray(images[name]) for name in images.files):
            data = image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            if image.ndim == 1:
                bitmaps.append(mtmd.mtmd_helper_bitmap_init_from_buf(encoder, data, len(image), False))
            else:
                bitmaps.append(mtmd.mtmd_bitmap_init(image.shape[1], image.shape[0], data))
    chunks, text = mtmd.mtmd_input_chunks_init(), mtmd.mtmd_input_text()
    raw = prompt.encode()
    text.text, text.text_len, text.add_special, text.parse_special = raw, len(raw), True, True
    array = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
    assert mtmd.mtmd_tokenize(encoder, chunks, ctypes.byref(text), array, len(bitmaps)) == 0
    n_past = lib.llama_pos(0)
    evaluated = mtmd.mtmd_helper_eval_chunks(
        encoder, context, chunks, 0, 0, n_batch, True, ctypes.byref(n_past)
    )
    assert evaluated == 0
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    tokens, rows = [], []
    batch = lib.llama_batch_init(1, 0, 1)
    for position in range(n_past.value, n_past.value + n_tokens):
        rows.append(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (n_vocab,)).copy())
        tokens.append(int(rows[-1].argmax()))
        batch.n_tokens, batch.token[0], batch.pos[0] = 1, tokens[-1], position
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
        assert lib.llama_decode(context, batch) == 0
    mtmd.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    mtmd.mtmd_free(encoder)
    lib.llama_free(context)
    lib.llama_model_free(model)
    np.savez(found, tokens=tokens, logits=rows, n_prompt=n_past.value)


if __name__ == "__main__":
    for question in json.load(sys.stdin):
        answer(**question)
