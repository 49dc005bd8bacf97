"""Measure the guide and its projector on held-out pictures: `python -m tests.guide.measure_pictures`.

What is measured are the two files that are shipped, through libmtmd and libllama in one process, with greedy
decoding. Pictures and questions are held out: what is on them was on no picture of the training, and no
question has the wording of one. An answer is right only when it is the whole caption. `--split validation`
shows other pictures, which were on none of the training either, with questions in its words: recipes are
chosen by those.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import swarmllm_workers  # noqa: F401  (before libllama is loaded: small_batches.py)
from swarmllm.guide import GUIDE_PATH, PROJECTOR_PATH
from swarmllm.guide.template import ANSWER_PREFIX, IM_END, IM_START
from swarmllm.guide.vision.captions import caption
from swarmllm.guide.vision.drawing import draw
from swarmllm.guide.vision.questions import ask_about
from swarmllm.guide.vision.scenes import KINDS, Split, scene

from llama_cpp import llama_cpp as lib  # isort: skip
from llama_cpp import mtmd_cpp as mtmd  # isort: skip

MAX_ANSWER_TOKENS = 32
N_BATCH = 512


class Looker:
    """A model and its projector in one process."""

    def __init__(self, model: Path = GUIDE_PATH, projector: Path = PROJECTOR_PATH) -> None:
        self._model = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = 1
        self._context = lib.llama_init_from_model(self._model, params)
        settings = mtmd.mtmd_context_params_default()
        settings.use_gpu, settings.n_threads = False, 1
        settings.print_timings, settings.warmup = False, False
        self._encoder = mtmd.mtmd_init_from_file(str(projector).encode(), self._model, settings)
        assert self._encoder, projector
        vocab = lib.llama_model_get_vocab(self._model)
        self._vocab, self._n_vocab = vocab, lib.llama_vocab_n_tokens(vocab)
        self._batch = lib.llama_batch_init(1, 0, 1)

    def answer(self, pixels: np.ndarray, question: str) -> str:
        """`pixels`: u8 [height, width, 3]."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        n_past = self._read(pixels, f"{IM_START}user\n<__media__>{question}{IM_END}\n{ANSWER_PREFIX}")
        said = b""
        for position in range(n_past, n_past + MAX_ANSWER_TOKENS):
            logits = lib.llama_get_logits_ith(self._context, -1)
            token = int(np.ctypeslib.as_array(logits, (self._n_vocab,)).argmax())
            if lib.llama_vocab_is_eog(self._vocab, token):
                break
            piece = ctypes.create_string_buffer(64)
            n = lib.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, True)
            said += piece.raw[:n]
            batch = self._batch
            batch.n_tokens, batch.token[0], batch.pos[0] = 1, token, position
            batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
            assert lib.llama_decode(self._context, batch) == 0
        return said.decode("utf-8", "replace")

    def _read(self, pixels: np.ndarray, prompt: str) -> int:
        height, width, _ = pixels.shape
        data = np.ascontiguousarray(pixels).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(width, height, data)
        chunks, text = mtmd.mtmd_input_chunks_init(), mtmd.mtmd_input_text()
        raw = prompt.encode()
        text.text, text.text_len, text.add_special, text.parse_special = raw, len(raw), True, True
        array = (ctypes.c_void_p * 1)(bitmap)
        assert mtmd.mtmd_tokenize(self._encoder, chunks, ctypes.byref(text), array, 1) == 0
        n_past = lib.llama_pos(0)
        assert (
            mtmd.mtmd_helper_eval_chunks(
                self._encoder, self._context, chunks, 0, 0, N_BATCH, True, ctypes.byref(n_past)
            )
            == 0
        )
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        return int(n_past.value)

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        mtmd.mtmd_free(self._encoder)
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)


def measured(
    looker: Looker, n: int, seed: int, split: Split = "heldout", kinds: Sequence[str] = KINDS
) -> dict[str, list[tuple[str, str, str]]]:
    """For each kind (question, caption, answer) of `n` pictures of the split."""
    found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for kind in kinds:
        rng = random.Random(f"{seed} {kind}")
        for _ in range(n):
            shown = scene(kind, rng, split)
            question = ask_about(shown, rng, heldout=split == "heldout")
            pixels = np.asarray(draw(shown, rng))
            found[kind].append((question, caption(shown), looker.answer(pixels, question)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=GUIDE_PATH)
    parser.add_argument("--projector", type=Path, default=PROJECTOR_PATH)
    parser.add_argument("--split", choices=("heldout", "validation"), default="heldout")
    parser.add_argument("--pictures", type=int, default=400, help="of each kind")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--wrong", type=int, default=0, help="show this many wrong answers per kind")
    parser.add_argument("--json", type=Path, help="file for the shares")
    args = parser.parse_args()
    looker = Looker(args.model, args.projector)
    shares: dict[str, Any] = {}
    for kind, answers in measured(looker, args.pictures, args.seed, args.split).items():
        wrong = [each for each in answers if each[1] != each[2]]
        shares[kind] = 1 - len(wrong) / len(answers)
        n_captions = len({expected for _, expected, _ in answers})
        print(f"{kind:8} n {len(answers)}  captions {n_captions}  right {shares[kind]:.3f}", flush=True)
        for question, expected, answer in wrong[: args.wrong]:
            print(f"  {question}\n    expected: {expected}\n    answered: {answer}")
    looker.close()
    if args.json is not None:
        args.json.write_text(json.dumps(shares, indent=1) + "\n")


if __name__ == "__main__":
    main()
