"""Mutants: does `make test` notice when the code is wrong? `python -m tests.mutants --help` says how they are drawn and run."""
