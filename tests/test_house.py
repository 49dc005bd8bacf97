"""The rules of the house, read from the imports of every source file.

Each rule is a function from the parsed tree to violations ("file:line: what"), so that a broken rule says
where; and each rule is shown to bite on a small tree made for it, because a rule that reads nothing would
pass for ever."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "swarmllm": "swarmllm",
    "swarmllm_workers": "workers/swarmllm_workers",
    "swarmllm_proto": "proto/swarmllm_proto",
}

LAYERS = (
    "swarmllm.__main__",
    "swarmllm.cli",
    "swarmllm.bootstrap_node",
    "swarmllm.daemon",
    "swarmllm.daemon_settings",
    "swarmllm.reloading",
    "swarmllm.api",
    "swarmllm.node",
    "swarmllm.pipeline",
    "swarmllm.workerpool",
    "swarmllm.downloads",
    "swarmllm.transfer",
    "swarmllm.swarm",
    "swarmllm.scheduling",
    "swarmllm.models",
    "swarmllm.guide",
    "swarmllm.config_reference",
    "swarmllm.config_sources",
    "swarmllm.log_output",
    "swarmllm.config",
    "swarmllm.keys",
    "swarmllm.sd_notify",
    "swarmllm.loop_watchdog",
    "swarmllm.shared_ticks",
    "swarmllm.supervision",
    "swarmllm.memory_info",
    "swarmllm.process_use",
    "swarmllm.operating_system",
    "swarmllm.control_group",
    "swarmllm.database",
    "swarmllm.private_files",
    "swarmllm.log_filter",
    "swarmllm.log_limit",
    "swarmllm.host_names",
    "swarmllm.state_table",
    "swarmllm.pictures",
    "swarmllm.sounds",
    "swarmllm.left_out",
    "swarmllm.errors",
    "swarmllm_workers.__main__",
    "swarmllm_workers.server",
    "swarmllm_workers.schedule",
    "swarmllm_workers.ring",
    "swarmllm_workers.speculation",
    "swarmllm_workers",
    "swarmllm_proto",
    "swarmllm.bootstrap",
    "swarmllm.local_wheels",
    "swarmllm.pip_progress",
)
"""Top to bottom: a module imports from its own entry and from those below it."""

PURE = (
    "swarmllm.api.http.limits",
    "swarmllm.scheduling",
    "swarmllm.swarm.peers.peer_table",
    "swarmllm.log_limit",
    "swarmllm.pictures",
    "swarmllm.sounds",
    "swarmllm.transfer.fetch_plan",
    "swarmllm.downloads.digest_book",
    "swarmllm.downloads.source",
    "swarmllm.downloads.digest_book",
    "swarmllm.pipeline.route.assembly",
    "swarmllm.pipeline.check.verdict",
    "swarmllm.pipeline.job",
    "swarmllm.pipeline.prefix.choice",
    "swarmllm.pipeline.repair.plan",
    "swarmllm.pipeline.processor",
    "swarmllm.pipeline.stage.lifecycle",
    "swarmllm.state_table",
    "swarmllm.supervision.policy",
    "swarmllm.supervision.table",
)
IMPURE_IMPORTS = (
    *(
        "trio",
        "asyncio",
        "anyio",
        "threading",
        "subprocess",
        "socket",
        "select",
        "signal",
        "os",
        "io",
        "pathlib",
    ),
    *("time", "datetime", "random", "secrets", "uuid", "httpx", "sqlite3", "logging"),
    *("swarmllm.swarm", "swarmllm.workerpool", "swarmllm.api", "swarmllm.node", "swarmllm.daemon"),
)

ONLY_HOME = {
    "libp2p": ("swarmllm.swarm",),
    "multiaddr": ("swarmllm.swarm",),
    "noise": ("swarmllm.swarm",),
    "quart": ("swarmllm.api",),
    "quart_trio": ("swarmllm.api",),
    "h11": ("swarmllm.api",),
    "hypercorn": ("swarmllm.api",),
    "llama_cpp": ("swarmllm_workers",),
    "gguf": ("swarmllm.models", "swarmllm.guide", "swarmllm_workers"),
    "torch": ("swarmllm.guide",),
    "tokenizers": ("swarmllm.guide",),
}
"""Foreign library -> the only packages that may import it."""

BEFORE_INSTALLATION = ("swarmllm.bootstrap", "swarmllm.local_wheels", "swarmllm.pip_progress")

PROTO_MAY_IMPORT = ("swarmllm_proto", "msgspec", "numpy", "blake3", "zstandard")
PROTO_NEVER = (
    "asyncio",
    "socket",
    "select",
    "selectors",
    "threading",
    "subprocess",
    "time",
    "random",
    "os",
    "io",
)
SAID_TWICE = (
    # What one side gives and the other asks for.
    *("ForwardResult", "NodeLoad"),
    # A field of that name in two dialects.
    *("NamedFunction", "AllowedTools"),
)
"""Names that two classes of one package may have."""
NEVER = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
CLI_NEVER_AT_IMPORT = (
    "libp2p",
    "multiaddr",
    "llama_cpp",
    "quart",
    "hypercorn",
    "swarmllm.daemon",
    "swarmllm.swarm",
)
SYSTEM = ("swarmllm.operating_system", "swarmllm_workers.operating_system")
LINUX_ONLY = {
    r"pidfd_\w+|SO_PEERCRED|prctl|sched_[gs]etaffinity|eventfd\w*|epoll|fdatasync": SYSTEM,
    r"TCP_USER_TIMEOUT|MSG_CMSG_CLOEXEC|SOCK_(NONBLOCK|CLOEXEC)": SYSTEM,
    r"madvise|MADV_\w+": ("swarmllm_workers.engine.huge_pages",),
    r"memfd_create|MFD_\w+": ("swarmllm_workers.engine.shared_weights",),
    r"inotify\w*|MAP_HUGETLB|splice|landlock\w*": (),
    r"/?(proc|sys)/.*": (
        *SYSTEM,
        "swarmllm.memory_info",
        "swarmllm.control_group",
        "swarmllm.process_use",
        "swarmllm_workers.engine.memory",
        "swarmllm_workers.kernels.kernel_tuning",
        "swarmllm_workers.engine.shared_weights",
    ),
    r"systemctl|journalctl": ("swarmllm.cli.service", "swarmllm.cli.logs"),
    r"NOTIFY_SOCKET|WATCHDOG_USEC|JOURNAL_STREAM": ("swarmllm.sd_notify",),
}
"""Name of an attribute, or whole text of a string -> the only modules that use it: one for each matter, with
something else to do on another system."""
FIELD_TERMS = {
    "acquaintance": "peer lookup",
    "circumstances": "inputs",
    "courtesy": "pacing",
    "doorkeeper": "connection gater",
    "eyes": "encoder",
    "foresight": "prefetch",
    "heart": "keepalive",
    "hearts": "keepalive",
    "herald": "announcer",
    "judgement": "blame",
    "lasting": "permanent",
    "likeness": "similarity",
    "mend": "repair",
    "mended": "repaired",
    "mending": "repair",
    "news": "change",
    "outreach": "discovery",
    "patience": "timeout",
    "pay": "cost gate",
    "spelling": "detokenizer",
    "spoken": "supported",
    "thought": "reasoning",
    "thoughts": "reasoning",
    "whereabouts": "addresses",
}
"""Metaphor -> the term that developers of libp2p, vLLM or httpx know."""
MAX_LINES = 600
"""A bound against heaps; 400 lines are a reason to look whether a file holds one subject."""


@dataclass(frozen=True)
class Import:
    target: str
    """Dotted name; a name imported from a package counts as its submodule where there is one."""
    line: int
    at_import_time: bool
    """False inside a function and under `if TYPE_CHECKING`."""


@dataclass(frozen=True)
class Module:
    name: str
    path: str
    n_lines: int
    imports: tuple[Import, ...]
    calls: tuple[tuple[str, int], ...]
    """Names called directly, with their line."""
    classes: tuple[tuple[str, int], ...]
    """Of the module itself, with their line."""
    names: tuple[tuple[str, int], ...]
    """Everything that the module gives a name, with its line."""
    words: tuple[tuple[str, int], ...]
    """Attributes that are looked up, and strings other than docstrings, with their line."""


Tree = dict[str, Module]
Rule = Callable[[Tree], Iterator[str]]


def is_inside(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def module_name(package: str, relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def is_postponed(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def read_imports(
    node: ast.AST, package: str, names: set[str], at_import_time: bool = True
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # no import is inside of one
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_import_time)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = package.split(".")
                parents = parents[: len(parents) - child.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in child.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in names else base, child.lineno, at_import_time)
        else:
            yield from read_imports(child, package, names, at_import_time and not is_postponed(child))


def read_words(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value, node.lineno


def read_names(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.asname, node.lineno


def parse_tree(sources: dict[str, tuple[str, str]]) -> Tree:
    """From name -> (path, source). Raises SyntaxError, which names file and line as the rules do."""
    tree: Tree = {}
    for name, (path, source) in sources.items():
        parsed = ast.parse(source, path)
        nodes = list(ast.walk(parsed))
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        calls = tuple(
            (node.func.id, node.lineno)
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        )
        imports = tuple(read_imports(parsed, package, set(sources)))
        classes = tuple((each.name, each.lineno) for each in parsed.body if isinstance(each, ast.ClassDef))
        names, words = tuple(read_names(nodes)), tuple(read_words(nodes))
        tree[name] = Module(name, path, source.count("\n"), imports, calls, classes, names, words)
    return tree


@cache
def house() -> Tree:
    sources = {}
    for package, folder in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = module_name(package, file.relative_to(ROOT / folder))
            sources[name] = (str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    return parse_tree(sources)


def each_import(tree: Tree) -> Iterator[tuple[Module, Import]]:
    return ((module, imported) for module in tree.values() for imported in module.imports)


@cache
def layer_of(name: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if is_inside(name, [layer])), None)


def imports_point_down(tree: Tree) -> Iterator[str]:
    for module in tree.values():
        if module.name.startswith("swarmllm.") and layer_of(module.name) is None:
            yield f"{module.path}:1: {module.name} has no place in LAYERS"
    for module, imported in each_import(tree):
        mine, theirs = layer_of(module.name), layer_of(imported.target)
        if mine is not None and theirs is not None and theirs < mine:
            yield f"{module.path}:{imported.line}: {LAYERS[mine]} is below {imported.target}"


def imports_form_no_circle(tree: Tree) -> Iterator[str]:
    """Late imports count too: a circle that is only postponed is still one."""
    finished: set[str] = set()

    def walk(name: str, trail: list[str]) -> Iterator[str]:
        if name in finished:
            return
        for imported in tree[name].imports:
            if imported.target in trail:
                circle = " -> ".join([*trail[trail.index(imported.target) :], imported.target])
                yield f"{tree[name].path}:{imported.line}: {circle}"
            elif imported.target in tree:
                yield from walk(imported.target, [*trail, imported.target])
        finished.add(name)

    for name in tree:
        yield from walk(name, [name])


def cores_are_pure(tree: Tree) -> Iterator[str]:
    for module, imported in each_import(tree):
        if is_inside(module.name, PURE) and is_inside(imported.target, IMPURE_IMPORTS):
            yield f"{module.path}:{imported.line}: {module.name} is pure and may not import {imported.target}"


def foreign_libraries_stay_home(tree: Tree) -> Iterator[str]:
    for module, imported in each_import(tree):
        homes = ONLY_HOME.get(imported.target.partition(".")[0])
        if homes is not None and not is_inside(module.name, homes):
            yield f"{module.path}:{imported.line}: only {' and '.join(homes)} may import {imported.target}"


def proto_stands_alone(tree: Tree) -> Iterator[str]:
    for module, imported in each_import(tree):
        if not is_inside(module.name, ["swarmllm_proto"]):
            continue
        root = imported.target.partition(".")[0]
        known = root in sys.stdlib_module_names or root in PROTO_MAY_IMPORT
        if root in PROTO_NEVER or not known:
            yield f"{module.path}:{imported.line}: swarmllm_proto may not import {imported.target}"


def bootstrap_needs_nothing_installed(tree: Tree) -> Iterator[str]:
    for module, imported in each_import(tree):
        root = imported.target.partition(".")[0]
        there = root in sys.stdlib_module_names or is_inside(imported.target, BEFORE_INSTALLATION)
        if is_inside(module.name, BEFORE_INSTALLATION) and not there:
            yield f"{module.path}:{imported.line}: {imported.target} is not there yet"


def daemon_and_workers_meet_only_in_proto(tree: Tree) -> Iterator[str]:
    strangers = {"swarmllm_workers": ["swarmllm", "trio", "asyncio"], "swarmllm": ["swarmllm_workers"]}
    for module, imported in each_import(tree):
        for side, never in strangers.items():
            if is_inside(module.name, [side]) and is_inside(imported.target, never):
                yield f"{module.path}:{imported.line}: {side} may not import {imported.target}"


def cli_starts_light(tree: Tree) -> Iterator[str]:
    """Whatever the commands import while they are being imported themselves, however deep."""
    seen: set[str] = set()
    pending = [name for name in tree if is_inside(name, ["swarmllm.cli"])]
    while pending:
        name = pending.pop()
        if name in seen or name not in tree:
            continue
        seen.add(name)
        pending.append(name.rpartition(".")[0])
        for imported in tree[name].imports:
            if imported.at_import_time:
                pending.append(imported.target)
                if is_inside(imported.target, CLI_NEVER_AT_IMPORT):
                    yield f"{tree[name].path}:{imported.line}: every command would load {imported.target}"


def nothing_read_is_run(tree: Tree) -> Iterator[str]:
    for module, imported in each_import(tree):
        if is_inside(imported.target, NEVER):
            yield f"{module.path}:{imported.line}: {imported.target} runs what it reads"
    for module in tree.values():
        for name, line in module.calls:
            if name in ("eval", "exec"):
                yield f"{module.path}:{line}: {name}() runs what it reads"


def what_only_linux_has_is_asked_in_one_place(tree: Tree) -> Iterator[str]:
    homes = [(re.compile(pattern), modules) for pattern, modules in LINUX_ONLY.items()]
    for module in tree.values():
        for word, line in module.words:
            for pattern, modules in homes:
                if pattern.fullmatch(word) and module.name not in modules:
                    yield f"{module.path}:{line}: only {' and '.join(modules) or 'Linux'} may use {word}"


def files_are_room_sized(tree: Tree) -> Iterator[str]:
    for module in tree.values():
        if module.n_lines > MAX_LINES:
            yield f"{module.path}:{MAX_LINES + 1}: {module.n_lines} lines, split it"


def one_word_names_one_thing(tree: Tree) -> Iterator[str]:
    """Within the daemon, and within the workers. Private names and the guide's training are left out."""
    for package in ("swarmllm", "swarmllm_workers"):
        homes: dict[str, str] = {}
        for module in tree.values():
            if not is_inside(module.name, [package]) or is_inside(module.name, ["swarmllm.guide"]):
                continue
            for name, line in module.classes:
                home = homes.setdefault(name, module.name)
                if home != module.name and not name.startswith("_") and name not in SAID_TWICE:
                    yield f"{module.path}:{line}: {home} has a {name}, too"


