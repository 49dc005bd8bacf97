"""Keys and HTTPS over real connections."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trio
from api_fakes import Stand, open_node, serve_node
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from deadlines import DEADLINE_S

from swarmllm.api.http import auth
from swarmllm.api.http.endpoint import open_api
from swarmllm.cli.client import Client, DaemonUnreachable
from swarmllm.config import ApiTable
from swarmllm.errors import ConfigError
from swarmllm.keys import KeyFile

STATS, MODELS = "/api/admin/stats", "/v1/models"


@asynccontextmanager
async def serve(folder: Path, **api: object) -> AsyncIterator[tuple[Stand, str]]:
    async with open_node(folder) as stand:
        config = replace(stand.config, api=ApiTable(port=0, **api))  # type: ignore[arg-type]
        async with open_api(stand.node, config, KeyFile(folder)) as url:
            yield stand, url


def client(url: str, verify: ssl.SSLContext | bool = False) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=DEADLINE_S, verify=verify)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_key_has_its_tier_and_its_rate(tmp_path: Path) -> None:
    _, guest = KeyFile(tmp_path).create("guest", tier="bronze", rate_limit=1)
    async with serve(tmp_path) as (stand, url), client(url) as http:
        await stand.load_guide()
        body = {"model": "guide", "messages": [{"role": "user", "content": "hi"}]}
        answers = [
            await http.post("/v1/chat/completions", json=body | {"stream": stream}, headers=bearer(guest))
            for stream in (False, True)
        ]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert 55 <= int(answers[1].headers["Retry-After"]) <= 60
        assert stand.node.admission.refused == {("bronze", "rate"): 1}


@pytest.mark.slow
async def test_each_key_opens_what_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, user = KeyFile(tmp_path).create("user")
    _, admin = KeyFile(tmp_path).create("operator", is_admin=True)
    async with serve(tmp_path) as (_, url), client(url) as http:
        statuses = {
            (path, name): (await http.get(path, headers=headers)).status_code
            for path in (STATS, MODELS, "/metrics", "/health", "/health/ready")
            for name, headers in {
                "none": {},
                "wrong": bearer(user[:-1]),
                "basic": {"Authorization": f"Basic {user}"},
                "user": bearer(user),
                "x-api-key": {"x-api-key": user},
                "admin": bearer(admin),
            }.items()
        }
        readiness = {
            name: await http.get("/health/ready", params=asked, headers=headers)
            for name, asked, headers in (
                ("anybody", {}, {}),
                ("user", {}, bearer(user)),
                ("anybody, model", {"model": "guide"}, {}),
                ("wrong, model", {"model": "guide"}, bearer(user[:-1])),
                ("user, model", {"model": "guide"}, bearer(user)),
            )
        }
        refused = await http.get(MODELS)
        anthropic = await http.post("/v1/messages", json={})
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["type"] == "authentication_error"
    assert anthropic.json()["error"]["type"] == "authentication_error"
    for name in ("none", "wrong", "basic"):
        assert {statuses[path, name] for path in (STATS, MODELS, "/metrics")} == {401}
        assert {statuses[path, name] for path in ("/health", "/health/ready")} == {200}
    for name in ("user", "x-api-key"):
        assert (statuses[STATS, name], statuses[MODELS, name], statuses["/metrics", name]) == (403, 200, 200)
    assert statuses[STATS, "admin"] == 200
    assert "models" not in readiness["anybody"].json()
    assert [model["name"] for model in readiness["user"].json()["models"]] == ["guide"]
    assert readiness["anybody, model"].status_code == readiness["wrong, model"].status_code == 401
    assert readiness["user, model"].json()["model"]["name"] == "guide"
    assert user not in caplog.text
    assert admin not in caplog.text


@pytest.mark.slow
async def test_keys_come_and_go_while_the_node_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "REFRESH_EVERY_S", 0)
    keys = KeyFile(tmp_path)
    async with serve(tmp_path) as (_, url), client(url) as http:
        assert (await http.get(MODELS)).status_code == 200
        _, secret = keys.create("user")
        assert (await http.get(MODELS)).status_code == 401
        assert (await http.get(MODELS, headers=bearer(secret))).status_code == 200
        # A key does not make another site's page welcome, but any name of this machine.
        foreign = bearer(secret) | {"Origin": "https://evil.com"}
        assert (await http.get(MODELS, headers=foreign)).status_code == 403
        assert (await http.get(MODELS, headers=bearer(secret) | {"Host": "node.example"})).status_code == 200
        keys.path.write_text("damaged")
        assert (await http.get(MODELS, headers=bearer(secret))).status_code == 200
        assert (await http.get(MODELS)).status_code == 401
        keys.path.unlink()
        assert (await http.get(MODELS)).status_code == 200
        assert (await http.get(MODELS, headers={"Host": "node.example"})).status_code == 403


@pytest.mark.slow
async def test_other_machines_are_served_with_keys_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "REFRESH_EVERY_S", 0)
    keys = KeyFile(tmp_path)
    async with open_node(tmp_path) as stand:
        config = replace(stand.config, api=ApiTable(port=0, host="0.0.0.0"))
        with pytest.raises(ConfigError, match="swarmllm key create"):
            async with open_api(stand.node, config, keys):
                pass
        _, secret = keys.create("user")
        async with open_api(stand.node, config, keys) as url, client(url) as http:
            assert url.startswith("http://127.0.0.1:")
            assert (await http.get(MODELS, headers=bearer(secret))).status_code == 200
            keys.revoke("user")
            assert (await http.get(MODELS, headers=bearer(secret))).status_code == 401
            assert (await http.get(MODELS)).status_code == 401


def write_certificate(folder: Path) -> tuple[str, str]:
    """For 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test node")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    keyfile.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return str(certfile), str(keyfile)


