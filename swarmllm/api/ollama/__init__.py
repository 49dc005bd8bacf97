"""Ollama's API, for the desktop apps that speak only that."""
