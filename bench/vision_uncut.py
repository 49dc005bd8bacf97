"""Times the first token of prompts with a picture in one process, by libmtmd and libllama alone.

    python -m bench.vision_uncut MODEL.gguf MMPROJ.gguf THREADS

Reads the path of a picture from each line of its input, and answers with a line of JSON: the milliseconds and
the processor's, from the file to the first token.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from llama_cpp import mtmd_cpp as mtmd
from PIL import Image

PROMPT = "<__media__> What is in this picture?"
N_CTX, N_BATCH = 1024, 128


class Uncut:
    def __init__(self, model: Path, mmproj: Path, n_threads: int) -> None:
        self.model = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = N_CTX, n_threads, n_threads
        self.context = lib.llama_init_from_model(self.model, params)
        settings = mtmd.mtmd_context_params_default()
        settings.use_gpu, settings.n_threads, settings.print_timings = False, n_threads, False
        self.encoder = mtmd.mtmd_init_from_file(str(mmproj).encode(), self.model, settings)
        assert self.encoder, "libmtmd refuses the projector"

    def first_token_ms(self, path: Path) -> tuple[float, float]:
        """And of the processor."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        image = np.ascontiguousarray(Image.open(path).convert("RGB"))
        data = image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(image.shape[1], image.shape[0], data)
        text, chunks = mtmd.mtmd_input_text(), mtmd.mtmd_input_chunks_init()
        raw = PROMPT.encode()
        text.text, text.text_len, text.add_special, text.parse_special = raw, len(raw), True, True
        bitmaps = (ctypes.c_void_p * 1)(bitmap)
        assert mtmd.mtmd_tokenize(self.encoder, chunks, ctypes.byref(text), bitmaps, 1) == 0
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        n_past = lib.llama_pos(0)
        arguments: tuple[Any, ...] = (self.encoder, self.context, chunks, 0, 0, N_BATCH, True)
        assert mtmd.mtmd_helper_eval_chunks(*arguments, ctypes.byref(n_past)) == 0
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        int(np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, -1), (n_vocab,)).argmax())
        took_ms = (time.perf_counter() - start_s) * 1000, (time.process_time() - start_cpu_s) * 1000
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        return took_ms


def main() -> None:
    model, mmproj, n_threads = sys.argv[1:]
    uncut = Uncut(Path(model), Path(mmproj), int(n_threads))
    for line in sys.stdin:
        print(json.dumps(uncut.first_token_ms(Path(line.rstrip("\n")))), flush=True)


if __name__ == "__main__":
    main()
