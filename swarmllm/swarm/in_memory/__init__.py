"""A swarm without a network: the in-memory router that tests and simulations run on."""
