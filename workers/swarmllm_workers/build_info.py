"""`python -m swarmllm_workers.build_info`: how libllama was built here, as one line of JSON, with
`shortcomings`: what a worker does without here, a sentence each.

For `swarmllm doctor`, which runs it as a process of its own: libllama is loaded nowhere else than in workers.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import llama_cpp
from llama_cpp import llama_cpp as lib

from swarmllm_workers.engine import runtime_check
from swarmllm_workers.engine.gpus import gpus
from swarmllm_workers.kernels import cpu_variants


def build_info() -> dict[str, object]:
    """How libllama was built here. `features`: the names of the processor features that libllama says it
    uses. `cpu_variant`: of a portable build, the one that ggml chose for this processor; "" of another."""
    cpu_variants.load()
    described = lib.llama_print_system_info().decode("utf-8", "replace")
    features = dict(re.findall(r"(\w+) = (\d+)", described))
    return {
        "version": llama_cpp.__version__,
        "features": sorted(name for name, value in features.items() if value != "0"),
        "cpu_variant": cpu_variants.in_use(),
        "gpu": bool(lib.llama_supports_gpu_offload()),
        "gpus": [asdict(gpu) for gpu in gpus()],
        "mmap": bool(lib.llama_supports_mmap()),
    }


if __name__ == "__main__":
    print(json.dumps({**build_info(), "shortcomings": runtime_check.shortcomings()}))
