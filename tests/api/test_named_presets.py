"""Requests to a name with a preset, in every dialect, and Ollama's API for managing models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_fakes import Stand, serve_node

PRESET = {
    "system": "You are Mario.",
    "context": 512,
    "max_tokens": 7,
    "sampling": {"temperature": 0.25, "top_k": 3, "stop": ["END"]},
}
HELLO = [{"role": "user", "content": "hello"}]
SYSTEM = {"role": "system", "content": "You are Mario."}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "mario", "messages": HELLO},
    "/v1/responses": {"model": "mario", "input": "hello"},
    "/api/chat": {"model": "mario:latest", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "mario", "prompt": "hello", "stream": False},
    "/v1/messages": {"model": "mario", "messages": HELLO, "max_tokens": 7},
}


async def make_mario(stand: Stand) -> None:
    made = await stand.http.post("/api/admin/models/guide/alias", json={"name": "mario"})
    assert made.json()["further_names"] == ["mario"]
    answer = await stand.http.post("/api/admin/models/mario/preset", json=PRESET)
    assert answer.json() == PRESET


@pytest.mark.parametrize("path", CHATS)
async def test_a_preset_counts_for_its_name_and_for_no_other(tmp_path: Path, path: str) -> None:
    async with serve_node(tmp_path) as stand:
        await make_mario(stand)
        answer = await stand.http.post(path, json=CHATS[path])
        assert answer.status_code == 200, answer.text
        call = stand.pipelines.calls[-1]
        assert call.entry.name == "guide"
        assert call.prompt.messages == [SYSTEM, *HELLO]
        sampling = call.sampling
        assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.25, 3, ("END",))
        assert sampling.max_tokens == 7
        await stand.http.post(path, json=CHATS[path] | {"model": "guide"})
        plain = stand.pipelines.calls[-1]
        assert plain.prompt.messages == HELLO
        assert plain.sampling.top_k != 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/api/generate"])
async def test_a_template_of_the_name_takes_the_place_of_the_models(tmp_path: Path, path: str) -> None:
    async with serve_node(tmp_path) as stand:
        await make_mario(stand)
        template = {"template": "{{ messages }}"}
        await stand.http.post("/api/admin/models/mario/preset", json=template)
        await stand.http.post(path, json=CHATS[path])
        assert stand.pipelines.calls[-1].prompt.template == "{{ messages }}"
        text = await stand.http.post("/apply-template", json={"model": "mario", "messages": HELLO})
        assert text.json()["prompt"] == "{{ messages }}<user>hello<assistant>"
        await stand.http.post(path, json=CHATS[path] | {"model": "guide"})
        assert stand.pipelines.calls[-1].prompt.template == ""


async def test_what_a_request_says_goes_first(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await make_mario(stand)
        own = [{"role": "system", "content": "You are Luigi."}, *HELLO]
        said = {"temperature": 1.0, "stop": [], "max_tokens": 5, "messages": own}
        await stand.http.post("/v1/chat/completions", json=CHATS["/v1/chat/completions"] | said)
        call = stand.pipelines.calls[-1]
        assert call.prompt.messages == own
        sampling = call.sampling
        assert (sampling.temperature, sampling.top_k, sampling.stop) == (1.0, 3, ())
        assert sampling.max_tokens == 5
        await stand.http.post("/api/generate", json=CHATS["/api/generate"] | {"system": "", "raw": False})
        assert stand.pipelines.calls[-1].prompt.messages == HELLO


async def test_plain_completions_take_sampling_and_length_only(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await make_mario(stand)
        await stand.http.post("/v1/completions", json={"model": "mario", "prompt": "once"})
        call = stand.pipelines.calls[-1]
        assert (call.prompt.text, call.sampling.top_k, call.sampling.max_tokens) == ("once", 3, 7)


async def test_a_load_under_the_name_has_its_context(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await make_mario(stand)
        for body, n_ctx in (({}, 512), ({"n_ctx": 64}, 64)):
            answer = await stand.http.post("/api/admin/models/mario/load", json=body)
            assert answer.status_code == 200
            (options,) = stand.pool.options.values()
            assert options.n_ctx == n_ctx


@pytest.mark.parametrize(
    ("body", "field"),
    [({"temperature": 1}, "temperature"), ({"context": 1}, "context"), ({"sampling": {"top_p": 2}}, "top_p")],
)
async def test_a_wrong_preset_is_refused_with_its_field(
    tmp_path: Path, body: dict[str, Any], field: str
) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post("/api/admin/models/guide/preset", json=body)
        assert answer.status_code == 400
        assert field in answer.text
        assert (await stand.http.get("/api/admin/models/guide/preset")).json() == {}
        assert (await stand.http.get("/api/admin/models/nobody/preset")).status_code == 404


async def test_a_name_that_is_forgotten_takes_its_preset_along(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await make_mario(stand)
        await stand.http.delete("/api/admin/models/mario")
        assert (await stand.http.get("/api/admin/models/mario/preset")).status_code == 404
        await stand.http.post("/api/admin/models/guide/alias", json={"name": "mario"})
        assert (await stand.http.get("/api/admin/models/mario/preset")).json() == {}


# Ollama's words.


async def test_ollamas_show_tells_quantisation_and_parameters(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await make_mario(stand)
        shown = (await stand.http.post("/api/show", json={"model": "mario:latest"})).json()
        details = shown["details"]
        assert (details["quantization_level"], details["parameter_size"][-1]) == ("Q8_0", "M")
        assert shown["model_info"]["general.parameter_count"] > 8e6
        assert shown["system"] == "You are Mario."
        assert shown["parameters"].splitlines() == [
            "num_ctx 512",
            "num_predict 7",
            "temperature 0.25",
            "top_k 3",
            'stop "END"',
        ]


async def test_ollamas_create_copy_and_delete_manage_names(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        body = {"model": "mario", "from": "guide:latest", "system": "You are Mario."}
        created = await stand.http.post("/api/create", json=body | {"parameters": {"top_k": 3, "num_gpu": 1}})
        assert created.text.splitlines()[-1] == '{"status":"success"}'
        copied = await stand.http.post("/api/copy", json={"source": "mario", "destination": "luigi:latest"})
        assert (copied.status_code, copied.content) == (200, b"")
        tags = {each["name"] for each in (await stand.http.get("/api/tags")).json()["models"]}
        assert tags == {"guide:latest", "mario:latest", "luigi:latest"}
        await stand.http.post("/api/chat", json={"model": "luigi", "messages": HELLO, "stream": False})
        call = stand.pipelines.calls[-1]
        assert (call.prompt.messages, call.sampling.top_k) == ([SYSTEM, *HELLO], 3)
        inherited = {"name": "toad", "from": "mario", "parameters": {"top_k": 9}, "stream": False}
        assert (await stand.http.post("/api/create", json=inherited)).json() == {"status": "success"}
        preset = (await stand.http.get("/api/admin/models/toad/preset")).json()
        assert preset == {"system": "You are Mario.", "sampling": {"top_k": 9}}
        gone = await stand.http.request("DELETE", "/api/delete", json={"model": "mario:latest"})
        assert gone.status_code == 200
        assert (await stand.http.post("/api/show", json={"model": "mario"})).status_code == 404
        assert (await stand.http.post("/api/show", json={"model": "luigi"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"model": "x"}, "Missing field `from`"),
        ({"model": "x", "from": "nobody"}, "not known here"),
        ({"model": "x", "from": "guide", "files": {"a.gguf": "sha256:0"}}, "files is not supported here"),
        ({"model": "x", "from": "guide", "template": "{{ .Tools }}"}, "TEMPLATE: {{ .Tools }}"),
        ({"model": "x", "from": "guide", "quantize": "q4_0"}, "quantize is not supported here"),
        ({"model": "x", "from": "guide", "parameters": {"colour": "red"}}, "colour"),
        ({"model": "X y", "from": "guide"}, "model: a model's name"),
    ],
)
async def test_what_ollamas_create_cannot_mean_here_is_refused(
    tmp_path: Path, body: dict[str, Any], complaint: str
) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post("/api/create", json=body)
        assert answer.status_code in (400, 404)
        assert complaint in answer.json()["error"]
        assert len((await stand.http.get("/api/tags")).json()["models"]) == 1


async def test_managing_models_is_administration_which_no_page_may_ask_for(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        bare = {"Content-Type": "text/plain"}
        body = b'{"source": "guide", "destination": "mario"}'
        assert (await stand.http.post("/api/copy", content=body, headers=bare)).status_code == 415
        page = {"Origin": "https://example.org"}
        deleted = await stand.http.request("DELETE", "/api/delete", json={"model": "guide"}, headers=page)
        assert deleted.status_code == 403