@pytest.mark.slow
async def test_https_is_served_from_certificate_files(tmp_path: Path) -> None:
    certfile, keyfile = write_certificate(tmp_path)
    hello = {"model": "guide", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    trusting = ssl.create_default_context(cafile=certfile)
    async with serve(tmp_path, certfile=certfile, keyfile=keyfile) as (_, url), client(url, trusting) as http:
        assert url.startswith("https://127.0.0.1:")
        answer = await http.post("/v1/chat/completions", json=hello)
        assert answer.http_version == "HTTP/1.1"
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
async def test_the_command_line_trusts_a_certificate_of_ones_own_making_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certfile, keyfile = write_certificate(tmp_path)

    def models(url: str) -> object:
        with Client(url) as command_line:
            return command_line.get(MODELS)

    async with serve(tmp_path, certfile=certfile, keyfile=keyfile) as (_, url):
        with pytest.raises(DaemonUnreachable, match="SSL_CERT_FILE"):
            await trio.to_thread.run_sync(models, url)
        monkeypatch.setenv("SSL_CERT_FILE", certfile)
        assert await trio.to_thread.run_sync(models, url)


@pytest.mark.slow
async def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    certfile, keyfile = write_certificate(tmp_path)
    nothing = str(tmp_path / "nothing.pem")
    for files, key in (
        ({"certfile": certfile}, "api.keyfile"),
        ({"keyfile": keyfile}, "api.certfile"),
        ({"certfile": nothing, "keyfile": keyfile}, "api.certfile"),
        ({"certfile": keyfile, "keyfile": certfile}, "api.certfile"),
    ):
        async with open_node(tmp_path) as stand:
            config = replace(stand.config, api=ApiTable(port=0, **files))
            with pytest.raises(ConfigError, match=key):
                async with open_api(stand.node, config):
                    pass


@pytest.mark.parametrize(("path", "field"), [("/v1/embeddings", "input"), ("/api/embed", "input")])
async def test_embeddings_count_for_the_key_that_asks(tmp_path: Path, path: str, field: str) -> None:
    keys = KeyFile(tmp_path)
    _, secret = keys.create("limited", rate_limit=1)
    async with (
        serve_node(tmp_path) as stand,
        open_api(stand.node, stand.config, keys) as url,
        client(url) as http,
    ):
        body = {"model": "guide", field: "hi"}
        statuses = [(await http.post(path, json=body, headers=bearer(secret))).status_code for _ in range(2)]
    assert statuses == [200, 429]
