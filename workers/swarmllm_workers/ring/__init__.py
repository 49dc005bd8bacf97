"""Decode jobs that pass from worker to worker by links."""
