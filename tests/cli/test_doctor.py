"""`swarmllm doctor`: every finding has a remedy, and the exit code says whether there is a problem."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_node import FakeNode

from swarmllm.cli import daemon_checks, doctor, machine_checks
from swarmllm.cli.machine_checks import Finding
from swarmllm.cli.main import main
from swarmllm.config import ApiTable, Config, NetworkTable
from swarmllm.config_sources import load_config
from swarmllm.models.segment_copies import CopiesView

GIB = machine_checks.GIB
TASK = {
    "name": "placement",
    "n_failures": 2,
    "last_error": "ValueError: x",
    "meanwhile": "the layers stay as they are",
}
NOBODY = "http://127.0.0.1:9"
STATS: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 7,
    "ready": True,
    "addresses": ["/ip4/10.0.0.2/tcp/8810/p2p/x"],
    "peers_connected": 2,
    "reachability": None,
    "workers": [],
}


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def levels(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    found = list(findings)
    assert all(finding.remedy for finding in found if finding.level != "ok")
    assert not any(finding.remedy for finding in found if finding.level == "ok")
    return [(finding.check, finding.level) for finding in found]


def config_with(port: int) -> Config:
    return Config(
        api=ApiTable(port=port), network=NetworkTable(listen_host="127.0.0.1", libp2p_port=0, data_port=0)
    )


def test_a_port_that_is_taken_is_a_problem_unless_the_daemon_has_it(listening: int) -> None:
    (finding,) = machine_checks.check_ports(config_with(listening), is_running=False)
    assert finding.level == "problem"
    assert f"port {listening} (api.port)" in finding.message
    assert levels(machine_checks.check_ports(config_with(listening), is_running=True)) == [("ports", "ok")]


def test_a_free_port_is_fine_and_any_port_needs_no_look(listening: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
    assert levels(machine_checks.check_ports(config_with(free), is_running=False)) == [("ports", "ok")]
    assert levels(machine_checks.check_ports(config_with(0), is_running=False)) == []


@pytest.mark.parametrize(("state", "level"), [(True, "ok"), (False, "warning"), (None, "ok")])
def test_a_clock_that_nobody_keeps_right_is_a_warning(state: bool | None, level: str) -> None:
    assert levels(machine_checks.check_clock(state)) == [("clock", level)]


def test_the_kernel_is_asked_about_the_clock() -> None:
    assert machine_checks.clock_is_synchronised() in (True, False, None)


@pytest.mark.parametrize(
    ("total", "available", "level"),
    [(8 * GIB, 4 * GIB, "ok"), (8 * GIB, GIB // 2, "problem"), (0, 0, "warning")],
)
def test_little_memory_is_a_problem(total: int, available: int, level: str) -> None:
    findings = list(machine_checks.check_memory(total, available))
    assert [finding.level for finding in findings] == [level]


def test_few_open_files_are_a_warning() -> None:
    assert levels(machine_checks.check_open_files(1024)) == [("limits", "warning")]
    assert levels(machine_checks.check_open_files(machine_checks.open_files_limit() + 10**6)) == [
        ("limits", "ok")
    ]


def test_the_disk_of_a_folder_that_is_not_there_yet_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "not" / "yet"
    monkeypatch.setattr(machine_checks, "LOW_DISK_BYTES", 0)
    assert levels(machine_checks.check_disk(data_dir)) == [("disk", "ok")]
    data_dir.mkdir(parents=True, mode=0o755)
    assert levels(machine_checks.check_disk(data_dir)) == [("disk", "warning"), ("disk", "ok")]
    data_dir.chmod(0o700)
    monkeypatch.setattr(machine_checks, "LOW_DISK_BYTES", 2**62)
    assert levels(machine_checks.check_disk(data_dir)) == [("disk", "problem")]


def test_copies_of_layers_are_shown_with_their_limit(tmp_path: Path) -> None:
    assert list(machine_checks.check_copies(CopiesView(0, 0, GIB))) == []
    (finding,) = machine_checks.check_copies(CopiesView(2, GIB // 2, GIB))
    assert finding.level == "ok"
    assert finding.message == "copies of layers take 0.5 GiB of at most 1.0 GiB (store.segment_cache_gib)"
    assert levels(machine_checks.check_copies(CopiesView(2, 2 * GIB, GIB))) == [("disk", "warning")]
    assert levels(machine_checks.check_copies(CopiesView(2, 2 * GIB, 0))) == [("disk", "ok")]
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "x.gguf").write_bytes(bytes(4096))
    config = load_config(env={"SWARMLLM_NODE_DATA_DIR": str(tmp_path)})
    assert doctor.segment_copies(config).n_files == 1


def test_how_libllama_was_built_is_held_against_the_processor() -> None:
    built = {"version": "0.3", "features": ["AVX"], "gpu": False, "mmap": True}
    (unused, _) = machine_checks.check_build(built, frozenset({"avx", "avx2"}), 0)
    assert (unused.level, "AVX2" in unused.message) == ("warning", True)
    assert levels(machine_checks.check_build(built, frozenset({"avx"}), 0)) == [("libllama", "ok")]
    arm = built | {"features": ["NEON", "ARM_FMA"]}
    (unused, _) = machine_checks.check_build(arm, frozenset({"asimd", "asimddp"}), 0)
    assert (unused.level, "DOTPROD" in unused.message) == ("warning", True)
    assert levels(machine_checks.check_build(built, frozenset(), 20))[0] == ("gpu", "problem")
    assert levels(machine_checks.check_build(built, frozenset(), "auto")) == [("libllama", "ok")]
    card = {"name": "CUDA0", "description": "a card", "total_bytes": 2**34, "free_bytes": 2**33}
    with_card = built | {"gpu": True, "gpus": [card | {"has_own_memory": True}]}
    found = list(machine_checks.check_build(with_card, frozenset(), "auto"))
    assert levels(found) == [("gpu", "ok"), ("libllama", "ok")]
    assert found[0].message == "CUDA0 a card: 8.0 GiB of 16.0 GiB free; resources.n_gpu_layers is auto"
    assert levels(machine_checks.check_build(built | {"gpu": True}, frozenset(), 20))[0] == ("gpu", "warning")
    unbuilt, _ = machine_checks.check_build(built, frozenset(), "auto", "AMD")
    assert unbuilt.level == "warning"
    assert "-DGGML_HIP=on" in unbuilt.remedy
    assert levels(machine_checks.check_build(None, frozenset(), 0)) == [("libllama", "problem")]
    (portable,) = machine_checks.check_build(built | {"cpu_variant": "haswell"}, frozenset(), 0)
    assert (portable.level, "portable build, variant haswell" in portable.message) == ("ok", True)
    lacking = built | {"shortcomings": ["the compiled part tap is missing: slower", "not tried"]}
    missing, untried, rest = machine_checks.check_build(lacking, frozenset(), 0)
    assert (missing.level, missing.remedy != "", untried.level, untried.remedy) == (
        "warning",
        True,
        "warning",
        "",
    )
    assert rest.level == "ok"


@pytest.mark.slow
def test_the_libllama_that_is_installed_here_is_described() -> None:
    info = doctor.build_info()
    assert info is not None
    assert info["version"]
    assert isinstance(info["features"], list)
    assert info["shortcomings"] == []


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("/ip4/192.0.2.7/tcp/8810/p2p/12D3", "192.0.2.7", 8810),
        ("/dns4/node.example/tcp/80/p2p/x", "node.example", 80),
        ("/ip6/::1/tcp/1", "::1", 1),
        ("/ip4/192.0.2.7/udp/8810", "", 0),
        ("/ip4/192.0.2.7/tcp/99999", "", 0),
        ("nonsense", "", 0),
    ],
)
def test_addresses_of_nodes_are_read(address: str, host: str, port: int) -> None:
    assert machine_checks.tcp_of(address) == (host, port)


def test_a_bootstrap_node_that_does_not_answer_is_a_problem(listening: int) -> None:
    addresses = [f"/ip4/127.0.0.1/tcp/{listening}/p2p/x", "/ip4/127.0.0.1/tcp/9/p2p/x", "/dns/x"]
    assert levels(machine_checks.check_bootstrap(addresses)) == [
        ("reachability", "ok"),
        ("reachability", "problem"),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"ready": False}, [("daemon", "warning")]),
        ({"addresses": []}, [("reachability", "problem")]),
        ({"peers_connected": 0}, [("reachability", "warning")]),
        ({"port_mapping": {"state": "failed", "detail": "double NAT"}}, [("port mapping", "warning")]),
        ({"port_mapping": {"state": "mapped", "detail": "both ports"}}, []),
        ({"port_mapping": {"state": "idle", "detail": ""}}, []),
        ({"dht": {"mode": "on", "n_nodes": 0}}, [("reachability", "warning")]),
        ({"dht": {"mode": "on", "n_nodes": 1}}, []),
        ({"dht": {"mode": "off", "n_nodes": 0}}, []),
        ({"tasks_failed": [TASK | {"state": "running", "is_down": False}]}, [("tasks", "warning")]),
        ({"tasks_failed": [TASK | {"state": "waiting", "is_down": True}]}, [("tasks", "problem")]),
        ({"tasks_failed": [TASK | {"state": "given up", "is_down": True}]}, [("tasks", "problem")]),
        ({"loop": {"slow_steps": 2, "latest_slow_step": "a step of x"}}, [("event loop", "warning")]),
        (
            {"workers": [{"n_starts": 3, "n_failures": 1, "last_failure": "killed by signal 9"}]},
            [("daemon", "warning")],
        ),
        # A model that is loaded for requests has a new worker each time.
        ({"workers": [{"n_starts": 3, "n_failures": 0, "last_failure": ""}]}, []),
        (
            {
                "reachability": {
                    "control": [{"address": "/ip4/10.0.0.2/tcp/8810", "reached": True}],
                    "data": [{"address": "10.0.0.2:8811", "reached": False}],
                }
            },
            [("reachability", "problem")],
        ),
        (
            {
                "addresses": ["/ip4/10.0.0.9/tcp/8810/p2p/r/p2p-circuit/p2p/x"],
                "reachability": {
                    "control": [{"address": "/ip4/10.0.0.2/tcp/8810", "reached": False}],
                    "data": [],
                },
            },
            [("reachability", "warning")],
        ),
        (
            {"models": [{"name": "m", "model_id": "ab", "layers": ["0:4"], "trouble": "its file is gone"}]},
            [("models", "warning")],
        ),
        (
            {"projectors": [{"name": "m", "cause": "it is gone", "remedy": "mend it"}]},
            [("projectors", "warning")],
        ),
    ],
)
def test_what_the_daemon_says_is_judged(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    found = levels(daemon_checks.check_daemon(STATS | changes))
    assert [finding for finding in found if finding[1] != "ok"] == expected


def test_what_workers_measured_of_their_products_is_shown_once() -> None:
    choice = {"type": "Q8_0", "k": 896, "n_threads": 1, "first_rows": 1, "last_rows": 1}
    choice |= {"chosen": "ggml-dots", "ggml_ns": 26_500, "ours_ns": 48_000}
    few = choice | {"first_rows": 9, "last_rows": 16, "chosen": "avx512"}
    many = choice | {"first_rows": 33, "last_rows": 2**31 - 1, "ours_ns": 0}
    worker = {"n_starts": 1, "last_end": "", "kernels": [choice, few, many, choice | {"k": 64}]}
    worker["kernel_class"] = "0.3.36-avx2-f16-1f0e9d2c"
    found = list(daemon_checks.check_daemon(STATS | {"workers": [worker, worker]}))
    assert [(each.level, each.message) for each in found if each.check == "kernels"] == [
        (
            "ok",
            "Q8_0, rows of 896, 1 thread: 1 ggml-dots (us: ggml 26, ours 48); "
            "9-16 avx512 (us: ggml 26, ours 48); 33+ ggml-dots (us: ggml 26, ours not usable)",
        ),
        ("ok", "Q8_0, rows of 64, 1 thread: 1 ggml-dots (us: ggml 26, ours 48)"),
        ("ok", "0.3.36-avx2-f16-1f0e9d2c: exact requests get equal bits from nodes that say the same"),
    ]


def test_what_workers_measured_of_attention_is_shown() -> None:
    one = {"type": "attention", "k": 128, "n_threads": 2, "first_rows": 1, "last_rows": 1}
    one |= {"chosen": "ggml", "ggml_ns": 21_000, "ours_ns": 22_000}
    several = one | {"first_rows": 2, "last_rows": 63, "chosen": "ours", "ggml_ns": 90_000, "ours_ns": 60_000}
    of_others = one | {"k": 64, "ggml_ns": 0, "ours_ns": 0}
    worker = {"n_starts": 1, "last_end": "", "kernels": [one, several, of_others], "kernel_class": ""}
    found = list(daemon_checks.check_daemon(STATS | {"workers": [worker]}))
    assert [each.message for each in found if each.check == "kernels"] == [
        "attention, keys of 128, 2 threads: 1 ggml (us: ggml 21, ours 22); 2-63 ours (us: ggml 90, ours 60)",
        "attention, keys of 64, 2 threads: 1 ggml (ours has other bits here)",
    ]


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing wrong, and its configuration file."""
    monkeypatch.setattr(machine_checks, "LOW_DISK_BYTES", 0)
    monkeypatch.setattr(machine_checks, "LOW_MEMORY_BYTES", 0)
    build = {"version": "0.3", "features": ["AVX"], "gpu": False, "mmap": True}
    monkeypatch.setattr(doctor, "build_info", lambda: build)
    file = tmp_path / "config.toml"
    ports = "libp2p_port = 0\ndata_port = 0"
    file.write_text(f'[node]\ndata_dir = "{tmp_path}/data"\n[api]\nport = 0\n[network]\n{ports}\n')
    return file


