"""models: what is sent, what is shown, what a program gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_node import FakeNode, ndjson

from swarmllm.cli import models as models_module
from swarmllm.cli.client import EXIT_FAILED, EXIT_REFUSED, EXIT_USAGE

Run = Callable[..., Result]


MODEL: dict[str, Any] = {
    "name": "guide",
    "further_names": [],
    "trouble": None,
    "model_id": "ab" * 32,
    "path": "/models/guide.gguf",
    "n_parts": 1,
    "architecture": "llama",
    "n_layers": 12,
    "context_length": 2048,
    "size_bytes": 9_300_000,
    "cut_alignment": 1,
    "whole_reason": "",
    "loaded": ["0:4"],
    "memory": {"weights_bytes": 9_000_000, "kv_bytes": 24_000_000, "work_bytes": 31_000_000},
    "settings": {"n_ctx": 2048, "n_threads": 1, "kv_type": "f16", "use_mmap": True, "use_mlock": False},
    "stored": True,
    "pinned": True,
    "projector": None,
    "files": {"layers": ["0:4", "6:8"], "embedding": True, "head": False},
    "sources": ["12D3KooWPeer"],
    "n_sources": 3,
    "holders": [{"node_id": "12D3KooWSelf", "nickname": "kitchen", "layers": ["0:4"], "is_self": True}],
    "n_holders": 5,
    "complete": False,
    "missing": ["4:12"],
    "n_missing": 1,
    "waiting": None,
}

FOREIGN = MODEL | {
    "name": "far\x1b[2J",
    "architecture": None,
    "size_bytes": None,
    "loaded": [],
    "holders": [{}, {}],
    "n_holders": 2,
    "complete": True,
    "missing": [],
    "n_missing": 0,
}

WAITING = MODEL | {
    "name": "stranger",
    "model_id": "",
    "path": None,
    "architecture": None,
    "size_bytes": None,
    "files": None,
    "sources": [],
    "n_sources": 0,
    "loaded": [],
    "holders": [],
    "n_holders": 0,
    "missing": ["0:12"],
    "waiting": {
        "source": "hf:org/repo:x\x1b[2J.gguf",
        "size_bytes": 9_300_000,
        "architecture": "llama",
        "layers": ["0:4"],
        "waits_for": "the hashes of layers 4:12, head",
        "contradictions": [{"tensor": "blk.5.ffn_up.weight", "nodes": ["12D3KooWPeer", "12D3KooWOther"]}],
    },
}


def test_models_list_shows_what_is_missing_and_what_is_complete(run: Run, node: FakeNode) -> None:
    copies = {"n_files": 2, "n_bytes": 3_000_000, "quota_bytes": 64_000_000_000}
    answer = {"models": [MODEL, FOREIGN, WAITING], "left_out": 7, "copies": copies}
    node.on("GET", "/api/admin/models", answer)
    _, own, foreign, waiting, left_out, taken = run("models", "list").output.splitlines()
    assert "7 more" in left_out
    assert taken == "Copies of layers take 3.0 MB of at most 64.0 GB (store.segment_cache_gib)."
    for expected in ("guide", "abababababab", "llama", "12", "9.3 MB", "0:4", "layers 4:12 missing"):
        assert expected in own
    assert "far\\x1b[2J" in foreign
    assert "complete on 2 nodes" in foreign
    for expected in ("stranger", "fetched: 0:4", "waiting for the hashes of layers 4:12, head"):
        assert expected in waiting


def test_a_model_that_waits_for_its_id_says_for_what_and_whom_it_does_not_believe(
    run: Run, node: FakeNode
) -> None:
    node.on("GET", "/api/admin/models/stranger/status", WAITING)
    shown = run("models", "show", "stranger").output
    for expected in (
        "not known yet", "hf:org/repo:x\\x1b[2J.gguf", "layers 0:4", "the hashes of layers 4:12, head",
        "blk.5.ffn_up.weight: 12D3KooWPeer, 12D3KooWOther; they are not believed",
    ):  # fmt: skip
        assert expected in shown
    assert json.loads(run("models", "show", "stranger", "--json").output) == WAITING
    node.on("DELETE", "/api/admin/models/stranger", WAITING)
    assert "what was fetched of it is deleted" in run("models", "rm", "stranger").output


def test_no_models_says_how_to_add_one(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/models", {"models": [], "left_out": 0})
    assert "swarmllm models add" in run("models", "list").output


def test_models_for_programs_are_what_the_daemon_said(run: Run, node: FakeNode) -> None:
    body = {"models": [MODEL, FOREIGN], "left_out": 0}
    node.on("GET", "/api/admin/models", body)
    assert json.loads(run("models", "list", "--json").stdout) == body


PROGRESS = {"type": "progress", "done_bytes": 1, "total_bytes": 2}


PROJECTOR = {
    "shard": 2**32 - 1,
    "state": "on_demand",
    "is_open": False,
    "path": "/m/mm.gguf",
    "family": "mlp",
    "n_embd": 64,
    "size_bytes": 9,
    "blake3": "cd" * 32,
}


def test_a_projector_is_sent_as_an_absolute_path_and_shown(run: Run, node: FakeNode, tmp_path: Path) -> None:
    model, mmproj = tmp_path / "m.gguf", tmp_path / "mm.gguf"
    model.write_bytes(b"")
    mmproj.write_bytes(b"")
    result = ndjson(PROGRESS, {"type": "result", "model": MODEL | {"projector": PROJECTOR}})
    node.on("POST", "/api/admin/models", result)
    node.on("POST", "/api/admin/models/guide/projector", result)
    added = run("models", "add", str(model), "--mmproj", str(mmproj))
    assert "It takes pictures, with /m/mm.gguf." in added.stdout
    assert node.bodies("/api/admin/models") == [{"path": str(model), "name": None, "mmproj": str(mmproj)}]
    attached = run("models", "projector", "guide", str(mmproj))
    assert "guide: it takes pictures, with /m/mm.gguf." in attached.stdout
    assert node.bodies("/api/admin/models/guide/projector") == [{"path": str(mmproj)}]
    node.on("GET", "/api/admin/models/guide/status", MODEL | {"projector": PROJECTOR})
    assert "/m/mm.gguf (mlp, on demand)" in run("models", "show", "guide").stdout


def test_a_projector_that_cannot_be_used_is_told_with_the_command_that_mends_it(
    run: Run, node: FakeNode
) -> None:
    model = MODEL | {
        "projector_trouble": {
            "cause": "it is gone",
            "remedy": "give it one: swarmllm models projector guide M.gguf",
        }
    }
    node.on("GET", "/api/admin/models", {"models": [model, FOREIGN], "left_out": 0})
    node.on("GET", "/api/admin/models/guide/status", model)
    listed = run("models", "list").stdout
    assert listed.count("takes no pictures") == 1
    assert (
        "guide takes no pictures with this node: it is gone; give it one: swarmllm models projector" in listed
    )
    assert "cannot be used here: it is gone; give it one" in run("models", "show", "guide").stdout


def test_the_projector_is_loaded_and_unloaded_as_layers_are(run: Run, node: FakeNode) -> None:
    loaded = MODEL | {"projector": PROJECTOR | {"state": "loaded", "is_open": True}}
    unloaded = MODEL | {"loaded": [], "projector": PROJECTOR | {"state": "unloaded"}}
    node.on("POST", "/api/admin/models/guide/load", ndjson(PROGRESS, {"type": "result", "model": loaded}))
    node.on("POST", "/api/admin/models/guide/unload", ndjson({"type": "result", "model": unloaded}))
    node.on("GET", "/api/admin/shares", {"shares": [], "accepts": []})
    alone = run("models", "load", "guide", "--layers", "mmproj")
    assert alone.stdout == "guide: this node now encodes its pictures.\n"
    both = run("models", "load", "guide", "--layers", "all")
    assert "this node now holds layers 0:4" in both.stdout
    assert "this node now encodes its pictures" in both.stdout
    assert [each["layers"] for each in node.bodies("/api/admin/models/guide/load")] == ["mmproj", "all"]
    alone = run("models", "unload", "guide", "--layers", "mmproj")
    assert alone.stdout == "guide: this node encodes no pictures for it now.\n"
    assert "holds no layers now" in run("models", "unload", "guide", "--layers", "all").stdout
    node.on("GET", "/api/admin/models", {"models": [loaded, unloaded], "left_out": 0})
    listed = run("models", "list").stdout
    assert "0:4, mmproj" in listed
    assert listed.count("mmproj") == 1


def test_load_sends_the_layers_and_reports_what_is_held(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/guide/load", ndjson(PROGRESS, {"type": "result", "model": MODEL}))
    result = run("models", "load", "guide", "--layers", "0:4")
    assert result.exit_code == 0
    assert "this node now holds layers 0:4" in result.stdout
    assert "layers 4:12 missing" in result.stdout
    assert node.bodies("/api/admin/models/guide/load") == [{"layers": "0:4"}]


def test_load_without_layers_asks_for_all(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/a%25b%3F/load", ndjson({"type": "result", "model": MODEL}))
    result = run("models", "load", "a%b?", "--json")
    assert json.loads(result.stdout) == MODEL
    assert node.bodies("/api/admin/models/a%25b%3F/load") == [{"layers": None}]


def test_load_sends_the_options_that_were_given(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/guide/load", ndjson({"type": "result", "model": MODEL}))
    options = "--ctx 8192 --threads 3 --gpu-layers 4 --kv-type q8_0 --flash-attention auto --no-mmap --mlock"
    assert run("models", "load", "guide", *options.split()).exit_code == 0
    assert node.bodies("/api/admin/models/guide/load") == [
        {
            "layers": None,
            "n_ctx": 8192,
            "n_threads": 3,
            "n_gpu_layers": 4,
            "kv_type": "q8_0",
            "flash_attention": "auto",
            "use_mmap": False,
            "use_mlock": True,
        }
    ]
    assert run("models", "load", "guide", "--ctx", "8").exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("kind", "code"), [("invalid_request_error", EXIT_REFUSED), ("server_error", EXIT_FAILED)]
)
def test_load_that_fails_half_way_fails(run: Run, node: FakeNode, kind: str, code: int) -> None:
    failure = {"type": "error", "error": {"message": "cannot be cut at 5", "type": kind}}
    node.on("POST", "/api/admin/models/guide/load", ndjson(PROGRESS, failure))
    result = run("models", "load", "guide")
    assert (result.exit_code, "cannot be cut at 5" in result.stderr) == (code, True)


def test_load_whose_daemon_goes_away_fails(run: Run, node: FakeNode) -> None:
    node.on("POST", "/api/admin/models/guide/load", ndjson(PROGRESS))
    assert run("models", "load", "guide").exit_code == EXIT_FAILED


def test_add_sends_the_absolute_path(
    run: Run, node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    whole = MODEL | {"whole_reason": "its layers share KV"}
    node.on("POST", "/api/admin/models", ndjson({"type": "result", "model": whole}))
    result = run("models", "add", "m.gguf", "--name", "mine")
    assert result.exit_code == 0
    assert "12 layers, 9.3 MB" in result.stdout
    assert "only be loaded whole: its layers share KV" in result.stdout
    assert node.bodies("/api/admin/models") == [{"path": str(tmp_path / "m.gguf"), "name": "mine"}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--name", "mine"), "It takes requests already (swarmllm chat --model mine), while"),
        ((), "(swarmllm chat --model NAME; its name: swarmllm models list)"),
    ],
)
def test_add_says_that_a_model_takes_requests_while_its_cuts_are_tried(
    run: Run,
    node: FakeNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Sequence[str],
    said: str,
) -> None:
    monkeypatch.setattr(models_module, "HINT_AFTER_S", 0.0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    trying = PROGRESS | {"phase": "checking"}
    node.on("POST", "/api/admin/models", ndjson(PROGRESS, trying, trying, {"type": "result", "model": MODEL}))
    shown = run("models", "add", str(tmp_path / "m.gguf"), *options).stderr
    assert shown.count(said) == 1
    assert said not in run("models", "add", str(tmp_path / "m.gguf"), *options, "--json").output


def test_add_takes_parts_by_the_link_that_names_them_and_a_folder(
    run: Run, node: FakeNode, tmp_path: Path
) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_bytes(b"GGUF")
    link = tmp_path / "m-00001-of-00004.gguf"
    link.symlink_to(tmp_path / "blobs" / "0123")
    node.on("POST", "/api/admin/models", ndjson({"type": "result", "model": MODEL | {"n_parts": 4}}))
    assert "9.3 MB in 4 parts." in run("models", "add", str(link)).stdout
    assert run("models", "add", str(tmp_path)).exit_code == 0
    assert [body["path"] for body in node.bodies("/api/admin/models")] == [str(link), str(tmp_path)]


def test_the_number_of_parts_is_shown(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/models/guide/status", MODEL | {"n_parts": 4})
    shown = " ".join(run("models", "show", "guide").output.split())
    assert "guide.gguf (1 of 4 parts)" in shown
    node.on("DELETE", "/api/admin/models/guide", MODEL | {"n_parts": 4, "stored": False})
    assert "its 4 files stay at /models/guide.gguf" in run("models", "rm", "guide").stdout


def test_add_of_a_file_that_is_not_there_is_a_usage_error(run: Run, node: FakeNode) -> None:
    assert run("models", "add", "/nowhere.gguf").exit_code == EXIT_USAGE
    assert node.requests == []


@pytest.mark.parametrize(
    ("loaded", "words"), [([], "holds no layers now"), (["0:2"], "still holds layers 0:2")]
)
def test_unload_says_what_is_left(run: Run, node: FakeNode, loaded: list[str], words: str) -> None:
    left = {"type": "result", "model": MODEL | {"loaded": loaded}}
    node.on("POST", "/api/admin/models/guide/unload", ndjson(PROGRESS, left))
    node.on("GET", "/api/admin/shares", {"shares": [], "accepts": []})
    result = run("models", "unload", "guide", "--layers", "2:4")
    assert words in result.stdout
    assert node.bodies("/api/admin/models/guide/unload") == [{"layers": "2:4", "progress": True}]


def test_unload_says_that_a_shared_model_comes_back(run: Run, node: FakeNode) -> None:
    kitchen = {"node_id": "12D3KooWHere", "nickname": "kit\x1bchen", "is_self": False}
    shares = [
        {"model_id": "cd" * 32, "shared_by": []},
        {"model_id": MODEL["model_id"], "shared_by": [kitchen]},
    ]
    node.on("GET", "/api/admin/shares", {"shares": shares, "accepts": ["members"]})
    node.on(
        "POST", "/api/admin/models/guide/unload", ndjson({"type": "result", "model": MODEL | {"loaded": []}})
    )
    said = run("models", "unload", "guide").stdout
    assert "It is shared by kit\\x1bchen, and this node loads its part again" in said
    assert "`swarmllm unshare guide` there" in said


def test_show_tells_what_is_here_and_who_has_the_rest(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/models/guide/status", MODEL)
    shown = run("models", "show", "guide").output
    for expected in (
        "ab" * 32, "9.3 MB", "2048", "at multiples of 1", "/models/guide.gguf", "other nodes (pinned)",
        "0:4, 6:8, embedding", "layers 4:12 missing", "kitchen: 0:4", "12D3KooWPeer",
        "n_threads 1", "use_mlock off", "and 4 more nodes", "and 2 more nodes",
    ):  # fmt: skip
        assert expected in shown
    assert json.loads(run("models", "show", "guide", "--json").output) == MODEL


def test_show_of_a_model_that_only_others_have_is_short(run: Run, node: FakeNode) -> None:
    node.on("GET", "/api/admin/models/far/status", FOREIGN | {"files": None, "holders": [], "n_holders": 0})
    shown = run("models", "show", "far").output
    assert "far\\x1b[2J" in shown
    assert "architecture" not in shown


def test_verify_fails_where_something_is_damaged(run: Run, node: FakeNode) -> None:
    path = "/api/admin/models/guide/verify"
    node.on("POST", path, ndjson(PROGRESS, {"type": "result", "model": MODEL, "damaged": []}))
    right = run("models", "verify", "guide")
    assert (right.exit_code, "what is here is right" in right.stdout) == (0, True)
    node.on("POST", path, ndjson({"type": "result", "model": MODEL, "damaged": ["blk.0.x", "blk.1.x"]}))
    wrong = run("models", "verify", "guide", "--json")
    assert wrong.exit_code == EXIT_FAILED
    assert json.loads(wrong.stdout)["damaged"] == ["blk.0.x", "blk.1.x"]
    assert "2 parts of guide damaged (blk.0.x, blk.1.x); load it again" in wrong.stderr
    header = {"type": "result", "model": MODEL, "damaged": ["header"]}
    node.on("POST", path, ndjson(header))
    assert "1 part of guide damaged (header); it has been repaired" in run("models", "verify", "guide").stderr
    own = {**MODEL, "stored": False}
    node.on("POST", path, ndjson(header | {"model": own}))
    assert "(header); replace its file" in run("models", "verify", "guide").stderr
    node.on("POST", path, ndjson({"type": "result", "model": own, "damaged": ["segment 4:8"]}))
    assert "(segment 4:8); load it again" in run("models", "verify", "guide").stderr


@pytest.mark.parametrize(
    ("command", "pinned", "words"), [("pin", True, "it stays"), ("unpin", False, "it may be removed")]
)
def test_pin_and_unpin_say_what_happens_when_room_is_needed(
    run: Run, node: FakeNode, command: str, pinned: bool, words: str
) -> None:
    node.on("POST", "/api/admin/models/guide/pin", MODEL | {"pinned": pinned})
    assert words in run("models", command, "guide").stdout
    assert node.bodies("/api/admin/models/guide/pin") == [{"pinned": pinned}]


@pytest.mark.parametrize(
    ("stored", "words"), [(True, "fetched of it is deleted"), (False, "its file stays at /models/guide.gguf")]
)
def test_rm_says_what_became_of_the_file(run: Run, node: FakeNode, stored: bool, words: str) -> None:
    node.on("DELETE", "/api/admin/models/guide", MODEL | {"stored": stored})
    assert words in run("models", "rm", "guide").stdout


def test_one_name_of_several_is_forgotten_as_such(node: FakeNode, run: Run) -> None:
    node.on("DELETE", "/api/admin/models/other", MODEL | {"further_names": ["third"]})
    assert run("models", "rm", "other").stdout == "The name other is forgotten; the model stays as guide.\n"


def test_a_file_that_is_gone_and_further_names_are_shown(node: FakeNode, run: Run) -> None:
    shown = MODEL | {"further_names": ["other"], "trouble": "the file cannot be read"}
    node.on("GET", "/api/admin/models/guide/status", shown)
    found = run("models", "show", "guide").stdout
    assert "other" in found
    assert "cannot be loaded again: the file cannot be read" in " ".join(found.split())
