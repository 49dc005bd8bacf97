"""The time limit of tests that wait for something."""

DEADLINE_S = 120.0
"""A passing test never waits so long, and a failing one ends. On a busy machine all may take many times
as long, so these tests say nothing about speed; benchmarks and tests with a clock of their own do."""
