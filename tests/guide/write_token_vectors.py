"""Write `token_vectors.json` with the tokenizer of the training: `python -m tests.guide.write_token_vectors`.

The tests compare libllama with these vectors, so that they need neither the training extra nor the corpus.
"""

from __future__ import annotations

import json
from pathlib import Path

from swarmllm.guide import corpus
from swarmllm.guide.data import sample_texts, train_tokenizer
from swarmllm.guide.model import GUIDE_SHAPE
from swarmllm.guide.template import render
from swarmllm.guide.train import N_TOKENIZER_SAMPLES, TOKENIZER_SEED

TEXTS = (
    "",
    "What is a pipeline?",
    "  leading, trailing  \n\n\n and   inner spaces \t\ttabs\r\n",
    "def f(x: int) -> str:\n    return f'{x!r}' if x else \"none\"  # comment\n",
    '{"name": "get_weather", "arguments": {"city": "São Paulo", "n": [1, 22, 333]}}',
    "Ünïcödé: naïve façade, Straße, Ελληνικά, русский, עברית, العربية",
    "日本語のテキスト 한국어 中文 ไทย हिन्दी",
    "emoji 🙂👩‍👩‍👧‍👦🇩🇪 and symbols ≤≥∑∫ €£¥ ½ ² Ⅷ",
    "I'm you'll WE'VE it'S don't O'Neil's",
    "1234567890 3.14159 0x1F 1e-9 127.0.0.1:8800",
    "e\u0301 combining, \u00a0 no-break, \u2003 em space, \u200b zero width",
    "https://example.org/a_b-c?d=e&f=%20#g \\ | ~ ` ^ @@ $$ %% &&",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{}\n</tool_call><|im_end|>",
    "<tools></tools><tool_response>x</tool_response><|endoftext|> <tool_cal <|im_",
    "A" * 70 + "b" * 33 + "\n" * 5,
)


def main() -> None:
    tokenizer = train_tokenizer(sample_texts(N_TOKENIZER_SAMPLES, TOKENIZER_SEED), GUIDE_SHAPE.n_vocab)
    texts = [*TEXTS, *(render(sample.messages, sample.tools) for sample in corpus.build(12, seed=99))]
    lines = [json.dumps({"text": text, "ids": tokenizer.encode(text).ids}) for text in texts]
    path = Path(__file__).with_name("token_vectors.json")
    path.write_text("[" + ",\n".join(lines) + "]\n")


if __name__ == "__main__":
    main()
