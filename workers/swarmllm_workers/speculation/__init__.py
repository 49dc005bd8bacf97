"""Guessing several tokens and checking them in one batch."""
