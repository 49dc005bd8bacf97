"""The control plane: all that knows py-libp2p's host, its guards, gossip, requests and supervision."""
