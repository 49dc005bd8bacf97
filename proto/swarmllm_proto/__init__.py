"""The wire contract: frames, messages, tensors and block hashes (the specification is `proto/wire.md`).

The only package that daemon and worker both import. Bytes in, messages out: nothing here waits, opens a
socket or reads a clock, so every decoder can be driven one byte at a time by a test and by any event loop by
the product. Import from the submodules; this file stays empty so that the worker pays for nothing it does not
use.
"""
