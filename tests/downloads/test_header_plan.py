"""The layout of a model on a web server, read from its header and from nothing else of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from download_stand import DATA, GUIDE, GUIDE_DATA, MODEL, SETTINGS, guide, open_stand
from faulty_server import FAULTS, FaultyServer, well
from split_gguf import split_gguf

from swarmllm.downloads.source import DownloadError, Offline
from swarmllm.errors import BadModel, InvalidRequest
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import Manifest
from swarmllm.models.gguf_header import parse_header
from swarmllm.node.placing.plan import shape_of


def check_is_the_guides_shape(layout: Manifest) -> None:
    assert shape_of(layout) == shape_of(guide())
    assert layout.n_layers == guide().n_layers
    assert layout.cut_alignment == guide().cut_alignment
    assert layout.size_bytes == guide().size_bytes


async def test_only_the_header_is_fetched(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[GUIDE] = GUIDE_DATA
    header_bytes = parse_header(GUIDE_DATA, len(GUIDE_DATA)).end_offset
    step_bytes = header_bytes // 8
    async with open_stand(tmp_path, replace(SETTINGS, header_step_bytes=step_bytes)) as stand:
        found = await stand.downloads.published(web_server.url + GUIDE)
        assert stand.parts == []
        assert stand.downloads.list() == ()
    assert (found.name, found.file_bytes) == ("guide-q8_0", len(GUIDE_DATA))
    check_is_the_guides_shape(found.layout)
    assert header_bytes <= web_server.n_bytes <= 1.25 * header_bytes + 2 * step_bytes
    assert web_server.n_bytes < len(GUIDE_DATA) / 2


async def test_of_a_repository_with_a_model_in_parts(tmp_path: Path, web_server: FaultyServer) -> None:
    (tmp_path / "parts").mkdir()
    parts = split_gguf(GUIDE_PATH, tmp_path / "parts", [0, 23, 41], stem="Guide-Q8_0")
    listing = {"siblings": [{"rfilename": part.name} for part in parts]}
    web_server.files["/api/models/org/repo"] = json.dumps(listing).encode()
    for part in parts:
        web_server.files[f"/org/repo/resolve/main/{part.name}"] = part.read_bytes()
    async with open_stand(tmp_path) as stand:
        found = await stand.downloads.published("hf:org/repo", endpoint=web_server.url)
    check_is_the_guides_shape(found.layout)
    assert found.name == "guide-q8_0"
    assert web_server.n_bytes < len(GUIDE_DATA) / 2


async def test_a_server_without_ranges_is_left_after_the_header(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    web_server.files[GUIDE] = GUIDE_DATA
    web_server.has_ranges = False
    step_bytes = parse_header(GUIDE_DATA, len(GUIDE_DATA)).end_offset // 3
    async with open_stand(tmp_path, replace(SETTINGS, header_step_bytes=step_bytes)) as stand:
        check_is_the_guides_shape((await stand.downloads.published(web_server.url + GUIDE)).layout)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_costs_another_attempt(tmp_path: Path, web_server: FaultyServer, fault: str) -> None:
    web_server.files[GUIDE] = GUIDE_DATA
    web_server.faults.extend([well, FAULTS[fault]])
    async with open_stand(tmp_path) as stand:
        check_is_the_guides_shape((await stand.downloads.published(web_server.url + GUIDE)).layout)


async def test_what_is_no_model_is_refused(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[MODEL] = b"<html>" + DATA
    web_server.files["/cut.gguf"] = DATA[:5000]
    async with open_stand(tmp_path) as stand:
        with pytest.raises(BadModel):
            await stand.downloads.published(web_server.url + MODEL)
        with pytest.raises(BadModel):
            await stand.downloads.published(web_server.url + "/cut.gguf")
        with pytest.raises(DownloadError):
            await stand.downloads.published(web_server.url + "/none.gguf")
        with pytest.raises(InvalidRequest):
            await stand.downloads.published("hf:../..")


async def test_an_offline_node_asks_nobody(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[GUIDE] = GUIDE_DATA
    async with open_stand(tmp_path, replace(SETTINGS, offline=True)) as stand:
        with pytest.raises(Offline):
            await stand.downloads.published(web_server.url + GUIDE)
    assert web_server.asked == []
