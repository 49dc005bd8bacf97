"""The giving end: what it refuses, and how it keeps to its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from gguf_parts import tensors, write_gguf

from swarmllm.models import Catalogue, CatalogueEntry
from swarmllm.transfer.settings import TransferSettings
from swarmllm.transfer.uploads import REMEMBER_S, REMEMBERED_MODELS, Uploads
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm import FetchPiece


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "catalogue.sqlite")


@pytest.fixture
def entry(catalogue: Catalogue, tmp_path: Path) -> CatalogueEntry:
    return catalogue.add(write_gguf(tmp_path / "model.gguf"), "tiny")


def tensor_request(entry: CatalogueEntry, name: str, offset: int = 0, size_bytes: int = 32) -> FetchPiece:
    return FetchPiece(
        model_id=entry.model_id, part="tensor", tensor=name, offset=offset, size_bytes=size_bytes
    )


async def test_bytes_beyond_a_tensor_are_never_given(catalogue: Catalogue, entry: CatalogueEntry) -> None:
    uploads = Uploads(catalogue, TransferSettings())
    (tensor,) = (t for t in entry.manifest.tensors if t.name == "output.weight")
    data = entry.path.read_bytes()[tensor.offset : tensor.offset + 32]
    for offset, size_bytes in ((0, 32), (0, PIECE_MAX), (8, 8), (31, 5), (32, 1), (2**63 - 1, 1)):
        piece = await uploads.answer(tensor_request(entry, "output.weight", offset, size_bytes))
        assert piece.data == data[offset : offset + size_bytes]
        assert piece.status == "ok"


async def test_what_is_not_known_is_absent(catalogue: Catalogue, entry: CatalogueEntry) -> None:
    uploads = Uploads(catalogue, TransferSettings())
    stranger = FetchPiece(model_id="ab" * 32, part="header", size_bytes=10)
    assert (await uploads.answer(stranger)).status == "absent"
    assert (await uploads.answer(tensor_request(entry, "blk.9.attn_q.weight"))).status == "absent"
    assert (await uploads.answer(tensor_request(entry, "../../etc/passwd"))).status == "absent"


async def test_settings_that_change_count_from_the_next_question_on(
    catalogue: Catalogue, entry: CatalogueEntry
) -> None:
    uploads = Uploads(catalogue, TransferSettings())
    question = tensor_request(entry, entry.manifest.tensors[0].name)
    assert (await uploads.answer(question)).status == "ok"
    uploads.configure(TransferSettings(share=False))
    assert (await uploads.answer(question)).status != "ok"
    uploads.configure(TransferSettings())
    assert (await uploads.answer(question)).status == "ok"


async def test_a_file_that_has_changed_is_not_given(catalogue: Catalogue, entry: CatalogueEntry) -> None:
    uploads = Uploads(catalogue, TransferSettings())
    assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "ok"
    entry.path.write_bytes(entry.path.read_bytes() + b"x")
    assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "absent"
    entry.path.unlink()
    assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "absent"


async def test_who_would_wait_too_long_for_bandwidth_is_put_off(
    catalogue: Catalogue, entry: CatalogueEntry
) -> None:
    uploads = Uploads(catalogue, TransferSettings(upload_bytes_s=1.0, upload_wait_s=10.0))
    assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "ok"
    assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "busy"
    assert uploads.n_bytes == 32


async def test_bandwidth_is_given_in_turn(catalogue: Catalogue, entry: CatalogueEntry) -> None:
    uploads = Uploads(catalogue, TransferSettings(upload_bytes_s=320.0))
    since_s = trio.current_time()
    for _ in range(4):
        assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "ok"
    assert trio.current_time() - since_s >= 3 * 32 / 320.0


async def test_a_long_queue_puts_off_whoever_comes_last(catalogue: Catalogue, entry: CatalogueEntry) -> None:
    slow = TransferSettings(upload_bytes_s=1.0, upload_wait_s=1000.0, max_waiting_uploads=2)
    uploads = Uploads(catalogue, slow)
    assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "ok"
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(uploads.answer, tensor_request(entry, "output.weight"))
        await trio.testing.wait_all_tasks_blocked()
        assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "busy"
        nursery.cancel_scope.cancel()


async def test_only_bytes_that_are_given_use_up_the_bandwidth(
    catalogue: Catalogue, entry: CatalogueEntry, autojump_clock: trio.testing.MockClock
) -> None:
    uploads = Uploads(catalogue, TransferSettings(upload_bytes_s=PIECE_MAX))
    began_s = trio.current_time()
    for tensor in list(entry.manifest.tensors)[:5]:
        request = FetchPiece(
            model_id=entry.model_id, part="chunks", tensor=tensor.name, offset=0, size_bytes=PIECE_MAX
        )
        assert (await uploads.answer(request)).status == "ok"
    assert (await uploads.answer(tensor_request(entry, "none", 0, PIECE_MAX))).status == "absent"
    assert trio.current_time() - began_s < 1.0


class CountedCatalogue(Catalogue):
    """Notes which models are read from it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[str] = []

    def get(self, *model: Any, **more: Any) -> CatalogueEntry:
        self.read.append(model[0])
        return super().get(*model, **more)


async def test_a_model_is_read_again_after_a_while_or_once_it_is_forgotten(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    counted = CountedCatalogue(tmp_path / "counted.sqlite")
    entry = counted.add(write_gguf(tmp_path / "model.gguf"), "tiny")
    uploads = Uploads(counted, TransferSettings())

    async def n_reads() -> int:
        counted.read.clear()
        for _ in range(2):
            assert (await uploads.answer(tensor_request(entry, "output.weight"))).status == "ok"
        return len(counted.read)

    assert await n_reads() == 1
    mock_clock.jump(REMEMBER_S)
    assert await n_reads() == 0
    mock_clock.jump(REMEMBER_S / 100)
    assert await n_reads() == 1
    uploads.forget(entry.model_id)
    assert await n_reads() == 1
    uploads.forget(ModelId("ab" * 32))


async def test_so_many_models_are_remembered_and_the_oldest_one_makes_room(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    counted = CountedCatalogue(tmp_path / "counted.sqlite")
    entries = []
    for i in range(REMEMBERED_MODELS + 1):
        data = tensors() | {"output.weight": bytes([i]) * 32}
        entries.append(counted.add(write_gguf(tmp_path / f"model{i}.gguf", data=data), f"model{i}"))
    assert len({entry.model_id for entry in entries}) == len(entries)
    uploads = Uploads(counted, TransferSettings())
    for i, entry in enumerate(entries):
        assert (await uploads.answer(tensor_request(entry, "output.weight"))).data == bytes([i]) * 32
    counted.read.clear()
    for entry in entries[1:]:
        await uploads.answer(tensor_request(entry, "output.weight"))
    assert counted.read == []
    await uploads.answer(tensor_request(entries[0], "output.weight"))
    assert counted.read == [entries[0].model_id]
