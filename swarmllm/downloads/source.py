"""Parses what a user writes for a model on the web (`hf:ORG/REPO:FILE`, an https address).

Pure.

`hf:ORG/REPO:FILE.gguf` is a file of a repository, `hf:ORG/REPO:Q4_K_M` the one file whose name says so,
`hf:ORG/REPO` the only one. `https://...` is an address. Plain http is for this machine only: elsewhere
anybody on the way could change what is fetched.

The errors between this node and a web server are defined here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from swarmllm.errors import InvalidRequest, SwarmLLMError
from swarmllm.host_names import is_loopback_host, parse_host_name
from swarmllm.models.projector import is_called_like, quantisation_in
from swarmllm_proto.split_files import SPLIT_MAX, by_model, parse_split_name, split_stem


class DownloadError(SwarmLLMError):
    """A download failed; what has arrived is kept, and asking again continues."""

    http_status = 502
    error_type = "upstream_error"
    code = "download_failed"


class DownloadRefused(DownloadError):
    """The server refuses the file for good."""


class FileChanged(DownloadError):
    """The file is not the one that was begun."""


class ConnectionBroken(DownloadError):
    """The connection or the answer broke; another attempt may succeed."""


class ServerBusy(ConnectionBroken):
    """The server asks for a pause."""

    def __init__(self, message: str, pause_s: float) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class Offline(DownloadError):
    http_status = 409
    error_type = "invalid_request_error"
    code = "offline"


MAX_SOURCE_LENGTH = 2048
SHOWN_FILES = 20
PREFERRED_PROJECTORS: Final = ("f16", "fp16", "q8_0")
"""Of the quantisations in which a repository has one."""

_HF = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<file>[^:?#\s\\]{1,400}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class DownloadSource:
    """`url` or, for a repository whose file is not known yet, `repo` and what its name must contain."""

    text: str
    url: str = ""
    repo: str = ""
    wanted: str = ""
    is_endpoint: bool = False
    """The token is for this address."""


class Sibling(msgspec.Struct):
    """A file of a repository, as Hugging Face names it."""

    rfilename: str


class _Listing(msgspec.Struct):
    """What Hugging Face says about a repository, as far as it matters here."""

    siblings: list[Sibling] = []


def parse_source(text: str, endpoint: str) -> DownloadSource:
    """Raises InvalidRequest naming the field `source`."""
    if len(text) > MAX_SOURCE_LENGTH or not text.isprintable():
        raise _bad("That is not an address.")
    if not text.startswith("hf:"):
        check_url(text)
        return DownloadSource(text, url=text)
    match = _HF.fullmatch(text)
    if match is None or ".." in text.split("/"):
        raise _bad("Write hf:ORG/REPO or hf:ORG/REPO:FILE.gguf.")
    repo, file = match["repo"], match["file"] or ""
    if file.endswith(".gguf"):
        return DownloadSource(text, url=file_url(endpoint, repo, file), is_endpoint=True)
    return DownloadSource(text, repo=repo, wanted=file, is_endpoint=True)


def check_url(url: str) -> None:
    """Raises InvalidRequest for what is not fetched from."""
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise _bad("That is not an address.") from None
    if parts.scheme not in ("http", "https") or not is_whole:
        raise _bad("Write hf:ORG/REPO[:FILE] or an address that begins with https://.")
    try:
        host = parse_host_name(parts.hostname or "")
    except ValueError as error:
        raise _bad(f"That is not an address: {error}.") from None
    if parts.scheme == "http":
        if is_loopback_host(host):
            return
        raise _bad("Write hf:ORG/REPO[:FILE] or an address that begins with https://.")
    if parts.username or parts.password:
        raise _bad("An address with a password in it would be written down; leave it out.")


def origin(url: str) -> tuple[str, str, int | None]:
    """Who is asked: a token for one of these is for no other."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def file_url(endpoint: str, repo: str, file: str) -> str:
    return f"{endpoint}/{repo}/resolve/main/{quote(file)}"


def listing_url(endpoint: str, repo: str) -> str:
    return f"{endpoint}/api/models/{repo}"


def search_url(endpoint: str, term: str, limit: int) -> str:
    """Repositories with GGUFs, the most fetched first, with the names of their files."""
    query = {
        "search": term,
        "filter": "gguf",
        "sort": "downloads",
        "direction": -1,
        "limit": limit,
        "full": "true",
    }
    return f"{endpoint}/api/models?{urlencode(query)}"


def listed_files(answer: bytes, url: str) -> list[str]:
    """The names in what `listing_url` answered. Raises DownloadError."""
    try:
        return [sibling.rfilename for sibling in msgspec.json.decode(answer, type=_Listing).siblings]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DownloadError(f"{url}: the answer is not a list of files") from None


def model_files(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUFs with a language model among the files of a repository: first part -> all parts."""
    return by_model(name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower())


def choose_file(repo: str, names: list[str], wanted: str) -> str:
    """Chooses the one GGUF that matches, or the first of its parts. Raises InvalidRequest with a list of the
    files."""
    there = model_files(names)
    fitting = [
        first for first, files in there.items() if any(wanted.lower() in file.lower() for file in files)
    ]
    if len(fitting) == 1:
        _refuse_missing_parts(repo, fitting[0], there[fitting[0]])
        return fitting[0]
    if not there:
        raise _bad(f"{repo} has no GGUF file.")
    listed = ", ".join((fitting or list(there))[:SHOWN_FILES])
    what = f"has no GGUF with {wanted!r} in its name" if not fitting else f"has {len(fitting)} that fit"
    raise _bad(f"{repo} {what}; name one of them: {listed}")


def choose_projector(names: Iterable[str], model_file: str) -> str:
    """The projector (mmproj) of a repository that goes with one of its models: one in the model's folder that
    is called like it, else one of that folder, else one of the repository; f16 before q8_0 before the rest.
    Empty: it has none."""
    found = [name for name in names if name.lower().endswith(".gguf") and "mmproj" in name.lower()]
    folder = model_file.rpartition("/")[0]
    beside = [name for name in found if name.rpartition("/")[0] == folder] or found
    like_it = [name for name in beside if is_called_like(name, model_file)] or beside
    return min(like_it, key=_rank, default="")


def _rank(name: str) -> tuple[int, str]:
    quantisation = quantisation_in(name)
    is_known = quantisation in PREFERRED_PROJECTORS
    return PREFERRED_PROJECTORS.index(quantisation) if is_known else len(PREFERRED_PROJECTORS), name


def _refuse_missing_parts(repo: str, first: str, files: Sequence[str]) -> None:
    name = parse_split_name(first)
    for each in name.all()[:SPLIT_MAX] if name else ():
        if str(each) not in files:
            raise _bad(f"{repo} lacks part {each.number} of {each.count}: there is no {each}")


def model_name(url: str) -> str:
    """What a model is called that comes from here, unless somebody says otherwise."""
    return split_stem(unquote(urlsplit(url).path).rpartition("/")[2])


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="source")
