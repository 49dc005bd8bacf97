"""Models from a web server that misbehaves: what arrives is the model or nothing, and never twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio
from shelf import FAULTS, Shelf, open_shelf, reset_in_the_middle, status, well

from swarmllm.config import DownloadsTable
from swarmllm.downloads import Download, Downloads, DownloadSettings
from swarmllm.downloads.errors import Busy, DownloadError, Offline, Refused
from swarmllm.downloads.patience import Patience
from swarmllm.downloads.remote import Remote
from swarmllm.downloads.settings import from_environment
from swarmllm.downloads.spans import missing, n_bytes
from swarmllm.errors import Conflict, InvalidRequest
from swarmllm.guide import DRAFT_PATH, GUIDE_PATH
from swarmllm.models import Catalogue, LayerRange, Manifest, Store, build_manifest, needed_tensors
from swarmllm.swarm.memory import InMemoryNetwork
from swarmllm.swarm.registry import Registry
from swarmllm.travel import Travel, TravelSettings
from swarmllm_proto.swarm import Outline

PIECE_BYTES = 64 * 1024
MODEL = "/models/tiny-q8_0.gguf"
DATA = DRAFT_PATH.read_bytes()
SETTINGS = DownloadSettings(piece_bytes=PIECE_BYTES, first_pause_s=0.001, max_pause_s=0.01)


@cache
def manifest() -> Manifest:
    return build_manifest(DRAFT_PATH)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with open_shelf() as server:
        server.files[MODEL] = DATA
        yield server


@dataclass
class Stand:
    downloads: Downloads
    store: Store
    catalogue: Catalogue
    folder: Path

    async def fetch(self, source: str, **options: Any) -> Download:
        download = self.downloads.start(source, **options)
        with trio.fail_after(20):
            await download.ended.wait()
        return download

    @property
    def parts(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("downloads/*/*") if path.is_file())


@asynccontextmanager
async def open_stand(folder: Path, settings: DownloadSettings = SETTINGS) -> AsyncIterator[Stand]:
    catalogue = Catalogue(folder / "catalogue.sqlite")
    store = Store(catalogue, folder / "models")

    async def find(name: str) -> Any:
        return await trio.to_thread.run_sync(catalogue.resolve, name)

    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        router = network.add("node-a")
        travel = Travel(
            router,
            Registry("node-a"),
            store,
            TravelSettings(),
            in_use=lambda: (),
            on_change=lambda: None,
        )
        downloads = Downloads(folder / "downloads", travel, settings, find=find)
        await nursery.start(downloads.run)
        yield Stand(downloads, store, catalogue, folder)
        nursery.cancel_scope.cancel()


async def test_a_file_comes_in_pieces_and_becomes_a_model(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(shelf.url + MODEL)
        assert (download.state, download.error, download.model) == ("done", "", "tiny-q8_0")
        entry = stand.catalogue.resolve("tiny-q8_0")
        assert entry.model_id == manifest().model_id
        assert entry.is_stored
        assert entry.path.read_bytes() == DATA
        assert stand.store.verify(entry, lambda done, total: None) == ()
        assert stand.parts == []
        assert (download.done_bytes, download.total_bytes) == (len(DATA), len(DATA))
    pieces = shelf.spans(MODEL)[1:]
    assert len(pieces) == -(-len(DATA) // PIECE_BYTES)
    assert missing(pieces, len(DATA)) == []


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_cost_attempts_and_nothing_else(tmp_path: Path, shelf: Shelf, fault: str) -> None:
    async with open_stand(tmp_path) as stand:
        shelf.faults.extend([FAULTS[fault], well, well, FAULTS[fault], FAULTS[fault], well, FAULTS[fault]])
        download = await stand.fetch(shelf.url + MODEL)
        assert (download.state, download.error) == ("done", "")
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA


async def test_a_server_without_ranges_is_read_front_to_back(tmp_path: Path, shelf: Shelf) -> None:
    shelf.has_ranges = False
    async with open_stand(tmp_path) as stand:
        shelf.faults.extend([well, reset_in_the_middle])
        download = await stand.fetch(shelf.url + MODEL)
        assert download.state == "done"
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA
        shelf.faults.extend([well, *[reset_in_the_middle] * 20])
        stand.store.remove(stand.catalogue.get("tiny-q8_0"))
        failed = await stand.fetch(shelf.url + MODEL)
        assert failed.state == "failed"
        assert "given up after 8 attempts" in failed.error


async def test_what_was_interrupted_goes_on_where_it_was(tmp_path: Path, shelf: Shelf) -> None:
    hold = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def after_some() -> None:
        if len(shelf.asked) == 6:
            token.run_sync_soon(hold.set)

    shelf.on_request = after_some
    async with open_stand(tmp_path) as stand:
        download = stand.downloads.start(shelf.url + MODEL)
        await hold.wait()
        download.scope.cancel()
        await download.ended.wait()
        assert download.state == "cancelled"
        (state,) = [path for path in stand.parts if path.name == "state.json"]
        done = [tuple(span) for span in json.loads(state.read_bytes())["done"]]
        assert 0 < n_bytes(done) < len(DATA)
        shelf.asked.clear()
    async with open_stand(tmp_path) as stand:
        again = await stand.fetch(shelf.url + MODEL)
        assert (again.state, again.error) == ("done", "")
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA
    asked = shelf.spans(MODEL)[1:]
    assert n_bytes(asked) == len(DATA) - n_bytes(done)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 100, b'{"done": [[-5, 10]]}'])
async def test_a_damaged_note_of_what_is_there_is_not_believed(
    tmp_path: Path, shelf: Shelf, damage: bytes
) -> None:
    async with open_stand(tmp_path) as stand:
        folder = tmp_path / "downloads" / hashlib.sha256((shelf.url + MODEL).encode()).hexdigest()[:16]
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(damage)
        (folder / "part.gguf").write_bytes(b"x" * len(DATA))
        assert (await stand.fetch(shelf.url + MODEL)).state == "done"
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA


async def test_a_file_that_changes_meanwhile_is_begun_anew(tmp_path: Path, shelf: Shelf) -> None:
    old = bytes([DATA[0] ^ 1]) + DATA[1:]
    shelf.files[MODEL] = old

    def change() -> None:
        if len(shelf.asked) == 4:
            shelf.files[MODEL] = DATA

    shelf.on_request = change
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(shelf.url + MODEL)
        assert (download.state, download.error) == ("done", "")
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA


async def test_a_file_that_never_stays_the_same_is_given_up(tmp_path: Path, shelf: Shelf) -> None:
    def change() -> None:
        shelf.files[MODEL] = DATA[:-1] + bytes([len(shelf.asked) % 256])

    shelf.on_request = change
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(shelf.url + MODEL)
        assert download.state == "failed"
        assert "has changed on the server" in download.error
        assert stand.catalogue.list() == ()


async def test_wrong_bytes_are_thrown_away(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(shelf.url + MODEL, sha256="00" * 32)
        assert download.state == "failed"
        assert "does not have the SHA-256 0000" in download.error
        assert stand.parts == []
        assert stand.catalogue.list() == ()
        right = await stand.fetch(shelf.url + MODEL, sha256=hashlib.sha256(DATA).hexdigest().upper())
        assert right.state == "done"


async def test_what_is_no_model_does_not_become_one(tmp_path: Path, shelf: Shelf) -> None:
    shelf.files["/page.gguf"] = b"<html>not what you wanted</html>"
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(shelf.url + "/page.gguf")
        assert download.state == "failed"
        assert "not a GGUF file" in download.error
        assert stand.catalogue.list() == ()


async def test_a_model_that_is_here_already_is_not_kept_twice(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        stand.catalogue.add(DRAFT_PATH, "mine")
        download = await stand.fetch(shelf.url + MODEL)
        assert (download.state, download.model) == ("done", "mine")
        assert stand.parts == []
        assert stand.store.used_bytes() == 0


@pytest.mark.parametrize(
    ("code", "words"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "no such file"), (418, "status 418")]
)
async def test_a_refusal_is_final_and_says_what_to_do(
    tmp_path: Path, shelf: Shelf, code: int, words: str
) -> None:
    async with open_stand(tmp_path) as stand:
        shelf.faults.append(status(code))
        download = await stand.fetch(shelf.url + MODEL)
        assert download.state == "failed"
        assert words in download.error
        assert len(shelf.asked) == 1


async def test_a_server_that_never_recovers_is_given_up_and_what_came_is_kept(
    tmp_path: Path, shelf: Shelf
) -> None:
    async with open_stand(tmp_path) as stand:
        shelf.faults.extend([well] * 3 + [status(503)] * 200)
        download = await stand.fetch(shelf.url + MODEL)
        assert download.state == "failed"
        assert "given up after 8 attempts" in download.error
        assert [path.name for path in stand.parts] == ["part.gguf", "state.json"]


async def test_a_server_that_asks_for_an_hour_is_given_up_at_once(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        shelf.faults.append(status(429, Retry_After="3600"))
        download = await stand.fetch(shelf.url + MODEL)
        assert "3600 s of patience" in download.error


async def test_patience_is_what_the_server_asks_for(autojump_clock: trio.testing.MockClock) -> None:
    patience = Patience(SETTINGS)
    await patience.wait(Busy("busy", 7.0))
    assert trio.current_time() == 7.0
    for _ in range(SETTINGS.max_failures - 2):
        await patience.wait(Busy("busy", 0.0))
    with pytest.raises(DownloadError, match="given up"):
        await patience.wait(Busy("busy", 0.0))


async def test_the_token_goes_to_the_endpoint_and_nowhere_else(tmp_path: Path, shelf: Shelf) -> None:
    elsewhere = shelf.url.replace("127.0.0.1", "localhost")
    shelf.redirects["/org/repo/resolve/main/tiny-q8_0.gguf"] = elsewhere + MODEL
    shelf.headers = {
        "X-Linked-Etag": f'"{hashlib.sha256(DATA).hexdigest()}"',
        "X-Linked-Size": str(len(DATA)),
    }
    settings = replace(SETTINGS, endpoint=shelf.url, token="hf_secret")
    async with open_stand(tmp_path, settings) as stand:
        download = await stand.fetch("hf:org/repo:tiny-q8_0.gguf")
        assert (download.state, download.error) == ("done", "")
        tokens = {(asked.host.partition(":")[0], asked.authorization) for asked in shelf.asked}
        assert tokens == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}
        shelf.asked.clear()
        await stand.fetch(shelf.url + MODEL)
        assert {asked.authorization for asked in shelf.asked} == {None}
        shelf.asked.clear()
        await stand.fetch("hf:org/repo:tiny-q8_0.gguf", endpoint=elsewhere)
        assert {asked.authorization for asked in shelf.asked} == {None}, "the node's own token"
    assert "hf_secret" not in repr(settings)


async def test_hugging_faces_hash_is_checked(tmp_path: Path, shelf: Shelf) -> None:
    shelf.redirects["/org/repo/resolve/main/a.gguf"] = shelf.url + MODEL
    shelf.headers = {"X-Linked-Etag": f'"{"ab" * 32}"'}
    async with open_stand(tmp_path, replace(SETTINGS, endpoint=shelf.url)) as stand:
        download = await stand.fetch("hf:org/repo:a.gguf")
        assert f"does not have the SHA-256 {'ab' * 32}" in download.error


async def test_encryption_is_not_given_up_on_the_way() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "http://127.0.0.1:1/file"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        with pytest.raises(Refused, match="without encryption"):
            await Remote(http, "https://hub.example/file", "", SETTINGS).facts()


async def test_redirects_in_a_circle_end(tmp_path: Path, shelf: Shelf) -> None:
    shelf.redirects["/round"] = "/round"
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(shelf.url + "/round")
        assert "more than 5 redirects" in download.error


async def test_a_repository_is_asked_for_its_files(tmp_path: Path, shelf: Shelf) -> None:
    names = ["README.md", "tiny-Q8_0.gguf", "tiny-q4_k_m.gguf", "mmproj-tiny.gguf"]
    listing = {"id": "org/repo", "siblings": [{"rfilename": name} for name in names]}
    shelf.files["/api/models/org/repo"] = msgspec.json.encode(listing)
    shelf.files["/org/repo/resolve/main/tiny-Q8_0.gguf"] = DATA
    async with open_stand(tmp_path, replace(SETTINGS, endpoint=shelf.url)) as stand:
        chosen = await stand.fetch("hf:org/repo:Q8_0")
        assert (chosen.state, chosen.model) == ("done", "tiny-q8_0")
        unclear = await stand.fetch("hf:org/repo")
        assert "has 2 that fit; name one of them: tiny-Q8_0.gguf, tiny-q4_k_m.gguf" in unclear.error
        nothing = await stand.fetch("hf:org/repo:Q2_K")
        assert "no GGUF with 'Q2_K'" in nothing.error
        shelf.files["/api/models/org/repo"] = b"<html>"
        nonsense = await stand.fetch("hf:org/repo")
        assert "not a list of files" in nonsense.error


@pytest.mark.parametrize(
    "source",
    [
        "tiny.gguf",
        "ftp://example.org/x.gguf",
        "http://example.org/x.gguf",
        "https://me:secret@example.org/x.gguf",
        "https://",
        "hf:repo",
        "hf:org/repo:../../x.gguf",
        "hf:org/../x:y.gguf",
        "https://example.org/\n",
        "https://example.org:0/x",
        "x" * 3000,
    ],
)
async def test_what_is_no_source_is_refused(tmp_path: Path, source: str) -> None:
    async with open_stand(tmp_path) as stand:
        with pytest.raises(InvalidRequest) as refused:
            stand.downloads.start(source)
        assert refused.value.field == "source"


async def test_offline_means_offline(tmp_path: Path, shelf: Shelf) -> None:
    for settings in (
        from_environment({}, DownloadsTable(offline=True)),
        from_environment({"HF_HUB_OFFLINE": "1"}, DownloadsTable()),
    ):
        async with open_stand(tmp_path, settings) as stand:
            with pytest.raises(Offline):
                stand.downloads.start(shelf.url + MODEL)
    assert shelf.asked == []


async def test_asking_twice_is_one_download(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        first = stand.downloads.start(shelf.url + MODEL)
        assert stand.downloads.start(shelf.url + MODEL) is first
        with pytest.raises(Conflict):
            stand.downloads.start(shelf.url + MODEL, layers="0:1")
        await first.ended.wait()
        assert [view.state for view in stand.downloads.list()] == ["done"]


# Only the layers that are needed.


GUIDE = "/models/guide-q8_0.gguf"
GUIDE_DATA = GUIDE_PATH.read_bytes()


@cache
def guide() -> Manifest:
    return build_manifest(GUIDE_PATH)


@pytest.fixture
def guide_shelf(shelf: Shelf) -> Shelf:
    shelf.files[GUIDE] = GUIDE_DATA
    return shelf


def outline() -> tuple[Outline, bytes]:
    tensors = [tensor for shard in guide().shards for tensor in shard.tensors]
    header_bytes = min(tensor.offset for tensor in tensors)
    digests = {tensor.name: tensor.blake3 for tensor in tensors}
    return Outline(header_bytes=header_bytes, size_bytes=len(GUIDE_DATA), digests=digests), GUIDE_DATA[
        :header_bytes
    ]


def adopt(stand: Stand) -> None:
    """What `Travel.find` does with a model that a connected node has."""
    described, header = outline()
    stand.store.adopt(guide().model_id, "guide-q8_0", described, header)


async def test_only_the_bytes_that_layers_need_are_fetched(tmp_path: Path, guide_shelf: Shelf) -> None:
    layers = LayerRange(4, 8)
    needed = needed_tensors(guide(), layers)
    async with open_stand(tmp_path) as stand:
        adopt(stand)
        guide_shelf.faults.extend([well] * 2 + [reset_in_the_middle])
        download = await stand.fetch(guide_shelf.url + GUIDE, layers="4:8")
        assert (download.state, download.error) == ("done", "")
        entry = stand.catalogue.resolve("guide-q8_0")
        assert entry.absent(needed) == ()
        assert len(entry.present or ()) == len(needed)
    asked = guide_shelf.spans(GUIDE)
    wanted = [(tensor.offset, tensor.offset + tensor.size_bytes) for tensor in needed]
    header_bytes = outline()[0].header_bytes
    assert n_bytes(asked) == n_bytes([*wanted, (0, header_bytes)])
    assert n_bytes(asked) < len(GUIDE_DATA)


async def test_layers_of_a_model_that_nobody_knows_are_kept_of_what_is_read(
    tmp_path: Path, guide_shelf: Shelf
) -> None:
    needed = needed_tensors(guide(), LayerRange(4, 8))
    async with open_stand(tmp_path) as stand:
        guide_shelf.faults.extend([well, FAULTS["429"], well, reset_in_the_middle, well, reset_in_the_middle])
        download = await stand.fetch(guide_shelf.url + GUIDE, layers="4:8")
        assert (download.state, download.error) == ("done", "")
        entry = stand.catalogue.resolve("guide-q8_0")
        assert entry.model_id == guide().model_id
        assert entry.absent(needed) == ()
        assert len(entry.present or ()) == len(needed)
        assert stand.store.verify(entry, lambda done, total: None) == ()
        assert stand.store.used_bytes() < len(GUIDE_DATA) / 2
        assert stand.parts == []


async def test_what_was_hashed_of_an_unknown_model_is_not_read_again(
    tmp_path: Path, guide_shelf: Shelf
) -> None:
    token, hold = trio.lowlevel.current_trio_token(), trio.Event()

    def after_some() -> None:
        if len(guide_shelf.asked) == 60:
            token.run_sync_soon(hold.set)

    guide_shelf.on_request = after_some
    async with open_stand(tmp_path) as stand:
        download = stand.downloads.start(guide_shelf.url + GUIDE, layers="4:8")
        await hold.wait()
        download.scope.cancel()
        await download.ended.wait()
        guide_shelf.asked.clear()
        guide_shelf.n_bytes = 0
        assert (await stand.fetch(guide_shelf.url + GUIDE, layers="4:8")).state == "done"
        assert stand.catalogue.resolve("guide-q8_0").model_id == guide().model_id
    assert guide_shelf.n_bytes < len(GUIDE_DATA)


async def test_an_unknown_model_is_refused_layers_that_it_has_not(tmp_path: Path, guide_shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(guide_shelf.url + GUIDE, layers="8:16")
        assert "has layers 0:12, not 8:16" in download.error


async def test_layers_of_another_file_are_refused(tmp_path: Path, guide_shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        adopt(stand)
        for other in (GUIDE_DATA + b"x", bytes([GUIDE_DATA[0] ^ 1]) + GUIDE_DATA[1:]):
            guide_shelf.files[GUIDE] = other
            download = await stand.fetch(guide_shelf.url + GUIDE, layers="4:8")
            assert "is not the file that guide-q8_0 was made from" in download.error


async def test_wrong_bytes_of_a_layer_do_not_count(tmp_path: Path, guide_shelf: Shelf) -> None:
    needed = needed_tensors(guide(), LayerRange(4, 8))
    at = max(needed, key=lambda tensor: tensor.size_bytes).offset
    guide_shelf.files[GUIDE] = GUIDE_DATA[:at] + bytes([GUIDE_DATA[at] ^ 1]) + GUIDE_DATA[at + 1 :]
    async with open_stand(tmp_path) as stand:
        adopt(stand)
        download = await stand.fetch(guide_shelf.url + GUIDE, layers="4:8")
        assert download.state == "failed"
        assert "has other bytes of tensor" in download.error
        assert stand.catalogue.get("guide-q8_0").absent(needed) != ()