def names_are_terms_of_the_field(tree: Tree) -> Iterator[str]:
    """In the names of modules and in all that they name. The guide's training is left out."""
    for module in tree.values():
        if is_inside(module.name, ["swarmllm.guide"]):
            continue
        for name, line in ((module.name.rpartition(".")[2], 1), *module.names):
            for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name):
                if (term := FIELD_TERMS.get(word.lower())) is not None:
                    yield f"{module.path}:{line}: {name}: say {term!r} instead of {word.lower()!r}"


BITES: dict[Rule, dict[str, str]] = {
    imports_point_down: {"swarmllm.errors": "from swarmllm.api import server"},
    imports_form_no_circle: {
        "swarmllm.models.a": "def f():\n    from swarmllm.models import b",
        "swarmllm.models.b": "from . import a",
    },
    cores_are_pure: {"swarmllm.scheduling.route": "from time import monotonic"},
    foreign_libraries_stay_home: {"swarmllm.node": "import libp2p.abc"},
    proto_stands_alone: {"swarmllm_proto.frames": "import trio"},
    bootstrap_needs_nothing_installed: {"swarmllm.bootstrap": "import rich"},
    daemon_and_workers_meet_only_in_proto: {
        "swarmllm_workers.server": "from swarmllm.errors import BadModel"
    },
    cli_starts_light: {
        "swarmllm.cli.main": "from swarmllm.config import read",
        "swarmllm.config": "import libp2p",
    },
    nothing_read_is_run: {"swarmllm.swarm.libp2p.gossip": "eval('1')"},
    one_word_names_one_thing: {
        "swarmllm.models.a": "class Plan: ...",
        "swarmllm.scheduling.b": "class Plan: ...",
    },
    what_only_linux_has_is_asked_in_one_place: {
        "swarmllm.node.a": "import os\nos.pidfd_open(1)",
        "swarmllm.models.b": "from pathlib import Path\nPath(f'/proc/{1}/stat')",
    },
    names_are_terms_of_the_field: {"swarmllm.swarm.a": "class ControlHearts: ..."},
    files_are_room_sized: {"swarmllm.node": "x = 1\n" * (MAX_LINES + 1)},
}
"""Every rule, with the smallest tree that breaks it."""


