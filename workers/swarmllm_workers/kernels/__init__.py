"""Kernels that stand before ggml's own: which there are, what they cost here, and which is chosen."""
