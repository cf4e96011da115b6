"""Work between two steps of a pipeline (clipping, loss scaling, checkpoints); each object documents its communication."""

__all__: list[str] = []
