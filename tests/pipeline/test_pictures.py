"""What a node without a vision encoder answers to whoever asks for one."""

from __future__ import annotations

from node_ids import A, B

from bench.common.arithmetic import FakePool
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.swarm import VisionEncodeRequest, VisionEncodeResponse

from .fakes import open_swarm


async def test_a_picture_is_refused_at_once_and_by_name() -> None:
    async with open_swarm({A: FakePool("0:12"), B: FakePool("0:12")}) as swarm:
        asked = VisionEncodeRequest(
            request_id="r1", model_id=swarm.entry.model_id, image=memoryview(b"\x89PNG\r\n\x1a\n")
        )
        answered = await swarm[A].router.request(B, encode_request(asked))
    refused = VisionEncodeResponse(request_id="r1", error="VisionEncoderUnavailable")
    assert decode_response(answered) == refused
