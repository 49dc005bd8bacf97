"""What an index and its users get: a source distribution, and a wheel that is built from nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from swarmllm import __version__

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = {"swarmllm": "swarmllm", "workers": "swarmllm_workers", "proto": "swarmllm_proto"}
FILES: Final = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
URL: Final = "https://git.example/swarmllm"
HOOK: Final = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
NOT_OURS: Final = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build")
HOOK_S: Final = 120
SETUPTOOLS_MIN: Final = 77
"""As pyproject.toml asks."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        int(version("setuptools").partition(".")[0]) < SETUPTOOLS_MIN,
        reason="setuptools is too old: `make test` installs a newer one",
    ),
]


class Built(NamedTuple):
    sources: frozenset[str]
    """Files of the source distribution."""
    contents: frozenset[str]
    """Files of the wheel, except for those about itself."""
    tag: str
    metadata: Message
    description: str


def call(hook: str, folder: Path, to: Path, url: str) -> None:
    # No compiler: what it makes is optional, and every installation shows whether it can be made.
    environment = os.environ | {"CC": "false", "SWARMLLM_PROJECT_URL": url}
    done = subprocess.run(
        [sys.executable, "-c", HOOK, hook, str(to)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HOOK_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def copied_tree(folder: Path) -> Path:
    """What a build needs, where it can leave things behind."""
    tree = folder / "tree"
    tree.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=NOT_OURS)
    return tree


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel is built from the source distribution alone, and nobody tells it the address."""
    folder = tmp_path_factory.mktemp("distribution")
    call("build_sdist", copied_tree(folder), folder, URL)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        sources = {each.name.partition("/")[2] for each in archive if each.isfile()}
        archive.extractall(folder, filter="data")
    unpacked = folder / source.name.removesuffix(".tar.gz")
    call("build_wheel", unpacked, folder, "")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as zipped:
        about = f"swarmllm-{__version__}.dist-info/"
        contents = {name for name in zipped.namelist() if not name.startswith(about)}
        metadata = HeaderParser().parsestr(zipped.read(f"{about}METADATA").decode())
    assert HeaderParser().parsestr((unpacked / "PKG-INFO").read_text("utf-8")).items() == metadata.items()
    tag = wheel.stem.removeprefix(f"swarmllm-{__version__}-")
    return Built(frozenset(sources), frozenset(contents), tag, metadata, metadata.get_payload())


def tracked() -> set[str]:
    """What the packages consist of in this tree."""
    done = subprocess.run(
        ["git", "ls-files", *(f"{folder}/{package}" for folder, package in FOLDERS.items()), "swarmllm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("not a git repository")
    return set(done.stdout.splitlines())


def test_the_source_distribution_has_all_files_of_the_packages_and_no_others(built: Built) -> None:
    made = {"PKG-INFO", "setup.cfg"}
    others = {name for name in built.sources if name.startswith("swarmllm.egg-info/")}
    assert built.sources - others - made == tracked() | set(FILES)


def test_the_wheel_has_all_files_of_the_packages_and_no_others(built: Built) -> None:
    folders = [f"{folder}/" for folder in FOLDERS if folder != "swarmllm"]
    expected = set()
    for name in tracked():
        folder = next((each for each in folders if name.startswith(each)), "")
        expected.add(name.removeprefix(folder))
    assert built.contents == expected


def test_one_wheel_is_for_every_python_of_its_platform(built: Built) -> None:
    assert re.fullmatch(r"py3-none-(linux|macosx)_\w+", built.tag)


def test_an_index_shows_where_the_project_is(built: Built) -> None:
    urls = dict(line.split(", ", 1) for line in built.metadata.get_all("Project-URL", []))
    assert urls == {
        "Source": URL,
        "Documentation": f"{URL}/blob/v{__version__}/docs/README.md",
        "Changelog": f"{URL}/blob/v{__version__}/CHANGELOG.md",
    }
    assert (built.metadata["License-Expression"], built.metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert built.metadata["Version"] == __version__
    assert "libp2p" in built.metadata["Keywords"].split(",")
    assert "Operating System :: POSIX :: Linux" in built.metadata.get_all("Classifier", [])


def test_links_of_the_description_lead_to_files_at_the_tag_of_the_version(built: Built) -> None:
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]+)\)", built.description)
    assert all(target.startswith("https://") for target in targets)
    own = [target.removeprefix(f"{URL}/") for target in targets if target.startswith(URL)]
    assert f"raw/v{__version__}/docs/dashboard.png" in own
    for target in own:
        path = re.fullmatch(rf"(?:raw|blob)/v{re.escape(__version__)}/([^#]+)(?:#.*)?", target)
        assert path is not None, target
        assert (ROOT / path[1]).exists(), target


def test_without_an_address_the_description_has_no_links_that_lead_nowhere(tmp_path: Path) -> None:
    call("prepare_metadata_for_build_wheel", copied_tree(tmp_path), tmp_path, "")
    (file,) = tmp_path.glob("*.dist-info/METADATA")
    metadata = HeaderParser().parsestr(file.read_text("utf-8"))
    assert metadata.get_all("Project-URL") is None
    description = metadata.get_payload()
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]+)\)", description))
    assert "start with the first ten minutes or the quickstart" in description
