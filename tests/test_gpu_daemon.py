"""A daemon whose libllama sees a GPU says so everywhere, puts layers there, and works beside one without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S

from swarmllm.workerpool.gpus import has_gpu_backend

if not has_gpu_backend() and "SWARMLLM_TEST_GPU" not in os.environ:
    pytest.skip("libllama was built without a GPU", allow_module_level=True)


def stats(node: DaemonProcess) -> dict[str, Any]:
    return dict(node.http.get("/api/admin/stats").json())


def answer(node: DaemonProcess) -> str:
    body = {"model": "guide", "messages": [{"role": "user", "content": "What is a pipeline?"}]}
    told = node.http.post("/v1/chat/completions", json=body | {"max_tokens": 16, "temperature": 0})
    assert told.status_code == 200, told.text
    return str(told.json()["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_a_pipeline_over_a_gpu_and_a_processor_answers_as_a_processor_does(tmp_path: Path) -> None:
    here = {"resources": {"n_gpu_layers": 0}}
    with (
        running_daemon(tmp_path, "whole", load=["guide"], **here) as whole,
        running_daemon(tmp_path, "gpu", load=["guide:0:6"]) as gpu,
        running_daemon(tmp_path, "cpu", load=["guide:6:12"], bootstrap=gpu.addresses, **here) as cpu,
    ):
        wait_for(lambda: stats(gpu)["gpus"], DEADLINE_S, "the GPU to be seen")
        (worker,) = (each for each in stats(gpu)["workers"] if each["pid"])
        assert worker["n_gpu_layers"] == 7
        assert not any(each["n_gpu_layers"] for each in stats(cpu)["workers"])
        wait_for(
            lambda: gpu.http.get("/api/admin/plan?model=guide").status_code == 200, DEADLINE_S, "a pipeline"
        )
        assert answer(gpu) == answer(whole)
        told = [each["gpus"] for each in cpu.http.get("/api/admin/peers").json()["peers"]]
        assert [gpu["total_bytes"] > 0 for (gpu,) in told] == [True]
