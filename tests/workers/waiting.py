"""Decode with a grammar where nothing else is to be done meanwhile."""

from __future__ import annotations

import numpy as np

from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.decode.grammar import GrammarPending


def decode(decoding: Decoding, logits: np.ndarray, index: int) -> Decoded:
    """Wait for the grammar as long as it takes."""
    while True:
        try:
            return decoding.decode(logits, index)
        except GrammarPending:
            assert decoding.grammar is not None
            decoding.grammar.wait_for(0.05)
