"""Values that samples of several families of messages show, accents and limits included."""

from __future__ import annotations

import numpy as np

from swarmllm_proto import ipc, swarm
from swarmllm_proto.tensors import Tensor

REQUEST_ID = "9f3c0a7e5b1d4c28"
MODEL_ID = "0123456789abcdef" * 4
NODE_A = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
NODE_B = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"

HIDDEN: Tensor = np.array([[0.0, 1.0, -2.5], [0.15625, 65504.0, -0.0]], np.float32)
TOKEN_IDS: Tensor = np.array([1, 15043, 29892, 2**31 - 1], np.int32)
SAMPLING = ipc.Sampling(
    max_tokens=64,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repeat_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    seed=42,
    stop=("\n\n", "<|im_end|>"),
    ignore_eos=True,
    typical_p=0.95,
    xtc_probability=0.5,
    xtc_threshold=0.2,
    dry_multiplier=0.8,
    dry_base=2.0,
    dry_allowed_length=3,
    mirostat=2,
    mirostat_tau=4.0,
    mirostat_eta=0.05,
    logit_bias=((5, -1.5), (2**31 - 1, 1000.0)),
    grammar='root ::= "ü"',
    json_schema='{"type":"object"}',
    json_before="<call>",
    json_after="</call>",
    json_max=3,
    logprobs=True,
    top_logprobs=1,
)
RUNS = (
    swarm.PictureRun(first_row=4, n_rows=12, grid_width=4),
    swarm.PictureRun(first_row=20, n_rows=2, is_causal=False),
)
EXACT = ipc.Sampling(exact=True)
FINGERPRINTED = ipc.Sampling(temperature=0.5, seed=7, fingerprint_key=2**32 - 1)
SHORT_MEMORY = ipc.Sampling(repeat_penalty=1.1, repeat_last_n=64)
LOGPROBS = (
    ipc.TokenLogprob(token=15043, logprob=-1.5, piece="世".encode()[:2]),
    ipc.TokenLogprob(token=2, logprob=-9999.0, piece=b"<|im_end|>"),
)
TIMINGS = (
    swarm.StageTiming(stage=0, compute_s=0.0015, busy_s=0.002),
    swarm.StageTiming(stage=1, compute_s=0.0, busy_s=1.0),
)


def demo_signature(content: bytes) -> bytes:
    return (b"signature of %d bytes" % len(content)).ljust(64, b".")
