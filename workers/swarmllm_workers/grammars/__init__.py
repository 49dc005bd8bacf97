"""Grammars and JSON schemas, followed in processes that can be given up."""
