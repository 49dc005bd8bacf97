"""The model worker: one process, one model, any of its layer ranges, on libllama.

Runs as `swarmllm-worker --socket PATH` under the daemon and speaks `swarmllm_proto.ipc`. It knows nothing
of swarms; libllama lives in this package and nowhere else, so a hostile GGUF or a native crash costs one
process.
"""

from swarmllm_workers import partial_packages

partial_packages.import_modules_alone()

from swarmllm_workers.kernels import amx, memory_calls, row_attention, small_batches  # noqa: E402  (one of them needs `gguf`)

__version__ = "0.1.0"

# Nothing of this package can have loaded libllama yet.
amx.install()
small_batches.install()
row_attention.install()
memory_calls.install()
