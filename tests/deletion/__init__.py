"""bpipe without one of its rooms: `python -m tests.deletion`."""
