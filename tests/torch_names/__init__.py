"""bpipe beside torch.distributed.pipelining, by names and signatures: `python -m tests.torch_names`."""
