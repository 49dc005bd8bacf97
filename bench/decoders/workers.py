"""What a worker reads that comes from others: the bytes of a KV, and chat templates; and what a model's own
text is searched for. The part of `decoders.py` without a network."""

from __future__ import annotations

from struct import pack

import numpy as np

from bench.decoders.target import Target
from swarmllm.api.output.tool_calls import ToolCallParser
from swarmllm_workers.decode.template import CHATML, ChatTemplate
from swarmllm_workers.engine.kv_state import BadState, read_state
from swarmllm_workers.errors import CallError

N_CELLS = 3
ROW_BYTES = 16
CALLS = {
    "Qwen": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "Llama": '{"name": "add", "parameters": {"a": 1}}',
    "Mistral": '[TOOL_CALLS]add{"a": 1}',
    "function": 'first <function=add>{"a": 1}</function> then',
}


def worker_targets() -> dict[str, Target]:
    template = CHATML + "{% for tool in tools or [] %}{{ tool.name | tojson }}{% endfor %}"
    return {
        "KV of a prefix": Target(read_state, (BadState,), {"K and V": _kv(0), "V transposed": _kv(1)}),
        "tool calls in an answer": Target(
            _find_calls, (), {name: text.encode() for name, text in CALLS.items()}
        ),
        "chat template": Target(_render, (CallError,), {"ChatML": template.encode()}),
    }


def _kv(transposed: int) -> bytes:
    """One layer of f16, as libllama writes it (see `kv_state`)."""
    cells = b"".join(pack("<iIi", position, 1, 0) for position in range(N_CELLS))
    numbers = np.ones(N_CELLS * ROW_BYTES // 2, np.float16).tobytes()
    keys = pack("<iQ", 1, ROW_BYTES) + numbers
    values = (pack("<iII", 1, 2, ROW_BYTES // 2) if transposed else pack("<iQ", 1, ROW_BYTES)) + numbers
    return pack("<IiII", 0, 0, 1, N_CELLS) + cells + pack("<II", transposed, 1) + keys + values


def _find_calls(data: bytes) -> object:
    parser = ToolCallParser(tools=("add",))
    text = data.decode("utf-8", "replace")
    found = [each for at in range(0, len(text), 5) for each in parser.feed(text[at : at + 5])]
    return found + parser.finish()


def _render(data: bytes) -> str:
    template = ChatTemplate(data.decode("latin-1"), bos_text="<s>", eos_text="</s>")
    said: list[dict[str, object]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    return template.render(said, [{"name": "add"}])
