"""One process as one rank of a "fake" process group: a step's shapes, memory and plan, without the other ranks.

The core loads this room only where a stage's group has the backend "fake".
"""

__all__: list[str] = []
