"""A griffe extension: `Example:` in a docstring is what griffe calls `Examples:`, a section whose `>>>` lines are code."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Examples"]


class Examples(griffe.Extension):  # type: ignore[misc]
    """Renames the section in every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename it in this object's."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
