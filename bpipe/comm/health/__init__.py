"""Who is alive, what each rank does, and what broke a pipeline."""

__all__: list[str] = []
