"""The worker's loop and what each of the daemon's messages does."""
