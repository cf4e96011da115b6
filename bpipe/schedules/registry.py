"""The schedules by name: bpipe's own, those that a program registers, and those of installed packages."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points

from bpipe.errors import ConfigurationError
from bpipe.logs import LOG
from bpipe.plan.text import wrong_with_name
from bpipe.schedules import bidirectional, breadth_first, dualpipe_v, gpipe, interleaved, one_f_one_b, v_shape, zbv, zero_bubble
from bpipe.schedules.rule import Rule

__all__ = ["names", "register", "rules", "unregister"]

GROUP = "bpipe.schedules"  # the entry points of packages that provide a rule

OWN_RULES = (
    gpipe.RULE,
    one_f_one_b.RULE,
    one_f_one_b.BALANCED,
    interleaved.RULE,
    zero_bubble.INTERLEAVED,
    breadth_first.RULE,
    zero_bubble.H1,
    zero_bubble.H2,
    zbv.RULE,
    v_shape.V_HALF,
    v_shape.V_MIN,
    dualpipe_v.RULE,
    one_f_one_b.SEQ_1F1B,
    gpipe.TERA_PIPE,
    one_f_one_b.LOCAL_LEARNING,
    bidirectional.CHIMERA,
    bidirectional.BITPIPE,
    bidirectional.BITPIPE_REORDERED,
    bidirectional.BITPIPE_ZB,
)

_RULES = {rule.name: rule for rule in OWN_RULES}  # the one module-level state of the package: `register` adds to it


def register(rule: Rule) -> Rule:
    """Add a schedule of your own to those that `build`, `Schedule`, the command line and `advise` know by name.

    Every process of a pipeline has to register it. An installed package can provide a rule without being imported, by an
    entry point of the group `bpipe.schedules`, such as `eager_1f1b = "my_package.schedules:RULE"`; its name is the rule's.

    Args:
        rule: the schedule; its order is verified when a plan of it is built.

    Returns:
        The rule.

    Raises:
        ConfigurationError: this is not a rule, or another one has its name.

    Example:
        >>> from bpipe.schedules import Rule, build, names, rules
        >>> one = next(rule for rule in rules() if rule.name == "1f1b")
        >>> mine = register(Rule(name="mine", order=one.order))
        >>> build("mine", num_stages=2, num_microbatches=4).peak_slots
        (2, 1)
        >>> unregister("mine") is mine, "mine" in names()
        (True, False)
    """
    if not isinstance(rule, Rule):
        raise ConfigurationError(f"register() takes a bpipe.schedules.Rule, got {type(rule).__qualname__}: {rule!r:.80}")
    if wrong := wrong_with_name(rule.name):
        raise ConfigurationError(wrong)
    if _RULES.get(rule.name, rule) is not rule:
        raise ConfigurationError(
            f"a schedule called {rule.name!r} is registered already ({_RULES[rule.name].title or 'without a title'}): choose "
            f"another name, or call unregister({rule.name!r}) first"
        )
    _RULES[rule.name] = rule
    return rule


def unregister(name: str) -> Rule:
    """Remove a schedule that `register` added, and return it.

    Raises:
        ConfigurationError: there is no such schedule, or it is one of bpipe's own.

    Example:
        >>> from bpipe.schedules import Rule, build, names, register, rules
        >>> one = next(rule for rule in rules() if rule.name == "1f1b")
        >>> mine = register(Rule(name="mine", order=one.order))
        >>> build("mine", num_stages=2, num_microbatches=4).peak_slots
        (2, 1)
        >>> unregister("mine") is mine, "mine" in names()
        (True, False)
    """
    rule = rule_named(name)
    if rule in OWN_RULES:
        raise ConfigurationError(f"{name!r} is one of bpipe's own schedules: only schedules added with register() can be removed")
    return _RULES.pop(name)


def rules() -> tuple[Rule, ...]:
    """Return the schedules that `build` knows, each with its placement, its memory and its bubble.

    Example:
        >>> [(rule.name, rule.runs_as) for rule in rules()][:2]
        [('gpipe', 'GPipe'), ('1f1b', 'OneFOneB')]
    """
    _register_installed()
    return tuple(_RULES.values())


def added_rules() -> tuple[Rule, ...]:
    """Return the schedules that are not bpipe's own."""
    return tuple(rule for rule in rules() if rule not in OWN_RULES)


def names() -> tuple[str, ...]:
    """Return the names of the schedules that `build` knows.

    Example:
        >>> names()[:3]
        ('gpipe', '1f1b', 'balanced_1f1b')
    """
    return tuple(rule.name for rule in rules())


def rule_named(name: str) -> Rule:
    """Return the rule of the schedule called `name`."""
    if name not in _RULES:
        _register_installed()
    if name in _RULES:
        return _RULES[name]
    near = get_close_matches(str(name), names(), n=1)
    raise ConfigurationError(
        f"no schedule is called {name!r}{f', did you mean {near[0]!r}?' if near else ''}; choose one of {', '.join(names())}"
    )


@cache
def _register_installed() -> None:
    """Register the rules of installed packages; warn of a rule that cannot be loaded, and continue with the others."""
    for entry in entry_points(group=GROUP):
        try:
            register(entry.load())
        except Exception as error:  # importing a package may raise any exception
            package = "an installed package" if entry.dist is None else entry.dist.name
            LOG.warning("the schedule %r of %s was left out: %s: %s", entry.name, package, type(error).__name__, error)
