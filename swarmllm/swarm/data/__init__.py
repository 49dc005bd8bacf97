"""The data plane: direct connections between nodes, what travels on them, and their fallback over libp2p."""
