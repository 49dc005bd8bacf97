"""Settings of a model's memory: each combination answers, and what does not go together is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmllm.guide import GUIDE_PATH
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm_proto import ipc

from .test_batching import OpenRoom, Room, open_room  # noqa: F401

# ruff: noqa: F811 (fixtures are imported)

QUESTION = "What is a pipeline?"


def answer(room: Room) -> str:
    engine = room.handlers.state.engine()
    text = engine.template().render([{"role": "user", "content": QUESTION}], None)
    room.generate(engine.vocabulary.tokenize(text, is_rendered=True), "r", ipc.Sampling(temperature=0.0))
    room.run()
    assert not room.errors()
    return b"".join(payload for message, payload in room.sent if isinstance(message, ipc.Token)).decode()


@pytest.fixture(scope="module")
def usual() -> list[str]:
    """The answer with the defaults, once there is one."""
    return []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_mmap": False},
        {"use_mlock": True},
        {"use_mmap": False, "use_mlock": True},
        {"flash_attention": "on"},
        {"flash_attention": "auto"},
        {"kv_type": "q8_0", "flash_attention": "on"},
        {"kv_type": "q8_0", "flash_attention": "auto", "ngram_max_size": 4},
    ],
    ids=str,
)
def test_bundled_model_answers_alike_however_its_memory_is_kept(
    open_room: OpenRoom, usual: list[str], settings: dict[str, Any]
) -> None:
    """Rounding differs with flash attention and with q8_0; its answers are firm enough for both."""
    text = answer(open_room(GUIDE_PATH, (0, 12), n_ctx=512, **settings))
    usual.append(text)
    assert text == usual[0]
    assert "pipeline" in text


def test_values_in_q8_0_need_flash_attention(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, kv_type="q8_0")
    error = room.sent[-1][0]
    assert isinstance(error, ipc.Error)
    assert (error.kind, error.field) == ("bad_message", "kv_type")


def test_draft_model_is_the_one_named_or_the_one_beside(tmp_path: Path) -> None:
    model = ModelFile("0" * 64, tmp_path / "m.gguf")
    beside = tmp_path / "m-draft.gguf"
    named = tmp_path / "other.gguf"
    uses = WorkerSettings(tmp_path, uses_draft_model=True)
    assert uses.draft_of(model) == ""
    beside.touch()
    assert uses.draft_of(model) == str(beside)
    assert WorkerSettings(tmp_path, uses_draft_model=True, draft_model=named).draft_of(model) == str(named)
    assert WorkerSettings(tmp_path, draft_model=named).draft_of(model) == ""
