"""Everything that reads bytes from outside, in one form."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import gguf
import msgspec
import numpy as np

from bench.decoders.files import file_targets
from bench.decoders.handshakes import handshake_targets
from bench.decoders.hostile_bytes import frames_of, golden
from bench.decoders.swarm import swarm_targets
from bench.decoders.target import ADDRESS, NODE_ID, Decode, Target
from bench.decoders.wire import wire_targets
from bench.decoders.workers import worker_targets
from swarmllm.api.anthropic.messages import MessagesRequest
from swarmllm.api.http.errors import decode_body
from swarmllm.api.ollama.endpoints import OllamaChat, OllamaGenerate
from swarmllm.api.openai.completions import CompletionRequest
from swarmllm.api.openai.embeddings import EmbeddingRequest
from swarmllm.api.openai.responses_request import ResponsesRequest
from swarmllm.api.openai.schema import ChatRequest
from swarmllm.errors import BadModel, InvalidRequest
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.gguf_header import read_header
from swarmllm.swarm.membership.invitation import from_text, invitation, to_text
from swarmllm.swarm.membership.network_key import private_network
from swarmllm_proto import codec
from swarmllm_proto.envelope import Details, Envelope, Heartbeat, seal, unseal
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.record_parts import RecordDetails, decode_details
from swarmllm_proto.router_messages import (
    DialBackRequest,
    DialBackResponse,
    PeerExchangeRequest,
    PeerExchangeResponse,
    decode_neighbour,
)
from swarmllm_proto.tensors import decode_tensor
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.grammars.schema_rewriter import NO_SCHEMA, rewritings

NOTHING = memoryview(b"")
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0},
        "s": {"enum": ["a", 1]},
        "l": {"$ref": "#/$defs/l"},
    },
    "required": ["n"],
    "$defs": {"l": {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 3}},
}
GGUF_BYTES = 48 * 1024
"""Of the guide's file: all its metadata begins here, and what follows is missing."""


def _worker_stream(data: bytes) -> None:
    for frame in frames_of(data):
        codec.decode_worker_message(frame)


def _daemon_stream(data: bytes) -> None:
    for frame in frames_of(data):
        codec.decode_daemon_message(frame)


def _job_stream(data: bytes) -> None:
    for frame in frames_of(data):
        codec.decode_job(frame.header, frame.payload)


def _byte_by_byte(data: bytes) -> None:
    decoder = FrameDecoder(header_max=1 << 16, payload_max=1 << 16)
    for at in range(min(len(data), 200)):
        decoder.feed(data[at : at + 1])


PROTOCOL: dict[str, Decode] = {
    "worker stream": _worker_stream,
    "daemon stream": _daemon_stream,
    "worker header": lambda data: codec.decode_worker_message(Frame(data, NOTHING)),
    "daemon header": lambda data: codec.decode_daemon_message(Frame(data, NOTHING)),
    "job stream": _job_stream,
    "job header": codec.decode_job,
    "record": codec.decode_record,
    "request": codec.decode_request,
    "response": codec.decode_response,
    "tensor": decode_tensor,
    "peer exchange request": lambda data: decode_neighbour(data, PeerExchangeRequest),
    "peer exchange response": lambda data: decode_neighbour(data, PeerExchangeResponse),
    "dial back request": lambda data: decode_neighbour(data, DialBackRequest),
    "dial back response": lambda data: decode_neighbour(data, DialBackResponse),
}


_MEANT_FOR = {
    "worker stream": "ipc/",
    "daemon stream": "ipc/",
    "worker header": "ipc/",
    "daemon header": "ipc/",
    "job stream": "job/",
    "job header": "job/",
    "record": "record/",
    "request": "request/",
    "response": "response/",
    "tensor": "tensor/",
    "peer exchange request": "neighbour/peer-exchange-request",
    "peer exchange response": "neighbour/peer-exchange-response",
    "dial back request": "neighbour/dial-back-request",
    "dial back response": "neighbour/dial-back-response",
}


