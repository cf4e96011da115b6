"""Modules, batches and loops at the edges of what people train: each equals a single process to the bit, or is refused by name."""
