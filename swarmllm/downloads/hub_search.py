"""Finds models on a hub by a term, and reads the headers of what it finds.

The hub answers with repositories and the names of their files. One GGUF of each repository is read: the one
in the most common quantisation. At most `READS_MAX` headers are read, and nothing else of the files; results
that are missing when the time is over are marked as such.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from swarmllm.downloads.header_plan import MAX_FAILURES, PublishedModel, read_published
from swarmllm.downloads.remote import Remote, open_http
from swarmllm.downloads.settings import DownloadSettings, RetrySchedule
from swarmllm.downloads.source import DownloadError, Sibling, model_files, parse_source, search_url
from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.transfer.fetch import share_out

READS_MAX = 8
"""Repositories that are shown."""
TIMEOUT_S = 30.0
"""For all of it: somebody waits."""
FILES_MAX = 64
"""That are named of one repository."""
PREFERRED = ("q4_k_m", "q4_k_s", "q5_k_m", "q4_0", "q8_0")
"""The first of these that a repository has is looked at; else its first file."""

_FILE = re.compile(r"[^:?#\s\\]{1,400}", re.ASCII)


class _Repository(msgspec.Struct):
    """The fields of Hugging Face's description of a repository that are used."""

    id: Annotated[str, Meta(max_length=200)]
    siblings: list[Sibling] = []
    downloads: Annotated[int, Meta(ge=0, le=2**53)] = 0


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One repository, and the GGUF of it that was looked at."""

    repo: str
    source: str
    """What a download or a share would be asked for: `hf:ORG/REPO:FILE.gguf`."""
    files: tuple[str, ...]
    """The GGUFs of the repository, of a model in parts the first part."""
    n_downloads: int
    """As the hub counts."""
    published: PublishedModel | None
    problem: str
    """Why it is not known what `source` is; empty where it is."""


def found_in(answer: bytes, url: str) -> list[FoundModel]:
    """The repositories with GGUFs in what `search_url` answered, whose headers are not read yet; what is no
    name of a repository or file is left out. Raises DownloadError."""
    try:
        repositories = msgspec.json.decode(answer, type=list[_Repository])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DownloadError(f"{url}: the answer is not a list of repositories") from None
    found = []
    for each in repositories:
        names = [sibling.rfilename for sibling in each.siblings if _FILE.fullmatch(sibling.rfilename)]
        files = tuple(model_files(names))
        if not files:
            continue
        source = f"hf:{each.id}:{_preferred(files)}"
        try:
            parse_source(source, "https://hub")
        except InvalidRequest:
            continue
        found.append(FoundModel(each.id, source, files[:FILES_MAX], each.downloads, None, ""))
        if len(found) == READS_MAX:
            break
    return found


def _preferred(files: tuple[str, ...]) -> str:
    for quantisation in PREFERRED:
        for file in files:
            if quantisation in file.lower():
                return file
    return files[0]


async def search_hub(
    term: str, settings: DownloadSettings, limiter: trio.CapacityLimiter
) -> tuple[FoundModel, ...]:
    """In the order of the hub. `limiter`: how many headers are read at once. Raises DownloadError."""
    settings = replace(settings, max_failures=min(settings.max_failures, MAX_FAILURES))
    url = search_url(settings.endpoint, term, READS_MAX)
    found: list[FoundModel] = []

    async def look(at: int) -> None:
        source = parse_source(found[at].source, settings.endpoint)
        try:
            async with limiter:
                found[at] = replace(found[at], published=await read_published(source, settings))
        except SwarmLLMError as error:
            found[at] = replace(found[at], problem=error.message)

    is_listed = False
    with trio.move_on_after(TIMEOUT_S):
        async with open_http(settings) as http:
            listing = Remote(http, url, settings.token, settings).listing
            try:
                raw = await RetrySchedule(settings).keep_trying(listing)
            except DownloadError as error:
                # Who searches has not seen the address, which is long.
                raise DownloadError(error.message.replace(url, settings.endpoint)) from error
        found = await trio.to_thread.run_sync(found_in, raw, url)
        is_listed = True
        await share_out(READS_MAX, list(range(len(found))), look)
    if not is_listed:
        raise DownloadError(f"{settings.endpoint} has not answered within {TIMEOUT_S:g} s")
    late = f"its header was not here within {TIMEOUT_S:g} s"
    return tuple(
        each if each.published is not None or each.problem else replace(each, problem=late) for each in found
    )
