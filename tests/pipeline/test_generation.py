"""What the client is told about an answer."""

from __future__ import annotations

import pytest
from node_ids import A, B

from bench.common.arithmetic import fake_entry
from swarmllm.errors import InvalidRequest
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.generation import StageAccount
from swarmllm.pipeline.request import request_context
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineAssignment, Stage, StageTiming


def account(*node_ids: str) -> StageAccount:
    return StageAccount([Stage(node_id=node_id, start=i, end=i + 1) for i, node_id in enumerate(node_ids)])


def test_what_stages_did_not_spend_is_shared_by_the_hops() -> None:
    reported = account(A, B, B)
    reported.add_prefill([StageTiming(0, 0.5, 0.6), StageTiming(1, 0.25, 0.3), StageTiming(2, 0.125, 0.2)])
    for _ in range(4):
        reported.add_decoded(
            [StageTiming(0, 0.01, 0.02), StageTiming(1, 0.02, 0.03), StageTiming(2, 0.03, 0.04)]
        )
    first, second, third = reported.reports(["", "", ""], decode_s=1.0)
    assert [stage.prefill_s for stage in (first, second, third)] == [0.5, 0.25, 0.125]
    assert [stage.compute_s for stage in (first, second, third)] == pytest.approx([0.01, 0.02, 0.03])
    assert [stage.overhead_s for stage in (first, second, third)] == pytest.approx([0.01, 0.01, 0.01])
    # A second for four tokens, 90 ms of each busy: 160 ms over the hops a -> b and b -> a.
    assert [stage.network_s for stage in (first, second, third)] == pytest.approx([0.08, 0.0, 0.08])


def test_a_single_stage_elsewhere_has_no_hop_in_its_ring() -> None:
    reported = account(B)
    reported.add_decoded([StageTiming(0, 0.01, 0.02)])
    assert reported.reports([""], decode_s=1.0)[0].network_s == 0.0


def test_timings_of_stages_that_do_not_exist_are_ignored() -> None:
    reported = account(A, B)
    reported.add_prefill([StageTiming(9, 1.0, 1.0)])
    reported.add_decoded([StageTiming(9, 1.0, 1.0)])
    assert [(stage.compute_s, stage.prefill_s) for stage in reported.reports(["", ""], 0.0)] == [
        (0, 0),
        (0, 0),
    ]


def test_a_prompt_is_messages_or_text_and_shows_neither() -> None:
    assert "secret" not in repr(Prompt(text="secret"))
    assert "secret" not in repr(Prompt(messages=[{"role": "user", "content": "secret"}]))
    with pytest.raises(InvalidRequest):
        Prompt()
    with pytest.raises(InvalidRequest):
        Prompt(text="a", messages=[])


def test_rows_have_the_size_of_their_format_on_the_way_to_the_next_stage() -> None:
    stages = tuple(Stage(node_id=node_id, start=i, end=i + 1) for i, node_id in enumerate((A, B, A, B, A)))
    assignment = PipelineAssignment(
        request_id="r",
        model_id="ab" * 32,
        origin=A,
        stages=stages,
        n_prompt_tokens=3,
        sampling=Sampling(),
        row_formats=("f32", "f32", "q8_0", "lossless", "f32"),
    )
    context = request_context(assignment, fake_entry(), A)
    width = context.n_embd
    assert context.row_bytes() == [4 * width, width // 32 * 34, None, 4 * width, None]
    reported = StageAccount(stages, context.row_bytes())
    assert [each.row_bytes for each in reported.reports([""] * 5, 0.0)] == context.row_bytes()
