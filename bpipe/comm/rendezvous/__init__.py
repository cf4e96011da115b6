"""Rendezvous: find the other ranks' addresses and connect to those that a rank is linked with."""

__all__: list[str] = []
