"""What every test may count on, however the test run itself was started."""

from __future__ import annotations

import signal

import swarmllm_workers  # noqa: F401  (before any test loads libllama: small_batches.py)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background of a script ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
