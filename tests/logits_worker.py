"""A worker that writes the logits of each token that it samples to a file, as f32 [n, n_vocab], and drops
what it keeps of prompts when another file has changed: `python logits_worker.py FILE FORGET`, and a worker's
own arguments behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from swarmllm_workers.__main__ import main


def write_logits_to(path: Path) -> None:
    from swarmllm_workers.decode.decoding import Decoded, Decoding

    decode = Decoding.decode

    def and_write(self: Decoding, logits: np.ndarray, index: int) -> Decoded:
        with path.open("ab") as file:
            file.write(logits.astype(np.float32).tobytes())
        return decode(self, logits, index)

    Decoding.decode = and_write  # type: ignore[method-assign]


def forget_when_changed(path: Path) -> None:
    """Rows of a prompt that others lie beside in the cells are summed in another order than in an empty
    context."""
    from swarmllm_workers.cache.prefix_cache import PrefixCache

    reuse: Callable[..., int] = PrefixCache.reuse
    seen = path.read_text()

    def after_a_look(self: PrefixCache, *args: Any, **options: Any) -> int:
        nonlocal seen
        if (now := path.read_text()) != seen:
            seen = now
            self.clear()
        return reuse(self, *args, **options)

    PrefixCache.reuse = after_a_look  # type: ignore[method-assign]


if __name__ == "__main__":
    written, forget = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
    if not {"--pictures", "--texts"} & set(sys.argv):
        write_logits_to(written)
        forget_when_changed(forget)
    main()
