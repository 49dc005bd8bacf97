"""What workers of this test process measured of the machine, in one file: else each of them measures it anew,
for some tenths of a second of processor time."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

_folder = Path(tempfile.mkdtemp(prefix="swarmllm-tests-"))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
KERNEL_TIMINGS = _folder / "kernel_timings.json"
