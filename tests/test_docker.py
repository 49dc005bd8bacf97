"""The files for containers say what the rest of the project says. Docker itself is not needed here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest

from swarmllm import bootstrap
from swarmllm.config import Config
from swarmllm.models.layers import LayerRange, covers

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "docs" / "docker" / "Dockerfile").read_text("utf-8")
COMPOSE = (ROOT / "docs" / "docker" / "compose.yaml").read_text("utf-8")
BUILD, RUN = (stage.replace("\\\n", " ") for stage in DOCKERFILE.split("\nFROM ")[-2:])


def test_the_image_is_built_from_all_that_the_distribution_has() -> None:
    copied = {
        path
        for line in re.findall(r"^COPY ([^-].*) /source/\S*$", BUILD, re.MULTILINE)
        for path in line.split()
    }
    for path in copied:
        assert (ROOT / path).exists(), f"COPY {path}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = {folder.split("/")[0] for folder in project["tool"]["setuptools"]["package-dir"].values()}
    # setup.py reads the description from README.md.
    files = {"pyproject.toml", "setup.py", "README.md", *project["project"]["license-files"]}
    assert copied == folders | files


def test_the_image_is_built_with_the_packages_that_make_run_installs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "compiles", lambda *_: False)
    monkeypatch.setattr(bootstrap, "VENV_PYTHON", tmp_path / "none")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with patch.object(Path, "rglob", return_value=iter(())), patch("importlib.util.find_spec"):
        missing = " ".join(bootstrap.missing_parts().values()).split()
    wanted = {re.sub(r"^python3\.\d+", "python3", package) for package in missing}
    (installed,) = re.findall(r"install -y --no-install-recommends (.*?)&&", BUILD)
    assert wanted | {"python3-venv", "python3"} == set(installed.split())


def test_the_image_has_the_ports_and_the_data_folder_of_the_configuration() -> None:
    defaults = Config()
    ports = {defaults.api.port, defaults.network.libp2p_port, defaults.network.data_port}
    (exposed,) = re.findall(r"^EXPOSE (.*)$", RUN, re.MULTILINE)
    assert {int(port) for port in exposed.split()} == ports
    assert f"http://127.0.0.1:{defaults.api.port}/health'" in RUN
    (data_dir,) = re.findall(r"SWARMLLM_NODE_DATA_DIR=(\S+)", RUN)
    assert re.findall(r"^VOLUME (.*)$", RUN, re.MULTILINE) == [data_dir]
    assert set(re.findall(r"volumes: \[\"\w+:(.*?)\"\]", COMPOSE)) == {data_dir}


def test_the_nodes_of_compose_hold_all_layers_of_the_bundled_model() -> None:
    held = [LayerRange.parse(layers) for layers in re.findall(r'--load, "guide:(.*?)"', COMPOSE)]
    assert len(held) == 3
    assert covers(held, LayerRange(0, 12))
