"""Tests of the bundled model; a package so that they can share `measure`."""