def rule_name(value: object) -> str:
    return getattr(value, "__name__", "bite")


@pytest.mark.parametrize("rule", BITES, ids=rule_name)
def test_house_keeps_the_rule(rule: Rule) -> None:
    violations = list(rule(house()))
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(("rule", "sources"), BITES.items(), ids=rule_name)
def test_rule_names_file_and_line_of_a_violation(rule: Rule, sources: dict[str, str]) -> None:
    tree = parse_tree({name: (f"{name.replace('.', '/')}.py", source) for name, source in sources.items()})
    violations = list(rule(tree))
    assert violations
    for violation in violations:
        path, line, what = violation.split(":", 2)
        assert path in {module.path for module in tree.values()}
        assert int(line) > 0
        assert what.strip()


def test_reader_sees_relative_late_and_typing_imports() -> None:
    source = """
from typing import TYPE_CHECKING
from . import b
from ..swarm.router import Router
if TYPE_CHECKING:
    import libp2p
def f():
    import quart
"""
    sources = {
        "swarmllm.models.a": ("swarmllm/models/a.py", source),
        "swarmllm.models.b": ("swarmllm/models/b.py", ""),
    }
    tree = parse_tree(sources)
    assert {imported.target: imported.at_import_time for imported in tree["swarmllm.models.a"].imports} == {
        "typing": True,
        "swarmllm.models.b": True,
        "swarmllm.swarm.router": True,
        "libp2p": False,
        "quart": False,
    }


def test_every_package_of_the_house_is_read() -> None:
    assert {"swarmllm.errors", "swarmllm.swarm.router", "swarmllm_proto.frames"} <= set(house())
    assert {name.partition(".")[0] for name in house()} == set(PACKAGES)
