"""Questions about pictures over HTTP: a model with its projector on real daemons, whole and cut."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, running_daemon, wait_for
from deadlines import DEADLINE_S
from sound_models import sound_projector, tones, wav_of
from vision_models import TEXTS, file_of, pixels, projector, text_model

pytestmark = pytest.mark.slow

INFERENCE = {"n_threads": 1, "n_slots": 2, "n_ctx": 512, "check_cuts": False}
N_EMBD = 64
N_ROWS = 16
SOUND_ROWS = 13
"""Of a second."""


def lines(node: DaemonProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The last of them."""
    with node.http.stream("POST", f"/api/admin/models{path}", json=body) as answer:
        return dict([json.loads(line) for line in answer.iter_lines()][-1])


def sources(node: DaemonProcess, name: str) -> list[str]:
    answer = node.http.get(f"/api/admin/models/{name}/status")
    return list(answer.json()["sources"]) if answer.status_code == 200 else []


def asking(data: bytes | None, **options: Any) -> list[dict[str, Any]]:
    """Messages with the picture, if there is one, and how it is to be taken."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is this?"}]
    if data is not None:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url} | options})
    return [{"role": "user", "content": content}]


def chat(node: DaemonProcess, data: bytes | None = None, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "seer",
        "messages": asking(data),
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
    }
    answer = node.http.post("/v1/chat/completions", json=body | fields)
    return dict(answer.json()) | {"status": answer.status_code}


def told(answer: dict[str, Any]) -> list[tuple[str, float]]:
    assert answer["status"] == 200, answer
    return [(each["token"], each["logprob"]) for each in answer["choices"][0]["logprobs"]["content"]]


def it_travels(
    a: DaemonProcess, b: DaemonProcess, mmproj: Path, shown: bytes, whole: list[tuple[str, float]]
) -> None:
    """B gets the projector of A's from A, by its BLAKE3, keeps it open, and lets it go again."""

    def encodes(node: DaemonProcess) -> bool:
        """As the other one, its only peer, knows. The guide's projector everybody has."""
        (peer,) = (b if node is a else a).http.get("/api/admin/peers").json()["peers"]
        return [each["shard"] for each in peer["projectors"] if each["model_id"] == seer] == [2**32 - 1]

    seer = a.http.get("/api/admin/models/seer/status").json()["model_id"]

    taken = lines(b, "/seer/load", {"layers": "mmproj"})["model"]
    of_b = taken["projector"]
    assert (of_b["state"], of_b["is_open"], taken["loaded"]) == ("loaded", True, ["2:4"])
    assert Path(of_b["path"]).read_bytes() == mmproj.read_bytes()
    assert Path(of_b["path"]).stem == of_b["blake3"]
    wait_for(lambda: encodes(b), DEADLINE_S, "the projector to be announced")
    other = file_of(pixels(40, 30, 3))
    own = chat(b, other)
    assert not own["swarm"]["pictures"][0]["kept"]
    assert a.stats()["pipelines"]["pictures_given"] == 1, "B has an encoder of its own"
    gone = lines(b, "/seer/unload", {"layers": "mmproj", "progress": True})["model"]["projector"]
    assert (gone["state"], gone["is_open"]) == ("unloaded", False)
    wait_for(lambda: not encodes(b), DEADLINE_S, "the projector to be announced no more")
    assert told(chat(b, shown)) == whole
    told(chat(b, file_of(pixels(40, 30, 4))))
    assert a.stats()["pipelines"]["pictures_given"] == 2
    refused = b.http.post("/api/admin/models/seer/unload", json={"layers": "mmproj"})
    assert refused.status_code == 409
    # What is here is opened again, and not fetched.
    assert lines(b, "/seer/load", {"layers": "mmproj"})["model"]["projector"] == of_b
    assert told(chat(b, other)) == told(own)


