"""How ranks meet: addresses, connections, and the group that a user means."""

__all__: list[str] = []
