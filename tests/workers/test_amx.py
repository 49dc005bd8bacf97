"""ggml is kept from the processor's matrix unit. What it was compiled for decides how much shows."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from swarmllm_workers.engine import libllama  # noqa: F401  (loads ggml)
from swarmllm_workers.kernels import amx, interposing, repacking

from .conftest import MakeModel
from .factory import Spec

FUNCTION = "_Z28ggml_backend_amx_buffer_typev"
"""ggml's, as a compiler of C++ calls it."""
built = pytest.mark.skipif(interposing.find_library("amx") is None, reason="not built here")


@pytest.fixture
def rearranged(make_model: MakeModel) -> Path:
    return make_model(Spec("llama", n_layers=1, n_embd=256, n_ff=512, head_size=64, types=(Type.Q2_K,)))


def run(lines: str) -> object:
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, timeout=120, check=True)
    return json.loads(done.stdout)


@built
def test_ggml_rearranges_nothing_for_it_in_a_worker() -> None:
    assert not amx.is_used()


@built
def test_our_function_answers_under_the_name_that_ggml_asks_for() -> None:
    library = ctypes.CDLL(str(interposing.find_library("amx")))
    function = library[FUNCTION]
    function.restype = ctypes.c_void_p
    assert function() is None
    for ggml in interposing.mapped_libraries("libggml-cpu"):
        # A build for AMX that calls it otherwise would not be kept from it.
        is_compiled_for_it = bool(getattr(ggml, "ggml_cpu_has_amx_int8", int)())
        assert not is_compiled_for_it or hasattr(ggml, FUNCTION)


def test_where_ggml_cannot_be_kept_from_it_a_file_stays_in_its_order(rearranged: Path) -> None:
    """A libllama that was there before the worker's package asks nobody."""
    told = run(
        "import json; from pathlib import Path; import llama_cpp; "
        "from swarmllm_workers.kernels import amx, repacking; "
        f"print(json.dumps([amx.is_used(), repacking.keeps_rows([Path({str(rearranged)!r})])]))"
    )
    assert told in ([True, True], [False, False])


def test_a_file_stays_in_its_order_if_ggml_uses_it(rearranged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not repacking.keeps_rows([rearranged])
    monkeypatch.setattr(amx, "is_used", lambda: True)
    assert repacking.keeps_rows([rearranged])
    assert not repacking.rearranges([rearranged])
