"""The scheduler: which requests' rows run next, and in which batch."""
