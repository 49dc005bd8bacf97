"""The control plane on py-libp2p: host, guards, gossip, requests between nodes."""
