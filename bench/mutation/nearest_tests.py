"""Which test files are run for a changed module: by imports, nearest first, none that starts daemons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PRODUCT = {"swarmllm": ".", "swarmllm_workers": "workers", "swarmllm_proto": "proto"}
"""Package -> the folder it lies in."""
TEST_ROOTS = (
    "tests/swarm",
    "tests/pipeline",
    "tests/scheduling",
    "tests/transfer",
    "tests/workers",
    "tests/node",
)
TEST_FILES = (
    "tests/test_log_limit.py",
    "tests/test_supervision.py",
    "tests/test_transfer.py",
    "tests/api/test_http_limits.py",
    "tests/api/test_admission.py",
)
STARTS_PROCESSES = {"subprocess", "multiprocessing", "running_daemon", "daemon_process"}
"""A test file that imports one of these is too slow here and depends on the machine."""
DISTANCE_MAX = 3
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
"""What has statements in it."""


@dataclass(frozen=True)
class TestMap:
    """Test files by how far their imports are from a module: 0 for a file that imports it itself."""

    importers: dict[str, set[str]]
    """Product module -> the product modules that import it."""
    tests: dict[str, set[str]]
    """Test file -> the product modules that it or its helpers import."""
    fixtures: dict[str, set[str]]
    """Test file -> the product modules that the conftest beside it imports, of which it may use parts."""

    def nearest(self, module: str) -> list[str]:
        """Test files that may notice a change of the module, the most direct ones first."""
        distances = {module: 0}
        edge = [module]
        for distance in range(1, DISTANCE_MAX + 1):
            edge = [x for y in edge for x in self.importers.get(y, ()) if x not in distances]
            distances |= dict.fromkeys(edge, distance)
        reached = {}
        for test, imported in self.tests.items():
            direct = [distances[x] for x in imported & distances.keys()]
            by_fixtures = [distances[x] + 1 for x in self.fixtures[test] & distances.keys()]
            if direct or by_fixtures:
                reached[test] = min([*direct, *by_fixtures])
        return sorted(reached, key=lambda test: (reached[test], len(self.tests[test]), test))


def test_map(tree: Path) -> TestMap:
    """Reads every product module and every candidate test file under `tree`, each once."""
    _imports.cache_clear()
    _helpers.cache_clear()
    product = {
        _dotted(path.relative_to(tree / folder)): path
        for package, folder in PRODUCT.items()
        for path in sorted((tree / folder / package).rglob("*.py"))
    }
    importers: dict[str, set[str]] = {}
    for name, path in product.items():
        for imported in _imports(path, name) & product.keys():
            importers.setdefault(imported, set()).add(name)
    files = [path for root in TEST_ROOTS for path in sorted((tree / root).rglob("test_*.py"))]
    tests, fixtures = {}, {}
    for path in [*files, *(tree / x for x in TEST_FILES)]:
        if not _imports(path, "") & STARTS_PROCESSES:
            name, conftest = str(path.relative_to(tree)), path.parent / "conftest.py"
            tests[name] = _with_helpers(path, tree) & product.keys()
            fixtures[name] = _imports(conftest, "") & product.keys() if conftest.is_file() else set()
    return TestMap(importers, tests, fixtures)


def _with_helpers(path: Path, tree: Path) -> set[str]:
    """Names that a test file imports, also through the modules beside it that it takes its parts from."""
    found, left, seen = set[str](), [path], set[Path]()
    while left:
        file = left.pop()
        seen.add(file)
        found |= _imports(file, _dotted(file.relative_to(tree)))
        left += [x for x in _helpers(file, tree) if x not in seen and x not in left]
    return found


@cache
def _helpers(importer: Path, tree: Path) -> tuple[Path, ...]:
    """The helper modules that a test file imports, as `tests.swarm.handlers`, but no conftest."""
    names = _imports(importer, _dotted(importer.relative_to(tree)))
    beside = [name for name in names if "." not in name]
    candidates = [tree / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
    for folder in (importer.parent, tree / "tests", tree / "tests/models"):
        candidates += [folder / f"{name}.py" for name in beside]
    return tuple(path for path in candidates if path.name != "conftest.py" and path.is_file())


@cache
def _imports(path: Path, name: str) -> frozenset[str]:
    """Every dotted name that the file imports: `from a.b import c` counts as a.b and as a.b.c."""
    found = set[str]()
    for node in _statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All of them, at any depth, and not what they compute: in expressions nothing is imported."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left += (x for x in ast.iter_child_nodes(node) if isinstance(x, BLOCKS))


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
