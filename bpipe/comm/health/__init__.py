"""The health of a pipeline: which ranks are alive, what each rank does, and which failure broke the pipeline."""

__all__: list[str] = []
