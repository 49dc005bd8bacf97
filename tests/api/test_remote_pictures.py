"""Pictures that a request names by an address: which addresses are dialled, and what is taken from there."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from api_fakes import Stand, serve_node
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from picture_files import jpeg, png

from swarmllm.api.http.errors import decode_body
from swarmllm.api.http.limits import HttpLimits
from swarmllm.api.openai.chat_request import chat_call
from swarmllm.api.openai.remote_pictures import REDIRECTS_MAX, PictureFetcher, is_public
from swarmllm.api.openai.schema import ChatRequest
from swarmllm.config import ApiTable, Config
from swarmllm.errors import InvalidRequest, Overloaded
from swarmllm.models.projector import Projector
from swarmllm_proto.limits import PICTURE_BYTES_MAX

NAME = "pictures.test"
FIELD = "f"


def certificate(folder: Path) -> Path:
    """Key and certificate for NAME, signed by itself, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server of pictures")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file = folder / "server.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *form) + made.public_bytes(serialization.Encoding.PEM)
    )
    return file


@dataclass(frozen=True)
class LocalNetwork:
    """Takes addresses of this machine for public ones."""

    tls_context: Callable[[], ssl.SSLContext] = ssl.create_default_context
    addresses: tuple[str, ...] = ("127.0.0.1",)
    allowed: tuple[str, ...] = ("127.0.0.1",)

    async def resolve(self, host: str) -> list[str]:
        await trio.lowlevel.checkpoint()
        if host != NAME:
            raise OSError("no such name")
        return list(self.addresses)

    def is_allowed(self, address: str) -> bool:
        return address in self.allowed


@dataclass
class PictureServer:
    answers: dict[str, bytes]
    """By target: an answer with its head."""
    network: LocalNetwork
    fetcher: PictureFetcher
    asked: list[str] = field(default_factory=list)
    """Heads of requests."""

    def address(self, target: str) -> str:
        return f"https://{NAME}:{self.fetcher.port}{target}"


