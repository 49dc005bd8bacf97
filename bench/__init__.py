"""Benchmarks: every figure is a ratio against a rival in the same run. See docs/benchmarks.md."""
