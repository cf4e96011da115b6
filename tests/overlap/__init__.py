"""Tests of bpipe.overlap."""
