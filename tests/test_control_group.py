"""A node in a container, or in a service with limits, counts what is its own."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from swarmllm import control_group, memory_info, operating_system
from swarmllm.control_group import MemoryLimit


def write_all(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "100000 50000\n",
            },
            2.0,
        ),
        (
            {"proc/self/cgroup": "0::/docker/outside\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"},
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"}, math.inf),
        ({"proc/self/cgroup": "nonsense\n0::/\n", "sys/fs/cgroup/cpu.max": "\n"}, math.inf),
    ],
    ids=["nobody says", "no limit", "own", "that around it", "container", "version 1", "0", "nonsense"],
)
def test_processors_are_the_least_of_all_groups(
    tmp_path: Path, files: dict[str, str], expected: float
) -> None:
    assert control_group.processors(write_all(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "90000\n",
                "sys/fs/cgroup/a/b/memory.current": "10000\n",
                "sys/fs/cgroup/a/memory.max": "100000\n",
                "sys/fs/cgroup/a/memory.current": "95000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 3000\nactive_file 2000\n",
            },
            MemoryLimit(90000, 10000),
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n2:memory:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "70000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "90000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 5\ninactive_file 9999999\n",
            },
            MemoryLimit(70000, 0),
        ),
    ],
    ids=["nobody says", "no limit", "version 2", "version 1 in a container, used up"],
)
def test_memory_is_the_least_of_all_groups(
    tmp_path: Path, files: dict[str, str], expected: MemoryLimit | None
) -> None:
    assert control_group.memory(write_all(tmp_path, files)) == expected


@pytest.mark.skipif(not operating_system.IS_LINUX, reason="control groups are Linux's")
@pytest.mark.parametrize(("quota", "expected"), [(0.3, 1), (1.9, 1), (math.inf, None), (10**6, None)])
def test_a_node_computes_with_whole_processors(
    monkeypatch: pytest.MonkeyPatch, quota: float, expected: int | None
) -> None:
    monkeypatch.setattr(control_group, "processors", lambda: quota)
    assert operating_system.n_cores() == (expected or len(os.sched_getaffinity(0)))


@pytest.mark.skipif(not operating_system.IS_LINUX, reason="control groups are Linux's")
def test_memory_that_the_machine_does_not_have_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_group, "memory", lambda: None)
    total_bytes, free_bytes = memory_info.memory_bytes()
    assert 0 < free_bytes <= total_bytes
    monkeypatch.setattr(control_group, "memory", lambda: MemoryLimit(2**60, 12345))
    assert memory_info.memory_bytes() == (total_bytes, 12345)
    monkeypatch.setattr(control_group, "memory", lambda: MemoryLimit(54321, 2**60))
    assert memory_info.memory_bytes()[0] == 54321
