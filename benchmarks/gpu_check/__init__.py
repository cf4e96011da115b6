"""The checks that `make gpu` runs on a machine's GPUs, each in a process of its own, and the page with their verdicts.

`runner` starts `python -m benchmarks.gpu_check.one_check CHECK ...` for each check and ends it at its time limit.
"""
