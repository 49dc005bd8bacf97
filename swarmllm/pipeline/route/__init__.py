"""Which nodes run which layers of a request, and the measurements that the choice uses."""
