"""Reaches nodes that nobody can dial through a node that both sides can reach, and directly as soon as
possible.

libp2p's circuit relay v2 and DCUtR (hole punching), spoken by handlers of our own in the library's messages:
its own are 4,000 lines that would have to be hardened, and what is needed is a page of each. The relay
carries ciphertext: through it the two ends shake hands with Noise, and prove membership, as on any other
connection.
"""