def all_targets() -> dict[str, Target]:
    vectors = golden()
    talk: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    chat = talk | {"temperature": 0.5, "stop": ["x"]}
    completion = {"model": "m", "prompt": "hi", "max_tokens": 5, "stream": True}
    gguf = {"small": _small_gguf(), "guide's metadata": GUIDE_PATH.read_bytes()[:GGUF_BYTES]}
    envelope = Envelope(
        v=1,
        node_id=NODE_ID,
        started_at_ms=1,
        sequence=1,
        addresses=(ADDRESS,),
        data_addresses=(ADDRESS,),
        record=b"r",
    )
    heartbeat = Heartbeat(node_id=NODE_ID, started_at_ms=1, sequence=1, beat=1)
    details = Details(node_id=NODE_ID, started_at_ms=1, number=1, details=b"d")
    invited = to_text(invitation(private_network(bytes(32)), (ADDRESS,), None))
    protocol = {
        name: Target(decode, seeds={k: v for k, v in vectors.items() if k.startswith(_MEANT_FOR[name])})
        for name, decode in PROTOCOL.items()
    }
    return (
        protocol
        | swarm_targets()
        | wire_targets()
        | handshake_targets()
        | worker_targets()
        | file_targets(_new_folder())
        | {
            "frames, byte by byte": Target(_byte_by_byte, seeds=vectors),
            "envelope": Target(_unseal(Envelope), seeds={"sealed": seal(envelope, _sign)}),
            "heartbeat": Target(_unseal(Heartbeat), seeds={"sealed": seal(heartbeat, _sign)}),
            "details": Target(_unseal(Details), seeds={"sealed": seal(details, _sign)}),
            "record details": Target(
                decode_details, seeds={"empty": msgspec.msgpack.encode(RecordDetails())}
            ),
            "invitation": Target(
                lambda data: from_text(data.decode("latin-1"), 0.0),
                (InvalidRequest,),
                {"text": invited.encode()},
            ),
            "chat request": _body(ChatRequest, chat),
            "completion request": _body(CompletionRequest, completion),
            "Anthropic's request": _body(MessagesRequest, talk | {"max_tokens": 5, "system": "be kind"}),
            "response request": _body(ResponsesRequest, {"model": "m", "input": "hi", "stream": True}),
            "Ollama's chat": _body(OllamaChat, talk | {"options": {"num_predict": 5}}),
            "Ollama's generate": _body(OllamaGenerate, {"model": "m", "prompt": "hi", "stream": False}),
            "embedding request": _body(EmbeddingRequest, {"model": "m", "input": ["a", "b"]}),
            "JSON schema": Target(
                lambda data: list(rewritings(msgspec.json.decode(data))),
                NO_SCHEMA,
                {"example.json": json.dumps(SCHEMA).encode()},
            ),
            "GGUF in the daemon": Target(_DaemonGguf().decode, (BadModel,), gguf),
            "GGUF in the worker": Target(_WorkerGguf().decode, (CallError,), gguf),
        }
    )


def _unseal(kind: type[Envelope] | type[Heartbeat] | type[Details]) -> Decode:
    return lambda data: unseal(data, kind, _believe)


def _sign(_content: bytes) -> bytes:
    return bytes(64)


def _believe(_node_id: str, _content: bytes, _signature: bytes) -> bool:
    """What lies behind the signature is to be read too."""
    return True


def _body(kind: type[object], example: dict[str, object]) -> Target:
    seeds = {"example.json": json.dumps(example).encode()}
    return Target(lambda data: decode_body(data, kind), (InvalidRequest,), seeds)


_kept = ExitStack()
"""As long as the process."""
atexit.register(_kept.close)


def _new_folder() -> Path:
    return Path(_kept.enter_context(tempfile.TemporaryDirectory(dir=_memory_folder())))


class _DaemonGguf:
    def __init__(self) -> None:
        self._file = _kept.enter_context((_new_folder() / "hostile.gguf").open("w+b"))

    def decode(self, data: bytes) -> object:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(data)
        self._file.flush()
        return read_header(self._file)


class _WorkerGguf:
    def __init__(self) -> None:
        self._path = _new_folder() / "hostile.gguf"

    def decode(self, data: bytes) -> object:
        self._path.write_bytes(data)
        file = GgufFile(self._path)
        file.close()
        return file


def _small_gguf() -> bytes:
    """Whole, so that damage is what is wrong with it."""
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        path = Path(folder) / "small.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(8)
        writer.add_context_length(64)
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([0.0, 1.0])
        for name in ("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"):
            writer.add_tensor(name, np.zeros((2, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
