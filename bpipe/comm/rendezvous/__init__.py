"""Rendezvous: find the other ranks' addresses and connect to all of them."""

__all__: list[str] = []
