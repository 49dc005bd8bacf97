"""Finds and reaches other nodes: dialling, mDNS, peer exchange, reachability, DHT and relays."""
