"""API keys on disk, and the daemon's view of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarmllm.errors import ConfigError, Conflict, InvalidRequest
from swarmllm.keys import KeyFile, KeyRing


def test_a_key_is_found_by_its_secret_until_it_is_revoked(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    ring = KeyRing(file)
    ring.refresh()
    assert not ring.is_required
    laptop, secret = file.create("laptop")
    other, other_secret = file.create("operator", is_admin=True)
    ring.refresh()
    assert ring.is_required
    assert ring.find(secret) == laptop
    assert ring.find(other_secret) == other
    assert [ring.find(wrong) for wrong in ("", secret[:-1], secret + "x", laptop.sha256, "\udc80")] == [
        None
    ] * 5
    assert file.revoke(laptop.id) == laptop
    ring.refresh()
    assert ring.find(secret) is None
    assert file.revoke("operator") == other
    ring.refresh()
    assert not ring.is_required
    assert KeyRing(file, is_required=True).is_required


def test_the_secret_is_nowhere_on_disk_and_the_file_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    _, secret = KeyFile(folder).create("laptop")
    content = b"".join(file.read_bytes() for file in folder.iterdir())
    assert secret.encode() not in content
    assert secret.removeprefix("sk-swarm-").encode() not in content
    assert {file.stat().st_mode & 0o077 for file in folder.iterdir()} == {0}


def test_names_are_unique_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    file.create("laptop")
    with pytest.raises(Conflict, match="revoke it first"):
        file.create("laptop")
    with pytest.raises(InvalidRequest, match="no key 'phone'"):
        file.revoke("phone")
    assert [key.name for key in file.list()] == ["laptop"]


def test_keys_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    names = [f"key-{i}" for i in range(12)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda name: KeyFile(tmp_path).create(name), names))
    assert sorted(key.name for key in KeyFile(tmp_path).list()) == sorted(names)


@pytest.mark.parametrize("damage", [b"", b"{}", b'[{"id": 1}]', b"\xff"])
def test_a_damaged_file_opens_no_door(tmp_path: Path, damage: bytes) -> None:
    file = KeyFile(tmp_path)
    _, secret = file.create("laptop")
    ring = KeyRing(file)
    ring.refresh()
    file.path.write_bytes(damage)
    with pytest.raises(ConfigError, match="Cannot read the keys"):
        ring.refresh()
    assert ring.find(secret) is not None
    assert ring.is_required
