"""Prints where a file may be cut by the table and by trying, as JSON. A program of its own, because libllama
may end the process."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import swarmllm_workers  # noqa: F401  (before libllama: small_batches.py)
from swarmllm_proto.architectures import ARCHITECTURES, cut_rule
from swarmllm_workers.engine.cut_check import check_cuts
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment_file import n_layers_of
from swarmllm_workers.gguf_file import open_source


def main(path: Path) -> None:
    source = open_source(path)
    architecture = source.text("general.architecture")
    rule = cut_rule(architecture, n_layers_of(source), source.number, source.numbers)
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineSettings(n_ctx=512, n_slots=2, n_threads=1)
        verdict = check_cuts(path, Path(folder), settings, lambda done_bytes, total_bytes: None)
    is_listed = architecture in ARCHITECTURES
    print(json.dumps({"listed": is_listed, "table": rule.cut_alignment, "tried": verdict.unit}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
