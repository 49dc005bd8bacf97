"""How nodes find and reach each other: dialling, mDNS, peer exchange, reachability, DHT and relays."""
