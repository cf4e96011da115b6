"""`make test-release`: the packages, installed in new environments on every Python and torch that this machine can get."""
