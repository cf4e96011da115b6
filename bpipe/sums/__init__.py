"""Gradients of weights that several stages have, twins or tied ones: exchanged and added up within a step."""

__all__: list[str] = []
