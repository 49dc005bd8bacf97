"""Rows of embeddings that are answered at once fit a frame, however wide the model is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.limits import IPC_PAYLOAD_MAX
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.server.text_handlers import EMBED_ROWS_MAX, embed_rows_max


@given(st.integers(1, 65_536))
def test_the_largest_answer_fits_a_frame(n_embd: int) -> None:
    one_row = sum(len(piece) for piece in encode_tensor(np.zeros((1, n_embd), np.float32)))
    overhead = one_row - 4 * n_embd + 16
    n_max = embed_rows_max(n_embd)
    assert 1 <= n_max <= EMBED_ROWS_MAX
    assert overhead + n_max * 4 * n_embd <= IPC_PAYLOAD_MAX
