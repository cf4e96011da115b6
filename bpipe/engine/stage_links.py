"""Which stages give values to a stage, and which ones get values from it: the edges of the flow, as a rank runs them.

A rank gets each value once: the first stage there that uses it gives it to those that use it later, and adds up their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from bpipe.flow.flow import FORWARD, Flow, Kind

__all__: list[str] = []

Turn = tuple[int, int]  # a stage, and one of the routes that microbatches take in turn
Way = tuple[int, int]  # the stage that makes values, and the first one on a rank that uses them

Users = dict[Way, dict[str, list[int]]]  # by way, by name of a value: the stages of a rank that use it, in ascending order

OUTPUT = ""  # the name of a stage's output among the values that it makes


class Links:
    """The values that one stage gets and makes, in one turn of the routes.

    Args:
        stage: the stage.
        users: of all values of the turn.
        returning: the ways whose gradients come back.
        part_of: by stage, the part of the model that it runs.

    Attributes:
        before: the way of the output of the stage before, if there is one.
        incoming: by way, the names of the values that the stage uses: first the way from the stage before, then those ways of which
            it is the first user on its rank, then the others.
        later: by way of which the stage is the first user, the later ones on its rank, with the names of what each uses.
        behind: the way of the stage's own output, if another one gets it.
        outgoing: by way, the names of the values that the stage makes: first the way to the stage behind.
        last_users: by way, the last stage on the first one's rank that uses something of it.
        leads_past: whether a value leads from an earlier stage to a later one than this.
    """

    def __init__(self, stage: int, users: Users, returning: set[Way], part_of: Sequence[int]) -> None:
        def used(way: Way, user: int) -> list[str]:
            return [name for name, stages in users[way].items() if user in stages]

        incoming = {way: names for way in users if (names := used(way, stage))}
        outgoing = {way: [*users[way]] for way in users if way[0] == stage}
        self.before, self.behind = (
            next((way for way, names in ways.items() if OUTPUT in names), None) for ways in (incoming, outgoing)
        )
        self.incoming = {way: incoming[way] for way in sorted(incoming, key=lambda way: (way != self.before, way[1] != stage, way))}
        self.outgoing = {way: outgoing[way] for way in sorted(outgoing, key=lambda way: (way != self.behind, way))}
        all_users = {way: sorted({user for stages in of.values() for user in stages}) for way, of in users.items()}
        self.later = {way: {user: used(way, user) for user in all_users[way][1:]} for way in incoming if way[1] == stage}
        self.last_users = {way: of[-1] for way, of in all_users.items()}
        self.returning = returning
        self.leads_past = any(part_of[way[0]] < part_of[stage] < part_of[last] for way, last in self.last_users.items())


class FlowLinks(dict[tuple[int, int], Links]):
    """The links of all stages of a flow, by stage and unit; each is made when it is first asked for."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow
        self._in_turns: dict[Turn, Links] = {}  # by stage and turn: those of many units
        self._users: dict[int, tuple[Users, set[Way]]] = {}  # by turn, with the ways whose gradients come back

    def __missing__(self, key: tuple[int, int]) -> Links:
        stage, turn = key[0], self._flow.turn_of(key[1])
        if (stage, turn) not in self._in_turns:
            if turn not in self._users:
                self._users[turn] = self._users_in(turn)
            self._in_turns[stage, turn] = Links(stage, *self._users[turn], self._flow.parts)
        links = self[key] = self._in_turns[stage, turn]
        return links

    def _users_in(self, turn: int) -> tuple[Users, set[Way]]:
        """Return who uses the values of a turn, and the ways whose gradients come back."""
        flow, found, returning = self._flow, Users(), set[Way]()
        for part in range(len(flow.routes)):
            source = flow.stage_of(part, turn)
            came = {end.name for end in flow.needs(FORWARD, source, turn) if end.name}
            for end in flow.gives(FORWARD, source, turn):
                if end.op == FORWARD and end.name not in came:
                    way = source, end.stage
                    found.setdefault(way, {})[end.name] = [*self._users_of(end.stage, end.name, turn)]
                    if end.kind is Kind.VALUE:
                        returning.add(way)
        return found, returning

    def _users_of(self, first: int, name: str, turn: int) -> Iterator[int]:
        """Yield the stages that give a value to each other, from the first one on."""
        user: int | None = first
        while user is not None:
            yield user
            ends = self._flow.gives(FORWARD, user, turn) if name else ()
            user = next((end.stage for end in ends if end.op == FORWARD and end.name == name), None)


@lru_cache(maxsize=16)
def links_in(flow: Flow) -> FlowLinks:
    """Return the links of a flow; they are looked up for every computation.

    Example:
        >>> from bpipe.flow.shaping import shaped
        >>> links = links_in(shaped(shaped(None, "chain", (0, 1, 2, 1), 1), "skips", ((0, 1, 3), (0, 2))))[1, 0]
        >>> links.incoming, links.later, links.outgoing
        ({(0, 1): ['', '0-1-3']}, {(0, 1): {3: ['0-1-3']}}, {(1, 2): ['']})
    """
    return FlowLinks(flow)
