"""What it saves that a prompt was computed before: the same request again, and a conversation's second turn.

    python -m bench.prefix --rounds 5 [--rtt-ms 80]

Through HTTP, from the client's side, against the same request with a prompt of the same length that nobody
has sent before, in turns. Resubmission: the first token's arrival and the answer's end, for 513 tokens of
prompt and 5 of answer. Second turn: the first token's arrival, for a conversation of a question of 513
tokens, its answer of 32, and another question of 32. The model is the 0.5B shape in Q8_0 with random weights
and a token per letter. `--rtt-ms`: whatever goes from one node to another passes a proxy that delays it by
half of that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import ExitStack
from random import Random

from bench.common.figures import Figure, publish, ratios
from bench.common.models import half_billion
from bench.common.swarm_nodes import Swarm, swarm_of_all
from bench.decode import N_CTX

N_PROMPT = 513
N_ANSWER = 5
N_TURN = 32
CHAT = "/v1/chat/completions"
LETTERS = {str(token): 100 for token in range(ord("a"), ord("z") + 1)}
"""The model's first 256 tokens are the bytes."""


class Asker:
    """One kind of swarm, and what was measured of it."""

    def __init__(self, swarm: Swarm, n_nodes: int) -> None:
        self._swarm = swarm
        where = f"{n_nodes} daemon{'s' if n_nodes > 1 else ''}"
        self.cold_first = Figure(f"{where}: {N_PROMPT} tokens, new", "ms to first token")
        self.again_first = Figure(f"{where}: the same again", "ms to first token")
        self.cold = Figure(f"{where}: {N_PROMPT} tokens, new", "ms")
        self.again = Figure(f"{where}: the same again", "ms")
        self.fresh_turn = Figure(f"{where}: second turn, in no session", "ms to first token")
        self.turn = Figure(f"{where}: second turn, in its session", "ms to first token")

    def round(self, seed: int, *, counts: bool) -> None:
        prompt = self._prompt(seed, N_PROMPT)
        cold_first_ms, cold_ms, n_cached = self._completion(prompt)
        assert n_cached == 0, n_cached
        again_first_ms, again_ms, n_cached = self._completion(prompt)
        assert n_cached == N_PROMPT // 64 * 64, n_cached
        turn_ms = self._second_turn(seed + 1, session=True)
        fresh_ms = self._second_turn(seed + 2, session=False)
        if counts:
            for figure, value in (
                (self.cold_first, cold_first_ms),
                (self.again_first, again_first_ms),
                (self.cold, cold_ms),
                (self.again, again_ms),
                (self.turn, turn_ms),
                (self.fresh_turn, fresh_ms),
            ):
                figure.values.append(value)

    def _second_turn(self, seed: int, *, session: bool) -> float:
        """In no session the second turn comes to a conversation that nobody has computed."""
        turns = [{"role": "user", "content": self._prompt(seed, N_PROMPT)}]
        answer = self._prompt(seed + 1000, N_TURN)
        named: dict[str, object] = {}
        if session:
            # Letters, so that the answer's text has the tokens that were generated.
            named = {"session_id": f"talk-{seed}"}
            first = self._body(messages=turns, max_tokens=N_TURN, logit_bias=LETTERS, **named)
            answer = self._swarm.client.post(CHAT, first)["choices"][0]["message"]["content"]
        turns.append({"role": "assistant", "content": answer})
        turns.append({"role": "user", "content": self._prompt(seed + 2000, N_TURN)})
        return self._first_token(self._body(messages=turns, max_tokens=2, **named))

    def _completion(self, prompt: str) -> tuple[float, float, int]:
        """Milliseconds to the first token and to the end, and the number of cached tokens."""
        body = self._body(prompt=prompt, max_tokens=N_ANSWER, stream=True)
        start_s = time.perf_counter()
        first_ms, last = 0.0, ""
        for line in self._swarm.client.post_lines(
            "/v1/completions", body | {"stream_options": {"include_usage": True}}
        ):
            # Comments keep the connection open while nothing comes.
            if line.startswith("data: {"):
                first_ms = first_ms or (time.perf_counter() - start_s) * 1000
                last = line
        elapsed_ms = (time.perf_counter() - start_s) * 1000
        usage = json.loads(last.removeprefix("data: "))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (N_PROMPT, N_ANSWER), usage
        return first_ms, elapsed_ms, int(usage["prompt_tokens_details"]["cached_tokens"])

    def _first_token(self, body: dict[str, object]) -> float:
        start_s = time.perf_counter()
        lines = self._swarm.client.post_lines(CHAT, body | {"stream": True})
        # Comments keep the connection open while nothing comes.
        next(line for line in lines if line.startswith("data:"))
        elapsed_ms = (time.perf_counter() - start_s) * 1000
        for _ in lines:
            pass
        return elapsed_ms

    def _body(self, **fields: object) -> dict[str, object]:
        return {"model": self._swarm.model, "temperature": 0, "ignore_eos": True, **fields}

    def _prompt(self, seed: int, n_tokens: int) -> str:
        """The bench model has a token per letter."""
        return "".join(Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=n_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rtt-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    rows: list[tuple[Figure, Figure | None]] = []
    for n_nodes in arguments.nodes:
        with ExitStack() as stack:
            (swarm,) = stack.enter_context(
                swarm_of_all(
                    n_nodes,
                    {half_billion(): 24},
                    arguments.rtt_ms / 2000 if arguments.rtt_ms else None,
                    n_threads=arguments.threads,
                    n_ctx=N_CTX,
                    guess_from_prompt="on",
                )
            )
            asker = Asker(swarm, n_nodes)
            for index in range(arguments.rounds + 1):
                asker.round(10 * index, counts=index > 0)
        rows += [
            (asker.cold_first, None),
            (asker.again_first, ratios(asker.cold_first, asker.again_first)),
            (asker.cold, None),
            (asker.again, ratios(asker.cold, asker.again)),
            (asker.fresh_turn, None),
            (asker.turn, ratios(asker.fresh_turn, asker.turn)),
        ]
    command = (
        f"python -m bench.prefix --nodes {' '.join(map(str, arguments.nodes))} "
        f"--rounds {arguments.rounds} --threads {arguments.threads}"
        + (f" --rtt-ms {arguments.rtt_ms:g}" if arguments.rtt_ms else "")
    )
    publish(f"prefix-0.5b-{arguments.rtt_ms:g}ms" if arguments.rtt_ms else "prefix-0.5b", command, rows)


if __name__ == "__main__":
    main()