def it_hears(node: DaemonProcess, ears: Path) -> None:
    """With another projector the model, cut over two nodes, takes sounds in the place of pictures."""
    attached = lines(node, "/seer/projector", {"path": str(ears)})["model"]
    assert (attached["projector"]["family"], attached["takes"]) == ("qwen3a", ["sound"])
    (listed,) = (each for each in node.http.get("/v1/models").json()["data"] if each["id"] == "seer")
    assert listed["architecture"]["input_modalities"] == ["text", "audio"]
    planned = node.http.get("/api/admin/plan?model=seer").json()
    assert (planned["takes_pictures"], planned["takes_sounds"]) == (False, True)
    assert "audio" in node.http.post("/api/show", json={"model": "seer"}).json()["capabilities"]

    def hear(data: bytes) -> dict[str, Any]:
        audio = {"data": base64.b64encode(data).decode(), "format": "wav"}
        content = [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": "what is this?"}]
        return chat(node, messages=[{"role": "user", "content": content}])

    heard = hear(wav_of(tones(0.5, 1)))
    (encoded,) = heard["swarm"]["sounds"]
    assert (encoded["rows"], encoded["kept"], heard["swarm"]["pictures"]) == (SOUND_ROWS, False, [])
    assert len(heard["swarm"]["route"]) == 2
    assert told(hear(wav_of(tones(0.5, 1)))) == told(heard) != told(hear(wav_of(tones(0.5, 2))))
    refused = hear(b"OggS" + bytes(60))
    assert (refused["status"], refused["error"]["code"]) == (400, "invalid_value")


def it_is_told_where_it_cannot_see(node: DaemonProcess, mmproj: Path) -> None:
    """While the file of its projector is gone."""
    away = mmproj.rename(mmproj.with_suffix(".away"))
    trouble = node.http.get("/api/admin/models/seer/status").json()["projector_trouble"]
    assert trouble["cause"].startswith(f"the projector {mmproj} cannot be read")
    assert trouble["remedy"] == "give it one that can be used: swarmllm models projector seer MMPROJ.gguf"
    (shown,) = node.stats()["projectors"]
    assert shown == {"name": "seer", "model_id": shown["model_id"], **trouble}
    away.rename(mmproj)
    assert node.stats()["projectors"] == []


OTHERS = {
    "qwen3vl": ("qwen3vl_merger", {}, (200, 130), 6),
    "gemma3": ("gemma3", {"image": 160}, (70, 50), 6),
}
"""Models whose pictures' rows stand on a grid and have further parts, or see each other: family and options
of the projector, size of a picture, and where the layers are cut."""


def its_rows_are_fewer_at_low_detail(node: DaemonProcess, name: str) -> None:
    """Of a picture that has more rows than the model has room for."""
    large = file_of(pixels(1200, 400, 3))
    refused = chat(node, large, model=name)
    assert (refused["status"], refused["error"]["code"]) == (400, "context_length_exceeded")
    seen = chat(node, model=name, messages=asking(large, detail="low"))
    assert seen["status"] == 200
    (picture,) = seen["swarm"]["pictures"]
    assert 0 < picture["rows"] < 512


def they_see_over_two_nodes(a: DaemonProcess, b: DaemonProcess, folder: Path) -> None:
    """What B, which has the last layers, is told is what A said with all of them: the rows go from A's
    encoder to B, and back to the first layers, which are at A's."""
    for name, (family, options, size, cut) in OTHERS.items():
        path, n_embd = text_model(folder, name), TEXTS[name].n_embd
        projector(folder / f"{name}-mmproj-f32.gguf", family, n_embd + 32)
        mmproj = projector(folder / f"eyes-of-{name}.gguf", family, n_embd, **options)
        added = lines(a, "", {"path": str(path), "name": name})["model"]
        assert added["projector"] is None
        assert "-mmproj-f32.gguf makes rows of" in added["projector_trouble"]["cause"], "of another width"
        attached = lines(a, f"/{name}/projector", {"path": str(mmproj)})["model"]
        assert (attached["projector"]["family"], attached["projector_trouble"]) == (family, None)
        n_layers = attached["n_layers"]
        lines(a, f"/{name}/load", {})
        shown = file_of(pixels(*size, 1))
        whole = told(chat(a, shown, model=name))
        assert told(chat(a, file_of(pixels(*size, 2)), model=name)) != whole
        if name == "qwen3vl":
            its_rows_are_fewer_at_low_detail(a, name)
        wait_for(lambda name=name: sources(b, name), DEADLINE_S, "the other node to know who has the file")
        lines(b, f"/{name}/load", {"layers": f"{cut}:{n_layers}"})
        lines(a, f"/{name}/unload", {"layers": f"{cut}:{n_layers}", "progress": True})
        wait_for(
            lambda name=name: b.http.get(f"/api/admin/models/{name}/status").json()["complete"],
            DEADLINE_S,
            "all layers to be held",
        )
        seen = chat(b, shown, model=name)
        assert told(seen) == whole
        assert len(seen["swarm"]["route"]) == 2
        for node in (b, a):
            lines(node, f"/{name}/unload", {"progress": True})


def test_a_model_takes_pictures_with_its_projector_and_over_two_nodes_too(tmp_path: Path) -> None:
    path = text_model(tmp_path, "llama")
    mmproj = projector(tmp_path / "llama-mmproj-f32.gguf", "janus_pro", N_EMBD)
    other = projector(tmp_path / "other.gguf", "janus_pro", 96)
    damaged = projector(tmp_path / "damaged.gguf", "janus_pro", N_EMBD, without=["v.blk.0.attn_q.weight"])
    shown = file_of(pixels(40, 30, 1))
    with running_daemon(tmp_path, "a", load=[], inference=INFERENCE) as a:
        given = {"path": str(path), "name": "seer"}
        refused = lines(a, "", given | {"mmproj": str(other)})["error"]
        assert "rows of 96 numbers, the model's have 64" in refused["message"]
        refused = lines(a, "", given | {"mmproj": str(damaged)})["error"]
        assert "damaged.gguf" in refused["message"]
        assert refused["param"] == "mmproj"
        added = lines(a, "", given)["model"]
        assert added["projector"] == {
            "shard": 2**32 - 1,
            "state": "on_demand",
            "is_open": True,
            "path": str(mmproj),
            "family": "janus_pro",
            "n_embd": N_EMBD,
            "size_bytes": mmproj.stat().st_size,
            "blake3": added["projector"]["blake3"],
        }
        assert a.http.get("/api/admin/models/seer/status").json()["projector"] == added["projector"]
        assert lines(a, "/seer/load", {})["type"] == "result"
        answer = chat(a, shown)
        whole, text = told(answer), chat(a)
        # The line break between a picture and the text after it is left out.
        assert answer["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"] + N_ROWS
        assert told(text) != whole != told(chat(a, file_of(pixels(40, 30, 2))))
        assert told(chat(a, shown)) == whole
        broken = chat(a, shown[:-30])
        assert (broken["status"], broken["error"]["code"]) == (400, "invalid_value")
        assert "the png file is damaged" in broken["error"]["message"]
        assert chat(a, shown, exact=True)["status"] == 400
        counted = a.http.post(
            "/v1/chat/completions/input_tokens", json={"model": "seer", "messages": asking(shown)}
        )
        assert counted.json()["input_tokens"] == answer["usage"]["prompt_tokens"]
        with running_daemon(tmp_path, "b", load=[], inference=INFERENCE, bootstrap=a.addresses) as b:
            # The model comes from the other node, its projector from the disk.
            wait_for(lambda: sources(b, "seer"), DEADLINE_S, "the other node to know who has the file")
            assert lines(b, "/seer/load", {"layers": "2:4"})["model"]["stored"]
            # So its pictures are encoded by the other node, which the answer names.
            listed = b.http.get("/v1/models").json()["data"]
            assert [m["id"] for m in listed if "image" in m["architecture"]["input_modalities"]] == [
                "guide",
                "seer",
            ]
            planned = b.http.get("/api/admin/plan?model=seer").json()
            assert planned["takes_pictures"]
            assert len(planned["encoders"]) == 1
            far = chat(b, shown)
            assert told(far) == whole
            (looked,) = far["swarm"]["pictures"]
            assert (looked["node"], looked["rows"], looked["kept"]) == (
                planned["encoders"][0]["node_id"],
                N_ROWS,
                False,
            )
            again = chat(b, shown)
            assert told(again) == whole
            assert again["swarm"]["pictures"][0]["kept"]
            assert chat(b, shown[:-30])["error"]["code"] == "invalid_value"
            assert a.stats()["pipelines"]["pictures_given"] == 1
            assert "96" in lines(b, "/seer/projector", {"path": str(other)})["error"]["message"]
            it_travels(a, b, mmproj, shown, whole)
            assert lines(a, "/seer/unload", {"layers": "2:4", "progress": True})["type"] == "result"
            for node in (a, b):
                wait_for(
                    lambda node=node: node.http.get("/api/admin/models/seer/status").json()["complete"],
                    DEADLINE_S,
                    "all layers to be held",
                )
                cut = chat(node, shown)
                assert told(cut) == whole
                assert len(cut["swarm"]["route"]) == 2
            it_is_told_where_it_cannot_see(a, mmproj)
            they_see_over_two_nodes(a, b, tmp_path)
            it_hears(a, sound_projector(tmp_path / "ears.gguf", "qwen3a", N_EMBD))
        assert lines(a, "/seer/unload", {"progress": True})["type"] == "result"
        assert a.http.delete("/api/admin/models/seer").status_code == 200
        assert mmproj.exists()
