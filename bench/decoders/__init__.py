"""Everything that decodes bytes from outside, for `bench.fuzz`."""
