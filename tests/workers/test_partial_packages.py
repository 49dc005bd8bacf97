"""A worker starts without the parts of `gguf` and `llama_cpp` that it does not use, and can have them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

UNUSED = (
    "yaml",
    "diskcache",
    "gguf.gguf_reader",
    "gguf.quants",
    "llama_cpp.llama",
    "llama_cpp.llama_chat_format",
)
SCRIPT = f"""
import sys
from importlib.metadata import version
import swarmllm_workers.server.loop
assert not [name for name in {UNUSED} if name in sys.modules]
from swarmllm_workers.kernels import small_batches
import gguf, llama_cpp
installed, _, _ = version("llama_cpp_python").partition("+")
assert llama_cpp.__version__ == installed, "read without running the package"
assert "llama_cpp.llama" not in sys.modules
functions = llama_cpp.llama_cpp
assert llama_cpp.Llama.__module__ == "llama_cpp.llama"
assert llama_cpp.llama_cpp is functions
assert llama_cpp.llama_decode is functions.llama_decode
assert gguf.GGUFReader.__module__ == "gguf.gguf_reader"
assert gguf.GGMLQuantizationType is small_batches.GGMLQuantizationType
from pathlib import Path
from swarmllm_workers.engine.libllama import CallError, Model
try:
    Model(Path("/nowhere/model.gguf"))
except CallError as error:
    assert "failed to open" in str(error), error  # what libllama said is not told to a log of llama_cpp's own
for package in gguf, llama_cpp:
    try:
        package.nothing_of_this_name
    except AttributeError as error:
        assert package.__name__ in str(error)
    else:
        raise AssertionError(package)
"""


def test_what_a_worker_does_not_use_is_imported_when_asked_for() -> None:
    subprocess.run([sys.executable, "-P", "-c", SCRIPT], check=True)