def run_doctor(file: Path, url: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", "--config", str(file), "--api", url, *arguments])


def test_it_works_without_a_daemon(well: Path) -> None:
    result = run_doctor(well, NOBODY)
    assert result.exit_code == 0, result.output
    assert "no daemon runs" in result.stdout
    shown = json.loads(run_doctor(well, NOBODY, "--json").stdout)
    assert shown["ok"] is True
    checks = {finding["check"] for finding in shown["findings"]}
    assert {"configuration", "daemon", "clock", "memory", "limits", "disk", "libllama"} <= checks


def test_it_sees_more_with_one(well: Path, node: FakeNode) -> None:
    node.on("GET", "/api/admin/stats", STATS | {"addresses": []})
    result = run_doctor(well, node.url)
    assert result.exit_code == 1
    assert "✗ reachability   this node has no address that others could dial" in result.stdout
    assert "→ remove network.listen_host" in result.stdout
    node.on("GET", "/api/admin/stats", STATS)
    assert run_doctor(well, node.url).exit_code == 0


def test_a_daemon_that_refuses_is_a_problem_with_a_remedy(well: Path, node: FakeNode) -> None:
    error = {"message": "This node asks for an API key.", "type": "authentication_error"}
    node.on("GET", "/api/admin/stats", {"error": error}, 401)
    result = run_doctor(well, node.url, "--json")
    assert result.exit_code == 1
    (finding,) = [each for each in json.loads(result.stdout)["findings"] if each["level"] == "problem"]
    assert "SWARMLLM_KEY" in finding["remedy"]


def test_a_configuration_that_cannot_be_used_is_a_problem(well: Path) -> None:
    well.write_text("[api]\nprot = 1\n")
    result = run_doctor(well, NOBODY)
    assert result.exit_code == 1
    assert "Did you mean 'port'?" in result.stdout
