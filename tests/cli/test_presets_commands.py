"""models alias, preset, create: what is sent, and what is refused before anything is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import Result
from fake_node import FakeNode, ndjson

Run = Callable[..., Result]
PRESET = {"system": "Be brief.", "sampling": {"temperature": 0.2}}
TOML = 'system = "Be brief."\n\n[sampling]\ntemperature = 0.2\n'


def test_alias_sends_the_new_name(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/guide/alias", {"name": "guide"})
    assert run("models", "alias", "guide", "helper").stdout == "helper is guide now.\n"
    assert node.bodies("/api/admin/models/guide/alias") == [{"name": "helper"}]


def test_a_preset_is_shown_as_the_file_that_would_set_it(run: Run, node: FakeNode, tmp_path: Path) -> None:
    node.on("GET", "/api/admin/models/guide/preset", PRESET)
    node.on("POST", "/api/admin/models/guide/preset", PRESET)
    shown = run("models", "preset", "guide").stdout
    assert shown == TOML
    file = tmp_path / "preset.toml"
    file.write_text(shown)
    assert "its preset is set" in run("models", "preset", "guide", "--file", str(file)).stdout
    node.on("POST", "/api/admin/models/guide/preset", {})
    assert "its preset is removed" in run("models", "preset", "guide", "--clear").stdout
    assert node.bodies("/api/admin/models/guide/preset")[1:] == [PRESET, {}]


def test_a_wrong_preset_is_refused_before_it_is_sent(run: Run, node: FakeNode, tmp_path: Path) -> None:
    file = tmp_path / "preset.toml"
    file.write_text("[sampling]\ntemperature = 'hot'\n")
    result = run("models", "preset", "guide", "--file", str(file))
    assert result.exit_code == 1
    assert "sampling.temperature" in " ".join(result.stderr.split())
    assert node.requests == []


def test_a_modelfile_becomes_a_name_with_a_preset(run: Run, node: FakeNode, tmp_path: Path) -> None:
    node.on("GET", "/api/admin/models/guide/preset", {"sampling": {"temperature": 0.9, "top_k": 7}})
    node.on("POST", "/api/admin/models/guide/alias", {"name": "guide"})
    node.on("POST", "/api/admin/models/brief/preset", PRESET)
    file = tmp_path / "Modelfile"
    file.write_text("FROM guide:latest\nSYSTEM Be brief.\nPARAMETER temperature 0.2\nPARAMETER num_gpu 1\n")
    said = run("models", "create", "brief", "-f", str(file)).stdout
    assert "brief is guide with its own preset." in said
    assert "Without effect here: PARAMETER num_gpu." in said
    # What the Modelfile does not say is as the model in FROM has it.
    merged = {"system": "Be brief.", "sampling": {"temperature": 0.2, "top_k": 7}}
    assert node.bodies("/api/admin/models/brief/preset") == [merged]
    file.write_text("FROM guide\nTEMPLATE {{ .Tools }}\n")
    node.requests.clear()
    refused = run("models", "create", "brief", "-f", str(file))
    assert refused.exit_code == 1
    assert "line 2: TEMPLATE" in " ".join(refused.stderr.split())
    assert node.requests == []
    assert run("models", "create", "brief", "-f", str(file), "--own-template").exit_code == 0


def test_a_file_in_from_is_added_first(run: Run, node: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "Modelfile").write_text("FROM ./m.gguf\n")
    node.on("POST", "/api/admin/models", ndjson({"type": "result", "model": {"name": "m"}}))
    node.on("POST", "/api/admin/models/m/alias", {"name": "m"})
    node.on("POST", "/api/admin/models/mine/preset", {})
    assert run("models", "create", "mine", "-f", str(tmp_path / "Modelfile")).exit_code == 0
    assert node.bodies("/api/admin/models") == [{"path": str(tmp_path / "m.gguf")}]
    assert node.bodies("/api/admin/models/m/alias") == [{"name": "mine"}]
