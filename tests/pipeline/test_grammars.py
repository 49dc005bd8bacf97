"""A grammar that cannot be followed is refused where it came from; a head that gets one all the same charges
whoever sent it, and a grammar that turns out too complex is nobody's fault."""

from __future__ import annotations

import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, H

from bench.common.arithmetic import FakePool
from swarmllm.errors import GrammarTooComplex, InvalidRequest, RemoteError, SwarmLLMError
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, open_swarm

GRAMMAR = Sampling(max_tokens=6, grammar="root ::= nothing")
SCHEMA = Sampling(max_tokens=6, json_schema="{}")


class Refusing(FakePool):
    """A head whose worker finds fault with every request."""

    def __init__(self, *ranges: str, error: SwarmLLMError) -> None:
        super().__init__(*ranges)
        self.n_refused = 0

        async def refuse(position: int, layers: LayerRange) -> None:
            if layers.end == 12:
                self.n_refused += 1
                raise error

        self.before_forward = refuse


async def ask(swarm: Swarm, sampling: Sampling) -> None:
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(Prompt(text="?"), swarm.entry, sampling) as generation:
            async for _ in generation:
                pass


@pytest.mark.parametrize(
    ("sampling", "error", "is_charged"),
    [
        (GRAMMAR, InvalidRequest("no grammar", field="grammar"), True),
        (SCHEMA, InvalidRequest("no schema", field="response_format"), True),
        (GRAMMAR, InvalidRequest("no such token", field="logit_bias"), False),
    ],
)
async def test_a_head_charges_who_sent_what_its_own_worker_would_have_refused(
    sampling: Sampling, error: InvalidRequest, is_charged: bool
) -> None:
    head = Refusing("6:12", error=error)
    async with open_swarm({A: FakePool("0:6"), H: head}) as swarm:
        with pytest.raises(RemoteError, match=error.message):
            await ask(swarm, sampling)
        assert head.n_refused
        assert (swarm[H].trust.score(A) < NEUTRAL) is is_charged
        assert swarm[A].trust.score(H) < NEUTRAL, "it compiles here"
        await swarm.quiet()


async def test_a_grammar_that_turns_out_too_complex_is_the_clients_matter_alone() -> None:
    head = Refusing("6:12", error=GrammarTooComplex("too complex", field="grammar"))
    async with open_swarm({A: FakePool("0:6"), H: head}) as swarm:
        with pytest.raises(GrammarTooComplex) as caught:
            await ask(swarm, GRAMMAR)
        assert (caught.value.http_status, caught.value.field) == (400, "grammar")
        assert head.n_refused == 1, "no second pipeline has to hear of it"
        assert swarm[H].trust.score(A) >= NEUTRAL
        assert swarm[A].trust.score(H) >= NEUTRAL
        await swarm.quiet()


async def test_the_origin_asks_its_own_worker_before_anybody_else() -> None:
    class Checking(FakePool):
        async def check_grammar(self, model: object, sampling: Sampling) -> None:
            await super().check_grammar(model, sampling)
            raise InvalidRequest("no grammar", field="grammar")

    origin, head = Checking("0:6"), FakePool("6:12")
    async with open_swarm({A: origin, H: head}) as swarm:
        with pytest.raises(InvalidRequest):
            await ask(swarm, GRAMMAR)
        assert origin.checked == [GRAMMAR]
        assert not head.calls
        assert swarm[H].trust.score(A) >= NEUTRAL
