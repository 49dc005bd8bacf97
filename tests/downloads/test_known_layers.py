"""Only the layers that are needed, of a model that the swarm knows."""

from __future__ import annotations

from pathlib import Path

from download_stand import (
    GUIDE,
    GUIDE_DATA,
    Stand,
    guide,
    open_stand,
)
from faulty_server import FaultyServer, reset_in_the_middle, well

from swarmllm.downloads.digest_book import n_bytes
from swarmllm.models import LayerRange, needed_tensors
from swarmllm_proto.swarm import Outline


def outline() -> tuple[Outline, bytes]:
    tensors = guide().tensors
    header_bytes = min(tensor.offset for tensor in tensors)
    digests = {tensor.name: tensor.blake3 for tensor in tensors}
    return Outline(header_bytes=header_bytes, size_bytes=len(GUIDE_DATA), digests=digests), GUIDE_DATA[
        :header_bytes
    ]


def adopt(stand: Stand) -> None:
    """What `Travel.find` does with a model that a connected node has."""
    described, header = outline()
    stand.store.adopt(guide().model_id, "guide-q8_0", described, header)


async def test_only_the_bytes_that_layers_need_are_fetched(tmp_path: Path, web_server: FaultyServer) -> None:
    layers = LayerRange(4, 8)
    needed = needed_tensors(guide(), layers)
    async with open_stand(tmp_path) as stand:
        adopt(stand)
        web_server.faults.extend([well] * 2 + [reset_in_the_middle])
        download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
        assert (download.state, download.error) == ("done", "")
        entry = stand.catalogue.resolve("guide-q8_0")
        assert entry.absent(needed) == ()
        assert len(entry.present or ()) == len(needed)
    asked = web_server.spans(GUIDE)
    wanted = [(tensor.offset, tensor.offset + tensor.size_bytes) for tensor in needed]
    header_bytes = outline()[0].header_bytes
    assert n_bytes(asked) == n_bytes([*wanted, (0, header_bytes)])
    assert n_bytes(asked) < len(GUIDE_DATA)


async def test_layers_of_another_file_are_refused(tmp_path: Path, web_server: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        adopt(stand)
        for other in (GUIDE_DATA + b"x", bytes([GUIDE_DATA[0] ^ 1]) + GUIDE_DATA[1:]):
            web_server.files[GUIDE] = other
            download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
            assert "is not the file that guide-q8_0 was made from" in download.error


async def test_wrong_bytes_of_a_layer_do_not_count(tmp_path: Path, web_server: FaultyServer) -> None:
    needed = needed_tensors(guide(), LayerRange(4, 8))
    at = max(needed, key=lambda tensor: tensor.size_bytes).offset
    web_server.files[GUIDE] = GUIDE_DATA[:at] + bytes([GUIDE_DATA[at] ^ 1]) + GUIDE_DATA[at + 1 :]
    async with open_stand(tmp_path) as stand:
        adopt(stand)
        download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
        assert download.state == "failed"
        assert "has other bytes of tensor" in download.error
        assert stand.catalogue.get("guide-q8_0").absent(needed) != ()
