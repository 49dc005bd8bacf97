"""Whole texts through models of the BERT kind."""
