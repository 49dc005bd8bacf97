"""A model in four parts on a web server becomes one model here, whole or as far as layers were asked for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio
from download_stand import PIECE_BYTES, SETTINGS, Stand, guide, open_stand
from faulty_server import FAULTS, FaultyServer, status, well
from guide_layers import check_is_the_guide, eventually, open_node
from split_gguf import split_gguf

from swarmllm.downloads import DownloadRequest
from swarmllm.downloads.digest_book import n_bytes
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import LayerRange, build_manifest, needed_tensors
from swarmllm.swarm.in_memory.network import InMemoryNetwork

FOLDER = "/org/repo/resolve/main/Q8_0/"
NAMES = [f"Guide-Q8_0-{number:05}-of-00004.gguf" for number in range(1, 5)]
BOUNDARIES = [0, 23, 41]
NAME = "guide-q8_0"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    paths = split_gguf(GUIDE_PATH, tmp_path_factory.mktemp("parts"), BOUNDARIES, stem="Guide-Q8_0")
    assert [path.name for path in paths] == NAMES
    return [path.read_bytes() for path in paths]


@pytest.fixture
def hub(web_server: FaultyServer, parts: list[bytes]) -> FaultyServer:
    for name, data in zip(NAMES, parts, strict=True):
        web_server.files[FOLDER + name] = data
    return web_server


def address(hub: FaultyServer, number: int = 1) -> str:
    return f"{hub.url}{FOLDER}{NAMES[number - 1]}"


def check_whole(stand: Stand, name: str = NAME) -> None:
    entry = stand.catalogue.resolve(name)
    assert entry.model_id == guide().model_id
    assert entry.is_stored
    assert entry.absent(entry.manifest.tensors) == ()
    assert build_manifest(entry.path) == msgspec.structs.replace(entry.manifest)
    assert stand.store.verify(entry, lambda done, total: None) == ()
    assert stand.parts == []


@pytest.mark.parametrize("number", [1, 3])
async def test_all_parts_come_by_the_name_of_any(tmp_path: Path, hub: FaultyServer, number: int) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(address(hub, number))
        assert (download.state, download.error, download.model) == ("done", "", NAME)
        check_whole(stand)
    tensor_bytes = guide().size_bytes
    fetched = sum(n_bytes(hub.spans(FOLDER + name)) for name in NAMES)
    assert fetched < tensor_bytes + 8 * PIECE_BYTES


async def test_a_repository_of_parts_is_one_model(tmp_path: Path, hub: FaultyServer) -> None:
    def listing(names: list[str]) -> bytes:
        return msgspec.json.encode({"siblings": [{"rfilename": f"Q8_0/{name}"} for name in names]})

    settings = replace(SETTINGS, endpoint=hub.url)
    async with open_stand(tmp_path, settings) as stand:
        hub.files["/api/models/org/repo"] = listing([*NAMES[:2], NAMES[3]])
        lacking = await stand.fetch("hf:org/repo")
        assert lacking.error == f"org/repo lacks part 3 of 4: there is no Q8_0/{NAMES[2]}"
        hub.files["/api/models/org/repo"] = listing(NAMES)
        chosen = await stand.fetch("hf:org/repo:q8_0")
        assert (chosen.state, chosen.error) == ("done", "")
        check_whole(stand)


@pytest.mark.parametrize("fault", ["reset in the middle", "too short", "no range", "503"])
async def test_faults_cost_attempts_and_nothing_else(tmp_path: Path, hub: FaultyServer, fault: str) -> None:
    async with open_stand(tmp_path) as stand:
        # Of a server that has no ranges at the first word, parts are not asked for.
        begin = well if fault == "no range" else FAULTS[fault]
        hub.faults.extend([begin, well, well, FAULTS[fault], FAULTS[fault], *[well] * 9, FAULTS[fault]])
        download = await stand.fetch(address(hub))
        assert (download.state, download.error) == ("done", "")
        check_whole(stand)


async def test_what_was_interrupted_goes_on_where_it_was(tmp_path: Path, hub: FaultyServer) -> None:
    hold = trio.Event()
    token = trio.lowlevel.current_trio_token()
    hub.on_request = lambda: token.run_sync_soon(hold.set) if len(hub.asked) == 30 else None
    async with open_stand(tmp_path) as stand:
        download = stand.downloads.start(DownloadRequest(address(hub)))
        await hold.wait()
        download.scope.cancel()
        await download.ended.wait()
        (state,) = [path for path in stand.parts if path.name == "state.json"]
        done = n_bytes([tuple(span) for span in json.loads(state.read_bytes())["done"]])
        assert 0 < done < guide().size_bytes
        hub.asked.clear()
    async with open_stand(tmp_path) as stand:
        again = await stand.fetch(address(hub, 2))
        assert (again.state, again.error) == ("done", "")
        check_whole(stand)
    fetched = sum(n_bytes(hub.spans(FOLDER + name)) for name in NAMES)
    assert fetched < guide().size_bytes - done + 8 * PIECE_BYTES


async def test_a_part_that_changes_meanwhile_begins_the_download_anew(
    tmp_path: Path, hub: FaultyServer
) -> None:
    right = hub.files[FOLDER + NAMES[2]]
    hub.files[FOLDER + NAMES[2]] = right[:-64] + bytes(64)

    def change() -> None:
        if len(hub.asked) == 40:
            hub.files[FOLDER + NAMES[2]] = right

    hub.on_request = change
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(address(hub))
        assert (download.state, download.error) == ("done", "")
        check_whole(stand)


async def test_a_part_with_wrong_bytes_is_fetched_again_and_the_others_are_kept(
    tmp_path: Path, hub: FaultyServer, parts: list[bytes]
) -> None:
    """As Hugging Face does: a redirect that tells the SHA-256."""
    hub.headers = {}
    settings = replace(SETTINGS, endpoint=hub.url)
    wrong = parts[2][:-5000] + bytes(5000)
    hub.files["/cdn/2"] = wrong
    for number, data in enumerate(parts):
        hub.files.setdefault(f"/cdn/{number}", data)
        hub.redirects[FOLDER + NAMES[number]] = f"{hub.url}/cdn/{number}"
        hub.linked[FOLDER + NAMES[number]] = hashlib.sha256(data).hexdigest()
    async with open_stand(tmp_path, settings) as stand:
        failed = await stand.fetch(f"hf:org/repo:Q8_0/{NAMES[0]}")
        assert f"{NAMES[2]}: what came does not have the SHA-256 {hashlib.sha256(parts[2]).hexdigest()}" in (
            failed.error
        )
        hub.files["/cdn/2"] = parts[2]
        hub.asked.clear()
        again = await stand.fetch(f"hf:org/repo:Q8_0/{NAMES[0]}")
        assert (again.state, again.error) == ("done", "")
        check_whole(stand, NAME)
    assert n_bytes(hub.spans("/cdn/1")) < len(parts[1]) / 4
    assert n_bytes(hub.spans("/cdn/2")) > len(parts[2]) * 0.9


async def test_only_the_bytes_of_the_layers_are_fetched_across_parts(
    tmp_path: Path, hub: FaultyServer
) -> None:
    """Two nodes fetch their layers of a file that neither knows, and work out together which model it is."""
    async with (
        InMemoryNetwork() as network,
        open_node(tmp_path, network, "a", settings=SETTINGS) as one,
        open_node(tmp_path, network, "b", settings=SETTINGS) as other,
    ):
        half = LayerRange(0, guide().n_layers // 2)
        rest = LayerRange(half.end, guide().n_layers)
        first = await one.fetch(address(hub, 4), layers=str(half))
        assert (first.state, first.error) == ("done", "")
        needed = sum(tensor.size_bytes for tensor in needed_tensors(guide(), half))
        fetched = sum(n_bytes(hub.spans(FOLDER + name)) for name in NAMES)
        assert needed <= fetched < needed + 8 * PIECE_BYTES
        second = await other.fetch(address(hub, 2), layers=str(rest))
        assert (second.state, second.error, second.model) == ("done", "", NAME)
        for stand, layers in ((one, half), (other, rest)):
            check_is_the_guide(await eventually(stand), stand, str(layers))


async def test_layers_of_a_model_that_is_known_in_parts_come_checked_from_the_server(
    tmp_path: Path, hub: FaultyServer
) -> None:
    paths = split_gguf(GUIDE_PATH, tmp_path, BOUNDARIES, stem="Guide-Q8_0")
    async with open_stand(tmp_path) as stand:
        added = stand.catalogue.add(paths[0], NAME)
        known = await stand.fetch(address(hub), layers="2:4")
        assert (known.state, known.error, known.model) == ("done", "", added.name)
        layers = await stand.fetch(address(hub), layers="2:4", name="other-name")
        assert (layers.state, layers.error) == ("done", "")
        assert stand.catalogue.get(added.model_id).model_id == guide().model_id


async def test_wrong_parts_are_refused_before_megabytes(
    tmp_path: Path, hub: FaultyServer, parts: list[bytes]
) -> None:
    async with open_stand(tmp_path) as stand:

        async def refused() -> str:
            hub.n_bytes = 0
            download = await stand.fetch(address(hub))
            assert (download.state, stand.parts) == ("failed", [])
            assert hub.n_bytes < 10 * PIECE_BYTES
            return download.error

        hub.files[FOLDER + NAMES[1]] = b"<html>not found, but politely</html>"
        assert f"part 2 of 4 ({NAMES[1]}): not a GGUF file" in await refused()
        hub.files[FOLDER + NAMES[1]] = parts[2]
        assert f"part 2 of 4 ({NAMES[1]}): GGUF key split.no is 2, its name says 1" in await refused()
        del hub.files[FOLDER + NAMES[1]]
        assert "part 2 of 4: " in (error := await refused())
        assert "no such file (404)" in error
        other = split_gguf(GUIDE_PATH, tmp_path, [0, 23, 41], changed={3: {"split.tensors.count": 7}})
        hub.files[FOLDER + NAMES[1]], hub.files[FOLDER + NAMES[2]] = parts[1], other[2].read_bytes()
        assert f"part 3 of 4 ({NAMES[2]}): GGUF key split.tensors.count is 7" in await refused()


async def test_a_header_that_never_ends_is_left_soon(
    tmp_path: Path, hub: FaultyServer, parts: list[bytes]
) -> None:
    """A later part whose only key is an array of 100 MB."""
    size = 100 * 2**20
    header = b"GGUF" + b"\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\1" + bytes(7) + b"k"
    header += b"\x09\0\0\0\0\0\0\0" + (size // 16).to_bytes(8, "little")
    hub.files[FOLDER + NAMES[3]] = header + bytes(size)
    async with open_stand(tmp_path, replace(SETTINGS, header_step_bytes=2**20)) as stand:
        download = await stand.fetch(address(hub))
        assert f"part 4 of 4 ({NAMES[3]})" in download.error
    assert hub.n_bytes < 24 * 2**20


async def test_a_server_without_ranges_and_a_sha256_for_all_are_refused(
    tmp_path: Path, hub: FaultyServer
) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(address(hub), sha256="ab" * 32)
        assert "A model in parts has a SHA-256 for each" in download.error
        hub.has_ranges = False
        download = await stand.fetch(address(hub))
        assert "swarmllm models add FOLDER" in download.error


async def test_more_parts_than_anybody_makes_are_not_asked_for(tmp_path: Path, hub: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(f"{hub.url}/x-00001-of-99999.gguf")
        assert "99999 parts" in download.error
    assert hub.asked == []


async def test_a_server_that_is_busy_between_the_headers_is_asked_again(
    tmp_path: Path, hub: FaultyServer
) -> None:
    async with open_stand(tmp_path) as stand:
        hub.faults.extend([well] * 5 + [status(503)] + [well] * 2 + [status(503)] * 2)
        download = await stand.fetch(address(hub))
        assert (download.state, download.error) == ("done", "")
    first = [span for span in hub.spans(FOLDER + NAMES[0]) if span == (0, 1)]
    assert len(first) == 1, "begun anew"
