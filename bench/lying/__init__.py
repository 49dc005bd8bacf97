"""The parts of `bench.lies`: untruths that are well formed, and nodes that tell them."""
