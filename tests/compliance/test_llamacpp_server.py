"""llama.cpp's own server tests, with its server's command line started as this daemon.

They are in the source distribution of `llama-cpp-python`, from where `make compliance` takes them. They
expect tiny models of their own, of which none is in a package registry, and larger ones from the web. The
guide answers in place of each. FAILING says why each test that fails does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest
from daemon_process import running_daemon, wait_for
from deadlines import DEADLINE_S

ROOT = Path(__file__).parents[2]
FOREIGN = Path(os.environ.get("SWARMLLM_COMPLIANCE_VENV", ROOT / ".venv-compliance"))
SHIM = Path(__file__).parent / "llamacpp" / "llama_server.py"
TIMEOUT_S: Final = 3600
ENDS: Final = ("failure", "error", "skipped")
JUDGED: Final = (
    "test_chat_completion",
    "test_compat_anthropic",
    "test_compat_oai_responses",
    "test_completion",
    "test_embedding",
    "test_ignore_eos",
    "test_template",
    "test_tokenize",
    "test_tool_call",
)
PASSED_MIN: Final = 140
"""Of 291; 145 of the 267 that ran in 33 minutes of a busy machine, before streams of forced calls passed."""
STARVED_MAX: Final = 3
"""Tests that fail without a reason below: each has a minute, which is too little on a busy machine."""
WORDS: Final = "words or token counts of that server's tiny model"
FIRST_CHUNK: Final = "a stream's first chunk has no content, and not null"
VERBOSE: Final = "__verbose, that server's debugging output, is not offered"
FAILING: Final = {
    "test_anthropic_empty_messages": "no messages are refused, as Anthropic does",
    "test_anthropic_thinking": "a budget below 1024 is refused, as Anthropic does",
    "test_anthropic_thinking_history_in_count_tokens": "the guide's template leaves earlier thoughts out",
    "test_anthropic_thinking_with_reasoning_model": "a reasoning model from the web",
    "test_anthropic_tool_result_with_image": "a model without pictures answers 400, not 500",
    "test_anthropic_vision_base64_with_multimodal_model": "a model with a projector from the web",
    "test_anthropic_vision_format_accepted": "a model without pictures answers 400, not 500",
    "test_cache_vs_nocache_prompt": "skipped by the suite itself",
    "test_chat_completion": WORDS,
    "test_chat_completion_cached_tokens": WORDS,
    "test_chat_completion_stream": FIRST_CHUNK,
    "test_chat_completion_with_openai_library": WORDS,
    "test_chat_completion_with_timings_per_token": FIRST_CHUNK,
    "test_chat_template": VERBOSE,
    "test_chat_template_assistant_prefill": VERBOSE,
    "test_chat_template_continue_final_message_vllm_compat": VERBOSE,
    "test_completion": WORDS,
    "test_completion_parallel_slots": "the guide ends its answer at once",
    "test_completion_prompt_cache": WORDS,
    "test_completion_response_fields": "the prompt is told as it was sent, without the token that begins it",
    "test_completion_stream": WORDS,
    "test_completion_stream_with_openai_library": WORDS,
    "test_completion_stream_with_openai_library_stops": WORDS,
    "test_completion_unified": "the guide ends its answer before",
    "test_completion_with_openai_library": WORDS,
    "test_completion_with_response_format": WORDS,
    "test_completion_without_tool_call_fast": FIRST_CHUNK,
    "test_completion_without_tool_call_slow": FIRST_CHUNK,
    "test_date_inside_prompt": "a template with a date of its own keeps it, as in transformers",
    "test_embedding_error_prompt_too_long": "another wording of the refusal",
    "test_embedding_mixed_input": "an empty text is refused",
    "test_embedding_pooling_none": "vectors of single tokens are not offered",
    "test_embedding_pooling_none_oai": "the pooling comes with the request, not by the command line",
    "test_embedding_usage_multiple": WORDS,
    "test_embedding_usage_single": WORDS,
    "test_invalid_chat_completion_req": "two messages of the assistant in a row are taken",
    "test_logprobs_stream": FIRST_CHUNK,
    "test_n_probs": "the guide ends its answer before the fifth token",
    "test_n_probs_post_backend_sampling": "post_sampling_probs is refused by name",
    "test_n_probs_post_sampling": "post_sampling_probs is refused by name",
    "test_reasoning": "what a request does not say of thinking is left to the template, as in transformers",
    "test_responses_stream_with_llama_telemetry": "timings inside the events of a response are not offered",
    "test_responses_with_openai_library": WORDS,
    "test_return_progress": "return_progress is ignored, and told so",
    "test_tokenize_with_bos": WORDS,
    "test_verbose_debug": VERBOSE,
}
"""The tests of JUDGED that fail, some of them in some of their cases only."""
DESELECTED: Final = {
    "test_tool_call.py::test_weather": "the model decides to call a tool",
    "test_tool_call.py::test_calc_result": "the model computes with what a tool has said",
    "test_tool_call.py::test_hello_world": "the model decides to call a tool",
    "test_tool_call.py::test_thoughts": "the model thinks",
}
"""Tests of judged files that ask for a larger model, or for what is not offered here."""
LEFT_OUT: Final = {
    "test_basic": "names, tags, page and number of slots from that server's command line",
    "test_compat_gcp": "Vertex AI's envelope around requests",
    "test_ctx_shift": "context shift: answers end where the context is full",
    "test_infill": "infill, with a model of its own",
    "test_kv_keep_only_active": "how that server keeps KV",
    "test_lora": "LoRA adapters",
    "test_mcp_servers": "MCP servers that the server starts",
    "test_metrics": "that server's names of metrics",
    "test_proxy": "its proxy for MCP",
    "test_rerank": "the order of a reranking model from the web; tests/test_text_encoders.py has ours",
    "test_router": "a router over several servers",
    "test_security": "keys and CORS from that server's command line; tests/api has ours",
    "test_sleep": "unloading after idle seconds from the command line",
    "test_slot_save": "slots in files",
    "test_speculative": "draft models of its own, by the command line",
    "test_stream": "streams that are resumed by name",
    "test_tools_builtin": "tools that the server runs",
    "test_vision_api": "a Gemma 3 with its projector from the web",
}
"""Files of that suite that ask for what is not offered here, or not in this way."""


def folder() -> Path:
    found = sorted(FOREIGN.glob("suite/llama_cpp_python-*/vendor/llama.cpp/tools/server/tests"))
    if not found:
        pytest.skip("the tests are not here: make compliance fetches them")
    return found[-1]


def test_no_file_of_the_suite_is_forgotten() -> None:
    known = {*JUDGED, *LEFT_OUT}
    assert {path.stem for path in (folder() / "unit").glob("test_*.py")} == known


def test_tests_of_llamacpps_server(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SHIM}" "$@"\n')
    program.chmod(0o755)
    report = tmp_path / "report.xml"
    inference = {"n_ctx": 256, "n_slots": 4, "max_queued_requests": 64}
    with running_daemon(tmp_path, "judged", load=["guide"], inference=inference) as node:
        wait_for(
            lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide to be loaded"
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"SWARMLLM_URL": node.url, "LLAMA_SERVER_BIN_PATH": str(program), "PORT": "18080"}
        done = subprocess.run(
            [
                *(FOREIGN / "bin" / "python", "-m", "pytest", "-q", "--tb=line", "--timeout=60"),
                *("-p", "no:cacheprovider", f"--junitxml={report}"),
                *(f"--deselect=unit/{name}" for name in DESELECTED),
                *(f"unit/{name}.py" for name in JUDGED),
            ],
            cwd=folder(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert node.process.poll() is None, "the daemon has died"
        assert "Traceback" not in node.log.read_text()
    assert report.exists(), (done.stdout + done.stderr)[-4000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    passed = [case for case in cases if not any(case.find(kind) is not None for kind in ENDS)]
    record_property(
        f"tests of llama.cpp's server passed, of {len(cases)}, at least {PASSED_MIN}", len(passed)
    )
    failed = {case.get("name", "").partition("[")[0] for case in cases if case not in passed}
    unexplained = failed - FAILING.keys()
    record_property(f"of these that fail without a reason here, at most {STARVED_MAX}", sorted(unexplained))
    assert len(passed) >= PASSED_MIN, done.stdout[-8000:]
    assert len(unexplained) <= STARVED_MAX, unexplained
