"""What all generators of programs share: the strategies over their axes, and the entry of a drawn function."""

from hypothesis import strategies as st
from records import NearMiss, Spelling


def strategies(compose, axes, lies):
    """What `compose` makes of any choice on every axis: without a lie, and with one."""
    choices = st.fixed_dictionaries({axis: st.sampled_from(options) for axis, options in axes.items()})
    return choices.map(compose), st.builds(compose, choices, st.sampled_from(tuple(lies)))


def settled(choice, instead):
    """The choices, with another option where `instead` names one for what was drawn on its axis."""
    return {axis: instead.get(axis, {}).get(option, option) for axis, option in choice.items()}


def describe(choice, lie):
    """The choices in one line, the lie last."""
    said = ", ".join(f"{key}: {value}" for key, value in choice.items())
    return f"{said}; the lie: {lie}." if lie else f"{said}."


def record(drawn, operator, choice, facts, lie, lies):
    """The entry of a drawn function, as a file of the corpus would have registered it.

    `facts` are those of a `Program` that the choices decide; `lies` tells of each lie from which other operands the
    operator could serve it all the same, and what it gets right anyway.
    """
    drawn.__doc__ = describe(choice, lie)
    facts = {"phase": "prefill", "lengths": (choice["length"],)} | facts
    if lie is None:
        return Spelling(drawn, operator, **{"counts": {operator: 1}} | facts)
    facts.pop("counts", None)
    served_by, right = lies[lie]
    right = tuple(name for name in facts["results"] if any(_is_laid_out(name, plain) for plain in right))
    return NearMiss(drawn, operator, served_by=served_by, right=right, **facts)


def _is_laid_out(name, plain):
    """Whether the result is the one called `plain`, in whatever layout."""
    return name == plain or name.startswith(f"{plain}_")
