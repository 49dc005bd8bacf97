from __future__ import annotations

import pytest

from swarmllm_proto.errors import without_folders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "/tmp/pip-install-x/llama-cpp_1a/vendor/llama.cpp/ggml/src/ggml.c:12: GGML_ASSERT(a/b) failed",
            "ggml.c:12: GGML_ASSERT(a/b) failed",
        ),
        ("abort at (/build/src/llama-model.cpp:2807) now", "abort at (llama-model.cpp:2807) now"),
        (
            'File "/usr/lib/python3.11/site-packages/swarmllm_workers/server.py", line 3',
            'File "server.py", line 3',
        ),
        ("llama-model.cpp:2807: no folder", "llama-model.cpp:2807: no folder"),
        ("the file /models/a.gguf cannot be loaded", "the file /models/a.gguf cannot be loaded"),
        ("1/2 of it, and/or more.", "1/2 of it, and/or more."),
    ],
)
def test_source_files_lose_their_folders_and_other_paths_stay(text: str, expected: str) -> None:
    assert without_folders(text) == expected
