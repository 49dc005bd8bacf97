"""The DHT: finds nodes that have a model which no connected node has.

A part of libp2p's Kademlia on a stream handler of our own: PING, FIND_NODE, ADD_PROVIDER and GET_PROVIDERS,
in the messages that js-libp2p and others speak. The library's own was rejected: it ignores its protocol
prefix, answers from a cache that is up to 48 h old, and is 5,000 lines that would have to be hardened. This
implementation is small because little is needed: the DHT finds nodes, and a connection shows whether they
live and what they have.
"""
