"""The HTTP server: connections, keys, cross-origin checks, errors, and the application."""
