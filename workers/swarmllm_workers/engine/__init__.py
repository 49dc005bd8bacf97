"""Segments on libllama: cutting, loading, running, memory, and the kernels that stand before ggml's."""
