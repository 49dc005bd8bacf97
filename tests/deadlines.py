"""How long a test waits for what must come."""

PATIENCE_S = 120.0
"""A passing test never waits so long, and a failing one ends. What is quick on a quiet machine may take many
times as long on a busy one: how soon something happens is what benchmarks and tests with a clock of their
own say."""
