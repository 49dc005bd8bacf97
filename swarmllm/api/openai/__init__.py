"""OpenAI's API: chat completions, completions, responses and embeddings."""
