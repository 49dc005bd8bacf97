"""Records: signed envelopes, how they spread, and the registry that is read out of them."""
