"""From trained weights to a quantised GGUF that libllama loads."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer

from .data import PRE_TOKENIZER
from .model import Llama
from .template import END_OF_TEXT, IM_END, SPECIAL_TOKENS, TEMPLATE, TOOL_TAGS


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Tool tags are user-defined tokens: control tokens would vanish from the generated text."""
    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    kinds = [
        gguf.TokenType.USER_DEFINED
        if token in TOOL_TAGS
        else gguf.TokenType.CONTROL
        if token in SPECIAL_TOKENS
        else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [" ".join(merge) if isinstance(merge, list) else merge for merge in bpe["merges"]]
    )
    writer.add_eos_token_id(tokens.index(IM_END))
    writer.add_pad_token_id(tokens.index(END_OF_TEXT))
    writer.add_bos_token_id(tokens.index(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def export_gguf(
    model: Llama,
    tokenizer: Tokenizer,
    path: Path,
    *,
    name: str,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
) -> None:
    """Write the model to `path` in one atomic step; every matrix is quantised, the norms stay float32."""
    shape = model.shape
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_name(name)
    writer.add_license("Apache-2.0")
    writer.add_description("Answers questions about SwarmLLM")
    writer.add_context_length(shape.n_context)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if quantisation == gguf.GGMLQuantizationType.Q8_0:
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _write_tokenizer(writer, tokenizer)
    for tensor_name, weight in model.state_dict().items():
        values = weight.detach().float().numpy()
        if values.ndim == 1 or quantisation == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor_name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(tensor_name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)