def answer(body: bytes, status: str = "200 OK", *lines: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", *lines, f"Content-Length: {len(body)}", "", ""])
    return head.encode() + body


@asynccontextmanager
async def open_server(folder: Path, **answers: bytes) -> AsyncIterator[PictureServer]:
    file = certificate(folder)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(file)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = int(listener.socket.getsockname()[1])

    network = LocalNetwork(lambda: ssl.create_default_context(cafile=file))
    fetcher = PictureFetcher(network, port)
    server = PictureServer({f"/{name}": data for name, data in answers.items()}, network, fetcher)

    async def serve(stream: trio.SocketStream) -> None:
        secure = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        try:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += await secure.receive_some(4096)
            server.asked.append(head.decode())
            target = head.split()[1].decode()
            if target == "/never":
                await trio.sleep_forever()
            await secure.send_all(server.answers[target])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # The client has left, or does not trust.
        finally:
            await trio.aclose_forcefully(secure)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield server
        nursery.cancel_scope.cancel()


def always(n_bytes: int) -> bool:
    return True


async def refusal(fetcher: PictureFetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await fetcher.fetch_all([(url, FIELD)], always)
    assert caught.value.field == FIELD
    return caught.value.message


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("1.1.1.1", True),
        ("2606:4700::1111", True),
        *(
            (address, False)
            for address in (
                *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
                *("100.64.0.1", "192.0.0.8", "192.88.99.1", "198.18.0.1", "224.0.0.1", "255.255.255.255"),
                *("::", "::1", "fd00::1", "fe80::1", "fe80::1%eth0", "ff0e::1", "::ffff:127.0.0.1"),
                *(
                    "::127.0.0.1",
                    "64:ff9b::7f00:1",
                    "64:ff9b:1::1",
                    "2002:7f00:1::",
                    "2001::1",
                    "2001:db8::1",
                ),
            )
        ),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


async def test_a_picture_is_fetched_from_the_address_that_was_checked(tmp_path: Path) -> None:
    """Its certificate is still for the name."""
    async with open_server(tmp_path, one=answer(png()), **{"two?x=1": answer(jpeg())}) as server:
        asked = [(server.address("/one"), "a"), (server.address("/two?x=1#top"), "b")]
        charged: list[int] = []

        def charge(n_bytes: int) -> bool:
            charged.append(n_bytes)
            return True

        assert await server.fetcher.fetch_all(asked, charge) == [png(), jpeg()]
        assert sum(charged) == len(png()) + len(jpeg())
        assert all(f"\r\nHost: {NAME}\r\n" in head for head in server.asked)
        assert not any("cookie" in head.lower() or "authorization" in head.lower() for head in server.asked)
        untrusting = replace(server.fetcher, network=LocalNetwork())
        assert "cannot be asked" in await refusal(untrusting, server.address("/one"))


async def test_an_ipv4_address_goes_first_and_an_empty_path_is_the_root(tmp_path: Path) -> None:
    answers = {"": answer(png()), "?x": answer(jpeg())}
    async with open_server(tmp_path, **answers) as server:
        both = ("::ffff:127.0.0.2", "127.0.0.1")
        network = replace(server.network, addresses=both, allowed=both)
        fetcher = replace(server.fetcher, network=network)
        asked = [(server.address(target), FIELD) for target in ("", "?x")]
        assert await fetcher.fetch_all(asked, always) == [png(), jpeg()]


async def test_names_that_lead_elsewhere_are_not_dialled(tmp_path: Path) -> None:
    async with open_server(tmp_path, one=answer(png())) as server:

        async def leads(*addresses: str) -> str:
            network = replace(server.network, addresses=addresses)
            return await refusal(replace(server.fetcher, network=network), server.address("/one"))

        for addresses in (("10.0.0.1",), ("127.0.0.1", "10.0.0.1"), ()):
            assert "no public address" in await leads(*addresses)
        unknown = server.address("/one").replace(NAME, "elsewhere.test")
        assert await refusal(server.fetcher, unknown) == await leads("10.0.0.1")
        assert not server.asked
    real = PictureFetcher()
    for host in ("127.0.0.1", "localhost", "[::1]", "169.254.169.254", "2130706433", "0x7f.1"):
        assert await refusal(real, f"https://{host}/")


@pytest.mark.parametrize(
    "url",
    [
        "https://",
        "https://pictures.test:22/one",
        "https://user@pictures.test/one",
        "https://pictures.test:99999/one",
        "https://pictures.test/\r\nX: y",
        "https://pictures.test/é",
        "https://[::1/one",
        "https://pictures.test/" + "x" * 5000,
    ],
)
async def test_addresses_of_another_form_are_refused(tmp_path: Path, url: str) -> None:
    async with open_server(tmp_path) as server:
        assert "address" in await refusal(server.fetcher, url)
        assert not server.asked


async def test_redirects_are_checked_like_the_first_address(tmp_path: Path) -> None:
    def to(where: str) -> bytes:
        return answer(b"", "302 Found", f"Location: {where}")

    answers = {
        "good": to("/one"),
        "one": answer(png()),
        "round": to("/round"),
        "http": to(f"http://{NAME}/one"),
        "inside": to("https://10.0.0.1/"),
        "file": to("file:///etc/passwd"),
        "nowhere": to(""),
    }
    async with open_server(tmp_path, **answers) as server:
        assert await server.fetcher.fetch_all([(server.address("/good"), FIELD)], always) == [png()]
        server.asked.clear()
        assert "redirects" in await refusal(server.fetcher, server.address("/round"))
        assert len(server.asked) == REDIRECTS_MAX + 1
        for name in ("http", "inside", "file"):
            assert "address" in await refusal(server.fetcher, server.address(f"/{name}"))
        assert await refusal(server.fetcher, server.address("/nowhere"))


async def test_what_is_too_large_too_slow_or_no_answer_is_given_up(tmp_path: Path) -> None:
    answers = {
        "missing": answer(b"", "404 Not Found"),
        "large": answer(bytes(PICTURE_BYTES_MAX + 1)),
        "largest": answer(bytes(PICTURE_BYTES_MAX)),
        "junk": b"junk\r\n\r\n",
        "short": answer(png()).replace(b"Content-Length: ", b"Content-Length: 9"),
        "one": answer(png()),
    }
    async with open_server(tmp_path, **answers) as server:
        assert "status 404" in await refusal(server.fetcher, server.address("/missing"))
        assert "larger than 32 MiB" in await refusal(server.fetcher, server.address("/large"))
        (largest,) = await server.fetcher.fetch_all([(server.address("/largest"), FIELD)], always)
        assert len(largest) == PICTURE_BYTES_MAX
        for name in ("junk", "short"):
            assert "cannot be asked" in await refusal(server.fetcher, server.address(f"/{name}"))
        with pytest.raises(Overloaded):
            await server.fetcher.fetch_all([(server.address("/one"), FIELD)], lambda n_bytes: False)
        hasty = replace(server.fetcher, deadline_s=0.2)
        assert "within 0.2 s" in await refusal(hasty, server.address("/never"))


async def test_a_request_is_answered_with_what_was_fetched(tmp_path: Path) -> None:
    async with open_server(tmp_path, one=answer(png(3, 2)), html=answer(b"<html>")) as server:

        async def sizes(*names: str) -> list[int]:
            body = shows(*(server.address(f"/{name}") for name in names))
            pictures = chat_call(decode_body(msgspec.json.encode(body), ChatRequest)).pictures
            await pictures.fetch(server.fetcher, always)
            return [picture.width for picture in pictures.parse().by_marker.values()]

        assert await sizes("one", "one") == [3, 3]
        with pytest.raises(InvalidRequest, match="HTML") as caught:
            await sizes("one", "html")
        assert caught.value.field == "messages[0].content[1].image_url.url"


async def give_sight(stand: Stand, folder: Path) -> None:
    """A projector for the guide, which nobody opens."""
    file = folder / "mmproj.gguf"
    file.write_bytes(b"GGUF")
    found = file.stat()
    attached = Projector(
        path=str(file),
        size_bytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        blake3="ab" * 32,
        family="janus_pro",
        n_embd=256,
    )
    entry = await stand.node.models.find("guide")
    await trio.to_thread.run_sync(stand.catalogue.attach, entry.model_id, attached)


def shows(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "guide", "messages": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize("may_fetch", [False, True])
async def test_only_where_it_is_allowed_anything_is_fetched(tmp_path: Path, may_fetch: bool) -> None:
    config = Config(api=ApiTable(port=0, fetch_images=may_fetch))
    async with serve_node(tmp_path, config=config) as stand:
        await give_sight(stand, tmp_path)
        answered = await stand.http.post("/v1/chat/completions", json=shows("https://127.0.0.1/a.png"))
        assert answered.status_code == 400
        error = answered.json()["error"]
        assert error["param"] == "messages[0].content[0].image_url.url"
        assert ("no public address" if may_fetch else "api.fetch_images") in error["message"]
        assert not stand.pipelines.calls


async def test_what_is_fetched_takes_room_of_its_clients_bodies_until_the_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = png() + bytes(15_000)
    config = Config(api=ApiTable(port=0, fetch_images=True))
    limits = HttpLimits(body_bytes=20_000, bodies_bytes=40_000, bodies_bytes_of_client=20_000)
    async with open_server(tmp_path, one=answer(picture)) as server:
        monkeypatch.setattr("swarmllm.api.http.app.PictureFetcher", lambda: server.fetcher)
        async with serve_node(tmp_path, config=config, limits=limits) as stand:
            await give_sight(stand, tmp_path)
            one = server.address("/one")
            for urls, status in (((one,), 200), ((one, one), 429), ((one,), 200)):
                answered = await stand.http.post("/v1/chat/completions", json=shows(*urls))
                assert answered.status_code == status, answered.text
            for call in stand.pipelines.calls:
                assert [each.data for each in call.prompt.pictures.by_marker.values()] == [picture]
