"""A worker that computes nothing and misbehaves on demand: `fake_worker.py [HABIT] ... --socket PATH`.

HABIT is what it does instead of starting properly. Once it serves, the request id of a Forward or Generate
is the order it obeys: "die", "hang", "garbage", "oversized", "stranger", "wrong-answer", "context-full",
"no-slot", "ignore", "gives-up"; others are served, a Forward by adding the number of its layers, a Generate
by counting.
"""

from __future__ import annotations

import os
import socket
import sys
import time

HABIT = sys.argv[1] if not sys.argv[1].startswith("--") else ""
if HABIT == "exits":
    print("no such model\nreally not", file=sys.stderr)
    sys.exit(3)
if HABIT == "never-connects":
    time.sleep(60)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[-1])
if HABIT == "never-ready":
    time.sleep(60)
if HABIT == "garbage":
    connection.sendall(b"\xff" * 100)
    time.sleep(60)
if HABIT == "half-a-frame":
    connection.sendall(b"\x10\0\0\0{")
    sys.exit(0)

import numpy as np  # noqa: E402

from swarmllm_proto import ipc  # noqa: E402
from swarmllm_proto.codec import decode_daemon_message, encode_ipc  # noqa: E402
from swarmllm_proto.frames import Frame, FrameDecoder  # noqa: E402
from swarmllm_proto.tensors import decode_tensor, encode_tensor  # noqa: E402

decoder = FrameDecoder()
ranges: list[tuple[int, int]] = []
streams: dict[str, list[int]] = {}


def send(message: ipc.AnyWorkerMessage, payload: object = b"") -> None:
    connection.sendall(b"".join(encode_ipc(message, payload)))  # type: ignore[arg-type]


def finish(call_id: int, request_id: str, reason: ipc.FinishReason, n_generated: int) -> None:
    send(
        ipc.GenerateDone(
            id=call_id,
            request_id=request_id,
            finish_reason=reason,
            n_prompt_tokens=0,
            n_generated=n_generated,
            prefill_s=0.0,
            decode_s=0.0,
        )
    )


def obey(order: str, call_id: int) -> bool:
    if order == "die":
        print("I have seen enough", file=sys.stderr)
        os.kill(os.getpid(), 9)
    if order == "garbage":
        connection.sendall(b"\x05\0\0\0hello\0\0\0\0")
    if order == "oversized":
        connection.sendall(b"\xff\xff\xff\xff")
    if order == "stranger":
        send(ipc.Done(id=call_id + 1000))
    if order == "keeps-two":
        send(ipc.PrefixManifestUpdate(n_blocks=(2, 1)), bytes(64))
    if order == "counts-wrong":
        send(ipc.PrefixManifestUpdate(n_blocks=(2, 1)), bytes(32))
    if order == "wrong-answer":
        send(ipc.Tokens(id=call_id))
    if order == "context-full":
        send(ipc.Error(id=call_id, kind="context_full", message="900 of 800 cells"))
    if order == "no-slot":
        send(ipc.Error(id=call_id, kind="no_slot", message="all 2 taken"))
    if order == "gives-up":
        send(ipc.Error(id=call_id, kind="out_of_memory", message="no more", fatal=True))
        sys.exit(1)
    if order == "hang":
        time.sleep(60)
    return order in (
        "garbage",
        "oversized",
        "counts-wrong",
        "stranger",
        "wrong-answer",
        "context-full",
        "no-slot",
        "ignore",
    )


path = ""


