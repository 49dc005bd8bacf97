"""Two real daemons with half of the guide each, the first of which has a random projector for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from vision_models import projector

from swarmllm.guide import GUIDE_PATH

INFERENCE = {"n_threads": 1, "n_slots": 2, "n_ctx": 1024}


@contextmanager
def seeing_daemons(folder: Path) -> Iterator[DaemonProcess]:
    """The first one, once it knows holders of all layers."""
    mmproj = projector(folder / "mmproj.gguf", "janus_pro", 256)
    with (
        running_daemon(folder, "a", load=["guide:0:6"], inference=INFERENCE) as a,
        running_daemon(folder, "b", load=["guide:6:12"], inference=INFERENCE, bootstrap=a.addresses),
    ):
        body = {"path": str(GUIDE_PATH), "name": "guide", "mmproj": str(mmproj)}
        lines = a.http.post("/api/admin/models", json=body).text.splitlines()
        assert json.loads(lines[-1])["model"]["projector"]["path"] == str(mmproj)
        ready = "/health/ready?model=guide"
        wait_for(lambda: a.http.get(ready).status_code == 200, DEADLINE_S, "both halves of the guide")
        yield a
