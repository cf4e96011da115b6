"""Shapes of plans in pairs: what each pair does in training."""