def handle(frame: Frame) -> None:
    global path
    message = decode_daemon_message(frame)
    match message:
        case ipc.Open():
            path = message.path
            if message.path.endswith("broken.gguf"):
                send(ipc.Error(id=message.id, kind="bad_model", message="not a GGUF file", field="path"))
                return
            send(
                ipc.Opened(
                    id=message.id,
                    architecture="fake",
                    name="fake",
                    n_layers=12,
                    n_embd=8,
                    n_vocab=256,
                    context_length=99,
                    cut_alignment=3 if "listed" in message.path else 1,
                )
            )
        case ipc.CheckCuts():
            if "dies-below-4" in path and min(message.units, default=0) < 4:
                os.abort()
            if "dies-always" in path:
                os.abort()
            send(ipc.CutsChecked(id=message.id, cut_alignment=message.units[0] if message.units else 2))
        case ipc.Load():
            send(ipc.Progress(id=message.id, done_bytes=1, total_bytes=2))
            if message.end > 12:
                send(ipc.Error(id=message.id, kind="cannot_cut", message="only 12 layers", field="end"))
                return
            ranges.append((message.start, message.end))
            mapped_bytes = 1000 * sum(end - start for start, end in ranges)
            send(
                ipc.Loaded(
                    id=message.id,
                    ranges=tuple(ranges),
                    work_bytes=message.mapped_beside_bytes or 0,  # so that a test can see it
                    mapped_bytes=mapped_bytes,
                )
            )
        case ipc.Unload():
            ranges.remove((message.start, message.end))
            send(ipc.Loaded(id=message.id, ranges=tuple(ranges)))
        case ipc.Tokenize():
            text = message.text if message.text is not None else str(message.messages)
            send(
                ipc.Tokens(id=message.id),
                encode_tensor(np.frombuffer(text.encode(), np.uint8).astype(np.int32)),
            )
        case ipc.Embed():
            tokens = decode_tensor(frame.payload)
            send(
                ipc.LayerResult(id=message.id),
                encode_tensor(np.repeat(tokens[:, None], 8, 1).astype(np.float32)),
            )
        case ipc.Forward() if not obey(message.request_id, message.id):
            if message.want == "token":
                send(ipc.Token(id=message.id, request_id=message.request_id, index=0, token=7), b"seven")
            else:
                rows = decode_tensor(frame.payload) + np.float32(message.end - message.start)
                send(ipc.LayerResult(id=message.id, request_id=message.request_id), encode_tensor(rows))
        case ipc.Generate() if not obey(message.request_id, message.id):
            if not streams:
                send(ipc.AtWork(is_at_work=True))
            streams[message.request_id] = [message.id, 0, message.sampling.max_tokens]
        case ipc.CancelRequest():
            call_id, n_done, _ = streams.pop(message.request_id, (0, 0, 0))
            if call_id:
                finish(call_id, message.request_id, "cancelled", n_done)
                if not streams:
                    send(ipc.AtWork(is_at_work=False))
            send(ipc.Done(id=message.id))
        case ipc.Cut() if message.start > 8:
            send(ipc.Error(id=message.id, kind="out_of_memory", message="not there"))
        case ipc.Cut():
            send(ipc.Done(id=message.id))
        case ipc.UseThreads() if HABIT == "refuses-threads":
            send(ipc.Error(id=message.id, kind="engine", message="not so many"))
        case ipc.UseThreads():
            send(ipc.Done(id=message.id))
        case ipc.ReleaseRequestKv():
            send(ipc.Done(id=message.id))
        case ipc.Shutdown():
            if HABIT == "stubborn":
                time.sleep(60)
            send(ipc.Bye(id=message.id))
            sys.exit(0)


def step() -> None:
    for request_id, stream in list(streams.items()):
        call_id, n_done, max_tokens = stream
        if n_done < max_tokens:
            token = ipc.Token(id=call_id, request_id=request_id, index=n_done, token=n_done)
            send(token, str(n_done).encode())
            stream[1] += 1
        else:
            del streams[request_id]
            finish(call_id, request_id, "length", n_done)


send(ipc.Ready(pid=os.getpid(), version="0", engine="fake"))
while True:
    connection.settimeout(0.002 if streams else None)
    try:
        received = connection.recv(65536)
    except TimeoutError:
        step()
        continue
    if not received:
        break
    for each in decoder.feed(received):
        handle(each)
