"""Models that a hub finds: which file of each is looked at, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from api_fakes import serve_node
from faulty_server import FaultyServer, open_shelf
from split_gguf import split_gguf
from trio.testing import MockClock

from swarmllm.downloads import DownloadSettings, hub_search
from swarmllm.downloads.hub_search import FILES_MAX, READS_MAX, FoundModel, found_in
from swarmllm.downloads.remote import Remote
from swarmllm.downloads.source import DownloadError, Offline, search_url
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.gguf_header import parse_header

GUIDE_DATA = GUIDE_PATH.read_bytes()


@pytest.fixture
def web_server() -> Iterator[FaultyServer]:
    with open_shelf() as server:
        yield server


def repository(name: str, *files: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "siblings": [{"rfilename": file} for file in files], **more}


def answers(web_server: FaultyServer, *repositories: dict[str, Any], term: str = "guide") -> None:
    path = search_url(web_server.url, term, READS_MAX).removeprefix(web_server.url)
    web_server.files[path] = json.dumps(repositories).encode()


def found(*repositories: object) -> list[FoundModel]:
    return found_in(json.dumps(repositories).encode(), "https://hub")


def test_of_a_repository_the_quantisation_that_most_people_want_is_looked_at() -> None:
    files = ("b-Q8_0.gguf", "mmproj-Q4_K_M.gguf", "README.md", "a-F16.gguf")
    split = [f"c-Q4_K_M-0000{n}-of-00002.gguf" for n in (2, 1)]
    one, two, three = found(
        repository("o/r", *files), repository("o/s", *files, *split), repository("o/t", "z.gguf", "y.gguf")
    )
    assert one.source == "hf:o/r:b-Q8_0.gguf"
    assert one.files == ("a-F16.gguf", "b-Q8_0.gguf")
    assert two.source == "hf:o/s:c-Q4_K_M-00001-of-00002.gguf"
    assert three.source == "hf:o/t:y.gguf"


def test_what_is_no_name_is_left_out_and_the_rest_is_bounded() -> None:
    bad = [repository(name, "a.gguf") for name in ("", "../..", "o", "o/r:x", "o/r/s", "o/\x1b[31m", "o/r?x")]
    assert found(*bad, repository("o/r", "a b.gguf", "a:b.gguf", "x\n.gguf"), repository("o/none")) == []
    many = [repository(f"o/r{n}", *(f"{m}.gguf" for m in range(2 * FILES_MAX))) for n in range(3 * READS_MAX)]
    assert [each.repo for each in found(*many)] == [f"o/r{n}" for n in range(READS_MAX)]
    assert all(len(each.files) == FILES_MAX for each in found(*many))


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b"[1]", b'[{"id": 1}]', b"[" * 100_000, b"\xff", b'[{"id":"a","downloads":-1}]']
)
def test_an_answer_that_is_no_list_of_repositories_is_refused(answer: bytes) -> None:
    with pytest.raises(DownloadError, match="not a list of repositories"):
        found_in(answer, "https://hub")


async def test_the_api_tells_sizes_and_whether_it_fits_from_headers_alone(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    (tmp_path / "parts").mkdir()
    parts = split_gguf(GUIDE_PATH, tmp_path / "parts", [0, 23, 41], stem="Guide-Q8_0")
    for part in parts:
        web_server.files[f"/org/parts/resolve/main/{part.name}"] = part.read_bytes()
    web_server.files["/org/cut/resolve/main/cut.gguf"] = GUIDE_DATA[:5000]
    answers(
        web_server,
        repository("org/parts", *(part.name for part in parts), downloads=7),
        repository("org/cut", "cut.gguf"),
        repository("org/gone", "gone.gguf"),
    )
    async with serve_node(tmp_path / "node") as stand:
        body = {"term": "guide", "hf_endpoint": web_server.url}
        answer = await stand.http.post("/api/admin/models/search", json=body)
        assert answer.status_code == 200, answer.text
        whole, cut, gone = answer.json()["models"]
        assert stand.node.downloads.list() == ()
        assert (whole["source"], whole["n_downloads"]) == (f"hf:org/parts:{parts[0].name}", 7)
        assert (whole["fits"], whole["n_nodes"], whole["problem"]) == (True, 1, "")
        assert whole["n_layers"] == 12
        assert whole["download_bytes"] == pytest.approx(len(GUIDE_DATA), rel=0.01)
        assert (cut["fits"], gone["fits"], gone["size_bytes"]) == (None, None, None)
        assert cut["problem"]
        assert "no such file" in gone["problem"]
        assert parse_header(GUIDE_DATA, len(GUIDE_DATA)).end_offset < web_server.n_bytes < len(GUIDE_DATA) / 2
        stand.node.placing._budget_bytes = 0
        assert not (await stand.http.post("/api/admin/models/search", json=body)).json()["models"][0]["fits"]


async def test_headers_that_do_not_come_in_time_are_told(
    tmp_path: Path, web_server: FaultyServer, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(hub_search, "read_published", never)
    monkeypatch.setattr(hub_search, "found_in", lambda raw, url: found(repository("o/r", "a.gguf")))

    async def listing(self: object) -> bytes:
        return b""

    monkeypatch.setattr(Remote, "listing", listing)
    (late,) = await hub_search.search_hub("x", DownloadSettings(), trio.CapacityLimiter(1))
    assert late.published is None
    assert "within 30 s" in late.problem
    monkeypatch.setattr(Remote, "listing", never)
    with pytest.raises(DownloadError, match="within 30 s"):
        await hub_search.search_hub("x", DownloadSettings(), trio.CapacityLimiter(1))


async def test_a_hub_that_does_not_answer_is_named_without_the_long_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = DownloadSettings(max_failures=1)
    url = search_url(settings.endpoint, "x", READS_MAX)

    async def refuses(self: object) -> bytes:
        raise DownloadError(f"{url}: nobody is there")

    monkeypatch.setattr(Remote, "listing", refuses)
    with pytest.raises(DownloadError) as failed:
        await hub_search.search_hub("x", settings, trio.CapacityLimiter(1))
    assert failed.value.message.startswith(f"{settings.endpoint}: nobody is there")
    assert url not in failed.value.message


async def test_a_node_that_is_offline_searches_nothing(tmp_path: Path, web_server: FaultyServer) -> None:
    async with serve_node(tmp_path) as stand:
        stand.node.downloads.configure(DownloadSettings(offline=True))
        with pytest.raises(Offline):
            await stand.node.downloads.search("guide", endpoint=web_server.url)
    assert web_server.asked == []
