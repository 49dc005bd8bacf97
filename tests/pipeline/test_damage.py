"""Jobs that arrive damaged, and messages that should never have been sent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, M, X, Z
from trio.testing import wait_all_tasks_blocked

from bench.common.arithmetic import N_EMBD, FakePool, uncut
from swarmllm.errors import RemoteError
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.codec import decode_job, encode_job, encode_request
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import (
    CancelInference,
    JobMessage,
    LayerForward,
    PipelineAssignment,
    PipelineError,
    PrefillProgress,
    Stage,
    StreamingToken,
)
from swarmllm_proto.tensors import tensor_bytes

from .fakes import Swarm, open_swarm

SETTINGS = PipelineSettings(prefill_chunk_tokens=4)
PROMPT = "where do the layers live?"


def damage_on_arrival(
    swarm: Swarm, node_id: str, chosen: Callable[[LayerForward], bool], *, times: int = 1
) -> list[int]:
    """The first `times` jobs that are `chosen` reach `node_id` with a byte changed. Returns their
    positions, as they happen."""
    positions: list[int] = []
    pipelines = swarm[node_id].pipelines

    async def deliver(sender: str, header: bytes, payload: memoryview) -> None:
        message = decode_job(header, payload)
        if isinstance(message, LayerForward) and len(positions) < times and chosen(message):
            positions.append(message.position)
            if payload:
                changed = bytearray(payload)
                changed[-1] ^= 1
                payload = memoryview(bytes(changed))
            else:
                header = header[:-1] + bytes([header[-1] ^ 1])
        await pipelines.on_message(sender, header, payload)

    swarm[node_id].router.serve(pipelines.on_request, deliver)
    return positions


async def ask(swarm: Swarm, n_tokens: int = 12) -> str:
    async with swarm[A].pipelines.generate(
        Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=n_tokens)
    ) as generation:
        return "".join([piece.text async for piece in generation])


CASES: dict[str, Callable[[LayerForward], bool]] = {
    "first chunk": lambda job: job.position == 0,
    "middle chunk": lambda job: job.position == 8,
    "last chunk": lambda job: job.position == 24 and job.prefill_left == 0,
    "token": lambda job: job.position == len(PROMPT) + 3,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("node_id", [B, C])
@pytest.mark.parametrize("a_holds", [("0:4",), ()], ids=["origin is first", "origin holds nothing"])
async def test_a_damaged_job_is_repeated_and_the_text_is_the_same(
    case: str, node_id: str, a_holds: tuple[str, ...]
) -> None:
    pools = {
        A: FakePool(*a_holds),
        B: FakePool(*(("4:8",) if a_holds else ("0:8",))),
        C: FakePool("8:12"),
    }
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        positions = damage_on_arrival(swarm, node_id, CASES[case])
        with trio.fail_after(DEADLINE_S):
            assert await ask(swarm) == await uncut(PROMPT, 12)
        assert len(positions) == 1
        assert swarm[A].pipelines.statistics().repeats == 1
        await swarm.quiet()


@pytest.mark.parametrize("first", [A, B], ids=["origin embeds", "another node embeds"])
async def test_a_token_damaged_on_its_way_to_the_first_stage_is_repeated(first: str) -> None:
    pools = {A: FakePool(), B: FakePool(), C: FakePool("6:12")}
    pools[first].ranges = FakePool("0:6").ranges
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        positions = damage_on_arrival(
            swarm, first, lambda job: job.step == "embed" and job.position > 27, times=2
        )
        with trio.fail_after(DEADLINE_S):
            assert await ask(swarm) == await uncut(PROMPT, 12)
        # The origin repeats here without a message that could be damaged again.
        assert positions == ([28, 29] if first == A else [28, 28])
        await swarm.quiet()


async def test_a_line_that_always_damages_fails_the_request() -> None:
    pools = {A: FakePool("0:6"), B: FakePool("6:12")}
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        damage_on_arrival(swarm, B, lambda job: True, times=1000)
        with pytest.raises(RemoteError, match="4 jobs arrived damaged"), trio.fail_after(DEADLINE_S):
            await ask(swarm)
        await swarm.quiet()


def forward(request_id: str, **changes: object) -> LayerForward:
    fields: dict[str, object] = {
        "request_id": request_id,
        "step": "layer",
        "stage": 1,
        "position": 0,
        "n_tokens": 1,
        "prefill_left": 0,
    }
    return LayerForward(**{**fields, **changes})  # type: ignore[arg-type]


ROW = tensor_bytes(np.zeros((1, N_EMBD), np.float32))


async def test_messages_for_unknown_requests_are_ignored_and_counted() -> None:
    async with open_swarm({A: FakePool("0:6"), B: FakePool("6:12"), M: FakePool()}) as swarm:
        messages: list[tuple[JobMessage, bytes]] = [
            (forward("nobody"), ROW),
            (forward("nobody", step="embed", stage=0), b""),
            (StreamingToken(request_id="nobody", index=0, token=1), b"x"),
            (PrefillProgress(request_id="nobody", position=1), b""),
            (PipelineError(request_id="nobody", node_id=X, kind="worker_error"), b""),
            (PipelineError(request_id="nobody", node_id=M, kind="worker_error"), b""),
            (CancelInference(request_id="nobody"), b""),
        ]
        for message, payload in messages:
            await swarm[M].router.send(B, *encode_job(message, payload))
        await swarm[M].router.send(B, b"\xc1 no message at all", b"")
        await wait_all_tasks_blocked(0.01)
        statistics = swarm[B].pipelines.statistics()
        # The failure of "x" may be of a pipeline that "m" had, and is noted; that of "m" itself is too late
        # for whoever had a pipeline with it.
        assert (statistics.messages_ignored, statistics.messages_bad) == (5, 1)
        assert swarm[B].pipelines._suspects.now(trio.current_time()) == {X}
        assert await ask(swarm) == await uncut(PROMPT, 12)


async def test_a_stranger_cannot_meddle_with_a_request() -> None:
    """It knows the request id and says everything a stage or the origin might say."""
    pools = {A: FakePool("0:6"), B: FakePool("6:12"), M: FakePool()}
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        stranger = swarm[M].router
        async with swarm[A].pipelines.generate(
            Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=40)
        ) as generation:
            request_id = generation.request_id
            texts = []
            async for piece in generation:
                texts.append(piece.text)
                if piece.index != 3:
                    continue
                lies: list[tuple[JobMessage, bytes]] = [
                    (forward(request_id), ROW),
                    (forward(request_id, step="embed", stage=0), b""),
                    (StreamingToken(request_id=request_id, index=4, token=1, finish_reason="stop"), b"lies"),
                    (PrefillProgress(request_id=request_id, position=1), b""),
                    (PipelineError(request_id=request_id, node_id=B, kind="worker_error"), b""),
                    (CancelInference(request_id=request_id), b""),
                ]
                for message, payload in lies:
                    for node_id in (A, B):
                        await stranger.send(node_id, *encode_job(message, payload))
        assert "".join(texts) == await uncut(PROMPT, 40)
        # Nor did the stream have to survive it.
        assert generation.n_recoveries == 0
        assert swarm[A].pipelines.statistics().repeats == 0


@pytest.mark.parametrize(
    ("changes", "payload", "complaint"),
    [
        ({}, tensor_bytes(np.zeros((1, N_EMBD + 1), np.float32)), "tensor.shape"),
        ({}, tensor_bytes(np.zeros((1, N_EMBD), np.int32)), "tensor.shape"),
        ({"n_tokens": 2}, ROW, "tensor.shape"),
        ({"n_tokens": 0}, tensor_bytes(np.zeros((0, N_EMBD), np.float32)), "n_tokens"),
        ({}, b"", "tensor.ndim"),
        ({"position": 9}, ROW, "has no row"),
    ],
    ids=["wide", "ids", "short", "empty", "none", "gap"],
)
async def test_a_job_that_makes_no_sense_fails_the_request_with_the_field(
    changes: dict[str, object], payload: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = {A: FakePool("0:6"), B: FakePool("6:12")}
    async with open_swarm(pools) as swarm:
        real_send = swarm[A].router.send
        n_sent = 0

        async def send(node_id: str, header: bytes, body: bytes | memoryview = b"") -> None:
            nonlocal n_sent
            message = decode_job(header, body)
            if isinstance(message, LayerForward):
                n_sent += 1
                header, body = encode_job(forward(message.request_id, **changes), payload)
            await real_send(node_id, header, body)

        monkeypatch.setattr(swarm[A].router, "send", send)
        with (
            pytest.raises(RemoteError, match=rf"node nick-b \({B}\): .*{complaint}"),
            trio.fail_after(DEADLINE_S),
        ):
            await ask(swarm)
        assert n_sent
        await swarm.quiet()


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (StreamingToken(request_id="-", index=3999, token=1), "token 3999 came .* ahead"),
        (
            StreamingToken(request_id="-", index=0, token=1, finish_reason="stop", stopped_by=0),
            "stop string 0 of 0",
        ),
        (PrefillProgress(request_id="-", position=10_000), "rows up to 10000"),
        (
            PipelineError(request_id="-", node_id=B, kind="x", damaged=True, position=500),
            "no job is under way",
        ),
        (PipelineError(request_id="-", node_id=B, kind="x", message="bell\x07\n"), rf"\({B}\): bell  $"),
    ],
    ids=["token", "stop string", "progress", "damage", "control characters"],
)
async def test_a_stage_that_breaks_its_promises_is_named(message: JobMessage, complaint: str) -> None:
    pools = {A: FakePool("0:6"), B: FakePool("6:12")}
    async with open_swarm(pools, settings=PipelineSettings(failover_timeout_s=0)) as swarm:
        request_id = ""

        async def lie(position: int, layers: object) -> None:
            if position > len(PROMPT) + 2:
                reported = msgspec.structs.replace(message, request_id=request_id)
                await swarm[B].router.send(A, *encode_job(reported))

        async def read() -> None:
            nonlocal request_id
            async with swarm[A].pipelines.generate(
                Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=4000)
            ) as generation:
                request_id = generation.request_id
                async for _ in generation:
                    pass

        pools[B].before_forward = lie
        with pytest.raises(RemoteError, match=complaint) as failure, trio.fail_after(DEADLINE_S):
            await read()
        assert f"nick-b ({B})" in str(failure.value)
        await swarm.quiet()


def assignment(entry_id: str, **changes: object) -> PipelineAssignment:
    fields: dict[str, object] = {
        "request_id": "r1",
        "model_id": entry_id,
        "origin": M,
        "stages": (Stage(node_id=A, start=0, end=6), Stage(node_id=B, start=6, end=12)),
        "n_prompt_tokens": 3,
        "sampling": Sampling(),
    }
    return PipelineAssignment(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"origin": A}, b"must assign it itself"),
        ({"model_id": "0" * 64}, b"does not have the model"),
        ({"stages": (Stage(node_id=B, start=0, end=6),)}, b"do not cover the model's 12 layers"),
        ({"stages": (Stage(node_id=A, start=0, end=12),)}, b"no stage is assigned to this node"),
        ({"stages": (Stage(node_id=B, start=0, end=12),)}, b"layers 0:12 are not loaded here"),
        (
            {"stages": (Stage(node_id=Z, start=0, end=6), Stage(node_id=B, start=6, end=12))},
            f"does not reach {Z}".encode(),
        ),
    ],
    ids=["origin", "model", "cover", "none", "unloaded", "unreachable"],
)
async def test_assignments_that_make_no_sense_are_refused_with_the_reason(
    changes: dict[str, object], reason: bytes
) -> None:
    async with open_swarm({A: FakePool("0:6"), B: FakePool("6:12"), M: FakePool()}) as swarm:
        body = encode_request(assignment(swarm.entry.model_id, **changes))
        assert reason in await swarm[M].router.request(B, body)
        assert swarm[B].pipelines.statistics().active_stage_requests == 0


async def test_a_request_id_is_not_given_twice_and_a_cancelled_one_not_at_all() -> None:
    async with open_swarm({A: FakePool("0:6"), B: FakePool("6:12"), M: FakePool()}) as swarm:
        router, model_id = swarm[M].router, swarm.entry.model_id
        assert b"in use" not in await router.request(B, encode_request(assignment(model_id)))
        assert b"in use" in await router.request(B, encode_request(assignment(model_id)))
        for request_id in ("r1", "r2"):
            await router.send(B, *encode_job(CancelInference(request_id=request_id)))
        await swarm.quiet()
        # The cancellation of r2 has overtaken its assignment.
        body = encode_request(assignment(model_id, request_id="r2"))
        assert b"has been cancelled" in await router.request(B, body)


async def test_a_neighbour_that_overruns_the_window_ends_its_request() -> None:
    async with open_swarm({A: FakePool("0:6"), B: FakePool("6:12")}) as swarm:

        async def stuck(position: int, layers: object) -> None:
            await trio.sleep_forever()

        swarm[B].pool.before_forward = stuck
        body = encode_request(assignment(swarm.entry.model_id, origin=A))
        await swarm[A].router.request(B, body)
        for position in range(40):
            await swarm[A].router.send(B, *encode_job(forward("r1", position=position), ROW))
        await wait_all_tasks_blocked(0.01)
        await swarm.quiet()
        assert swarm[B].pipelines.statistics().messages_ignored > 0
