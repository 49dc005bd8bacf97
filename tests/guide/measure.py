"""Measure a GGUF on the held-out conversations: `python tests/guide/measure.py`.

What is measured is the quantised file through libllama with greedy decoding, that is, what a user gets,
and not the weights in PyTorch. The tests take their samples through `Answerer` too.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import llama_cpp

from swarmllm.guide import GUIDE_PATH, GUIDE_TEMPERATURE, GUIDE_TYPICAL_P
from swarmllm.guide.corpus import Sample, heldout
from swarmllm.guide.scoring import Verdict, is_learned, judge, summary
from swarmllm.guide.template import answer_text, render

MAX_ANSWER_TOKENS = 200


class Answerer:
    """A GGUF that answers, greedily unless a temperature is given."""

    def __init__(self, path: Path, n_threads: int = 1) -> None:
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=1024, n_threads=n_threads, n_threads_batch=n_threads, verbose=False
        )

    def answer(self, sample: Sample, temperature: float = 0.0, typical_p: float = 1.0, seed: int = 0) -> str:
        """What the model says in place of the last message of the sample. Nothing else changes how tokens are
        drawn, as in a node's answer to a request that says nothing of it."""
        prompt = render(sample.messages[:-1], sample.tools, add_generation_prompt=True)
        ids = self.llama.tokenize(prompt.encode(), add_bos=False, special=True)
        completion: Any = self.llama.create_completion(
            ids,
            max_tokens=MAX_ANSWER_TOKENS,
            temperature=temperature,
            seed=seed,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            typical_p=typical_p,
        )
        text: str = completion["choices"][0]["text"]
        return text

    def judge_all(self, samples: Iterable[Sample]) -> list[Verdict]:
        return [judge(sample, self.answer(sample)) for sample in samples]

    def drawn(self, n_questions: int, n_samples: int, temperature: float, typical_p: float) -> list[Verdict]:
        """Held-out single questions, each answered several times."""
        singles = [sample for sample in heldout() if sample.category.startswith("single/")]
        chosen = [singles[i * len(singles) // n_questions] for i in range(n_questions)]
        return [
            judge(sample, self.answer(sample, temperature, typical_p, seed=1000 * i + j))
            for i, sample in enumerate(chosen)
            for j in range(n_samples)
        ]

    def close(self) -> None:
        self.llama.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=GUIDE_PATH)
    parser.add_argument("--every", type=int, default=1, help="take every n-th conversation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wrong", type=int, default=0, help="show this many wrong answers per category")
    parser.add_argument("--drawn", type=int, help="ask 50 single questions, each this many times")
    parser.add_argument("--temperature", type=float, default=GUIDE_TEMPERATURE, help="of --drawn")
    parser.add_argument("--typical-p", type=float, default=GUIDE_TYPICAL_P, help="of --drawn")
    parser.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args()
    if args.drawn:
        drawn = Answerer(args.model, args.threads).drawn(50, args.drawn, args.temperature, args.typical_p)
        mixed = [verdict for verdict in drawn if not (verdict.on_topic or is_learned(verdict.answer))]
        right, n = sum(verdict.on_topic for verdict in drawn), len(drawn)
        print(f"n {n}  on topic {right / n:.3f}  no answer of the corpus {len(mixed) / n:.3f}")
        for verdict in mixed:
            print(f"  {verdict.sample.messages[-2]['content']}\n    {verdict.answer}")
        return
    verdicts = Answerer(args.model, args.threads).judge_all(heldout()[:: args.every])
    table = summary(verdicts)
    for group, row in table.items():
        names = f"  name right {row['name_right']:.3f}" if "name_right" in row else ""
        shares = f"right {row['right']:.3f}  on topic {row['on_topic']:.3f}"
        print(f"{group:24} n {row['n']:4.0f}  {shares}{names}")
    shown: dict[str, int] = defaultdict(int)
    for verdict in verdicts:
        category = verdict.sample.category
        if not verdict.on_topic and shown[category] < args.wrong:
            shown[category] += 1
            print(f"\n[{category}] {verdict.sample.messages[-2]['content']}")
            print(f"  expected: {answer_text(verdict.sample.messages[-1])}\n  answered: {verdict.answer}")
    if args.json is not None:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
