"""How long a reader waits when a stage is killed and another node holds its layers, against what computing
the whole prompt costs.

    python -m bench.recovery [--rounds 6]

Four daemons on loopback, the bundled model in thirds, the middle one held twice. After a few tokens of an
answer to a long prompt, the node with the middle third is killed (-9). The rival of each pause is the first
token of the same stream: the prompt in full, over as many stages. Prompts begin differently, so that nothing
is known of them. `--journal-mb 0` is the same without journals.
"""

from __future__ import annotations

import argparse
import json
import threading
from random import Random

from bench.chaos import Chaos, Stream, chaos
from bench.common.figures import RESULTS, Figure, machine, ratios, table

HOLDINGS = {"a": ["guide:0:4"], "b": ["guide:4:8"], "c": ["guide:8:12"], "d": ["guide:4:8"]}
N_SENTENCES = 100
N_TOKENS = 24


def long_prompt(number: int) -> str:
    sentences = (f"Note {number} point {i}: a stage holds layers." for i in range(N_SENTENCES))
    return " ".join([*sentences, "What is a pipeline?"])


class Middle(Random):
    """Kills early, and always the node in the middle."""

    def randrange(self, *bounds: int) -> int:  # type: ignore[override]
        return 3


def one(swarm: Chaos, number: int) -> Stream:
    """Everybody is up again at the end."""
    ended = threading.Event()
    found: list[Stream] = []

    def work() -> None:
        try:
            found.append(swarm.stream(long_prompt(number), N_TOKENS, Middle(number)))
        finally:
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    swarm.repair(ended)
    thread.join()
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--journal-mb", type=int, default=256)
    arguments = parser.parse_args()
    with chaos(HOLDINGS, ("kill",), journal_max_mb=arguments.journal_mb) as swarm:
        swarm.spared = frozenset({"a", "c"})
        streams = [one(swarm, number) for number in range(arguments.rounds + 1)][1:]
    assert not any(stream.error for stream in streams), [stream.error for stream in streams]
    hit = [stream for stream in streams if stream.n_recoveries]
    whole = Figure("first token: the whole prompt", "s", [stream.first_s for stream in hit])
    pause = Figure("pause after a kill", "s", [stream.longest_pause_s for stream in hit])
    known = Figure("of it, after the failure was known", "s", [stream.recovery_s for stream in hit])
    ratio, known_ratio = ratios(pause, whole), ratios(known, whole)
    text = table([(whole, None), (pause, ratio), (known, known_ratio)])
    n_rebuilt = sum(stream.n_rebuilt for stream in hit)
    print(f"{len(hit)} of {len(streams)} streams changed pipelines, {n_rebuilt} kept what was left\n{text}")
    data = {
        "machine": machine(),
        "command": "python -m bench.recovery",
        "figures": [figure.as_json() for figure in (whole, pause, ratio, known, known_ratio)],
    }
    name = "recovery" if arguments.journal_mb else "recovery-without-journals"
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
