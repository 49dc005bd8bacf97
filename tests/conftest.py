"""What every test may count on, however the test run itself was started."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

import swarmllm_workers  # noqa: F401  (before any test loads libllama: small_batches.py)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background of a script ignores Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and as long for each as the machine takes: to run, and to think of.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
