"""What this house weighs, and how hard it is to move into: `python -m tests.house`."""
