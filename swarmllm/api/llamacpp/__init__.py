"""The API of llama.cpp's server, beside the one that it shares with OpenAI's."""
