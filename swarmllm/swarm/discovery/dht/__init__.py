"""The DHT: who has a model that nobody among the connected nodes has.

A part of libp2p's Kademlia on a stream handler of our own: PING, FIND_NODE, ADD_PROVIDER and GET_PROVIDERS,
in the messages that js-libp2p and others speak. The library's own was rejected: it ignores its protocol
prefix, answers from a cache that is up to 48 h old, and is 5,000 lines that would have to be hardened. What
is left here is small because little is needed: it finds nodes, and whether they live, and what they have, is
learnt by connecting with them.
"""
