"""Learn which plain numbers among the inputs affect the memory and messages of a microbatch.

`step(x, it=step)` gives another number each time. Each new number may select another branch and so need other memory, until
observation shows that it does not: a number stops counting when its values have changed but the memory and messages of
microbatches have not. Messages are still agreed for the exact numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bpipe.memory.recent import Recent
from bpipe.model.microbatch import Description, text_of

__all__: list[str] = []

REMEMBERED = 16  # microbatches of a form with other numbers, to compare with
NEEDED, MOST_NEEDED = 2, 64  # values with equal memory before a number stops counting: at first, and if it counted again
MOST_FORMS = 64

Numbers = tuple[int, ...]
Taken = object  # the memory and messages of a microbatch: compares equal if nothing differs


class InputForms(NamedTuple):
    """The descriptions of the microbatches of a step, one by one."""

    exact: list[str]  # the full descriptions
    counted: list[str]  # those without the numbers that do not count
    # by microbatch, the form and the numbers of those that have some; of equal microbatches, only the first
    numbered: dict[int, tuple[str, Numbers]]
    descriptions: Sequence[Description]  # those without the mode of the modules


class CountedNumbers:
    """The numbers that count, for the most recently used forms of inputs. In a new form, all of them count."""

    def __init__(self) -> None:
        self._forms = Recent[str, _Form](MOST_FORMS)

    def forms(self, mode: str, descriptions: Sequence[Description]) -> InputForms:
        """Describe some microbatches in a mode of the modules."""
        distinct = {one: i for i, one in reversed(list(enumerate(descriptions)))}  # mostly one
        exact = {one: f"{mode} {one}" for one in distinct}
        counted = {one: self._text(mode, one) or exact[one] for one in distinct}
        numbered = {i: (f"{mode} {one.form}", one.numbers) for one, i in reversed(distinct.items()) if one.numbers}
        return InputForms([exact[one] for one in descriptions], [counted[one] for one in descriptions], numbered, descriptions)

    def _text(self, mode: str, description: Description) -> str | None:
        """Describe a microbatch with None in place of the numbers that do not count; return None if all of them do."""
        known = self._forms.get(f"{mode} {description.form}")
        counted = description.numbers if known is None else known.counted(description.numbers)
        return None if counted is description.numbers else f"{mode} {description.form} {text_of(counted)}"

    def is_news(self, form: str, numbers: Numbers) -> bool:
        """Return whether a microbatch with these numbers can show something new."""
        known = self._forms.get(form)
        return known is None or known.latest != numbers

    def learn(self, form: str, numbers: Numbers, taken: Taken) -> bool:
        """Learn the memory of a microbatch, and return whether numbers that did not count do so again."""
        return self._forms.use(form, _Form()).learn(numbers, taken)

    def count_again(self, forms: InputForms) -> None:
        """Make all numbers of a step count again, until observation shows that they do not; this now takes more steps."""
        for form, _ in forms.numbered.values():
            if form in self._forms:
                self._forms[form].count_again()


class _Form:
    """The observations of microbatches that are equal except for their numbers."""

    def __init__(self) -> None:
        self.latest: Numbers | None = None
        self._seen = Recent[tuple[int | None, ...], tuple[Numbers, Taken]](REMEMBERED)  # by the numbers that count
        self._free: set[int] = set()  # places of numbers that do not count
        self._shown: dict[int, int] = {}  # by place: how often another value took the same memory
        self._needed = NEEDED

    def counted(self, numbers: Numbers) -> tuple[int | None, ...]:
        if not self._free:
            return numbers
        return tuple(None if place in self._free else number for place, number in enumerate(numbers))

    def learn(self, numbers: Numbers, taken: Taken) -> bool:
        """Compare a microbatch with those before it, and return whether it showed that numbers count after all."""
        self.latest, had_free = numbers, bool(self._free)
        before = self._seen.get(self.counted(numbers))
        if before is not None and before[1] != taken:  # for numbers that do not count, or by itself
            self.count_again()
        if self.counted(numbers) not in self._seen:
            self._compare(numbers, taken)
            self._release()
        self._remember(numbers, taken)
        return had_free and not self._free

    def _compare(self, numbers: Numbers, taken: Taken) -> None:
        """Count values with the same memory as in the most similar microbatch; restart for one that alone made a difference."""
        alike: list[int] = []
        for others, taken_before in self._seen.values():
            places = [i for i, number in enumerate(numbers) if i not in self._free and number != others[i]]
            if taken_before == taken and (not alike or 0 < len(places) < len(alike)):
                alike = places
            elif taken_before != taken and len(places) == 1:
                self._shown[places[0]] = 0
        for place in alike:
            self._shown[place] = self._shown.get(place, 0) + 1

    def _release(self) -> None:
        """Stop counting numbers that were shown often enough to have no effect."""
        released = {place for place, times in self._shown.items() if times >= self._needed}
        if released - self._free:
            self._free |= released
            seen = list(self._seen.values())
            self._seen.clear()
            for numbers, taken in seen:
                self._remember(numbers, taken)

    def _remember(self, numbers: Numbers, taken: Taken) -> None:
        self._seen.pop(self.counted(numbers), None)
        self._seen.use(self.counted(numbers), (numbers, taken))

    def count_again(self) -> None:
        if self._free:
            self._needed = min(2 * self._needed, MOST_NEEDED)
        self._free.clear()
        self._shown.clear()
        self._seen.clear()
