"""The worker that encodes pictures: it decodes a picture's file and runs a projector (mmproj) over it."""
