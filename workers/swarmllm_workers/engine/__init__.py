"""Segments on libllama: cutting, loading, running, memory."""
