"""Classes of kernels: what makes them unlike, and that the same worker always says the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_workers.engine import kernel_class
from swarmllm_workers.engine.kernel_class import name_of

from .test_batching import OpenRoom, Room, open_room  # noqa: F401

# ruff: noqa: F811 (fixtures are imported)

HASWELL = ("AVX", "AVX2", "F16C", "FMA", "LLAMAFILE", "OPENMP", "REPACK", "SSE3", "SSSE3")
ICELAKE = (*HASWELL, "AVX512", "AVX512_VBMI", "AVX512_VNNI")
ZEN4 = (*ICELAKE, "AVX512_BF16")
X64 = ("LLAMAFILE", "OPENMP")


def named(features: tuple[str, ...], release: str = "0.3.36", **other: object) -> str:
    said = {"kv_type": "f16", "has_bf16": False, "others": (True, "sample")} | other
    return name_of(release, features, **said)  # type: ignore[arg-type]


def test_processors_whose_sums_have_another_order_are_unlike() -> None:
    names = [named(each) for each in (X64, HASWELL, ICELAKE)]
    assert [name.split("-")[1] for name in names] == ["plain", "avx2", "avx512"]
    assert len(set(names)) == 3
    assert named(ZEN4) == named(ICELAKE)
    assert named(ZEN4, has_bf16=True) != named(ICELAKE, has_bf16=True)
    assert named(HASWELL[::-1]) == named(HASWELL)
    assert named((*HASWELL, "OPENMP")) == named(tuple(each for each in HASWELL if each != "OPENMP"))


@pytest.mark.parametrize(
    "other",
    [{"release": "0.3.37"}, {"kv_type": "q8_0"}, {"others": (False, "sample")}, {"others": (True, "other")}],
)
def test_whatever_else_counts_makes_another_name(other: dict[str, object]) -> None:
    assert named(HASWELL, **other) != named(HASWELL)  # type: ignore[arg-type]
    assert len(named(HASWELL, **other)) <= 64  # type: ignore[arg-type]


def test_another_process_computes_the_same_sample() -> None:
    code = "from swarmllm_workers.engine import kernel_class; print(kernel_class._sample())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == kernel_class._sample()
    assert len(said.stdout.strip()) == 32


def told(room: Room) -> str:
    loaded = [message for message, _ in room.sent if isinstance(message, ipc.Loaded)]
    return loaded[-1].kernel_class or ""


def test_a_worker_says_the_same_of_every_part_and_another_of_other_settings(open_room: OpenRoom) -> None:
    whole = told(open_room(GUIDE_PATH, (0, 12), n_ctx=512))
    assert told(open_room(GUIDE_PATH, (4, 8), n_ctx=256, n_threads=2)) == whole
    quantised = told(open_room(GUIDE_PATH, (0, 12), n_ctx=512, kv_type="q8_0", flash_attention="auto"))
    assert "-f16-" in whole
    assert "-q8_0-" in quantised
