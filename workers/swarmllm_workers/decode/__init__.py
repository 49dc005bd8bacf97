"""From logits to tokens and text: vocabulary, templates, sampling, grammars."""
