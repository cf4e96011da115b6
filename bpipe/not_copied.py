"""What holds connections, threads or a place in a pipeline has no copy: it says so, and what to copy instead."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from bpipe.errors import CopyError

__all__: list[str] = []


class NotCopied:
    """Refuses to be copied, deeply or not, and to be pickled."""

    instead_of_a_copy: ClassVar[str] = (
        "it belongs to its process. Copy or pickle its modules or their state_dict, or save them with bpipe.training_state, and "
        "make a new one"
    )

    def __getstate__(self) -> NoReturn:
        raise CopyError(f"a {type(self).__name__} cannot be copied or pickled: {self.instead_of_a_copy}")
