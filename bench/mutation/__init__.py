"""The parts of `bench.mutants`: which lines are changed, which tests run them, and the runs."""
