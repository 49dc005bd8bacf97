"""The worker that encodes pictures and sounds: it decodes a file and runs a projector (mmproj) over it."""
