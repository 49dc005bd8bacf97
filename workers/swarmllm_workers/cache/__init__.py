"""KV that outlives its request, and the journal of rows that were sent on."""
