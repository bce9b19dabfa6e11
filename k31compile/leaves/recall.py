"""The form of a call: remembered from this process or an earlier one, or confirmed now and then remembered."""

from __future__ import annotations

import logging

from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call
from k31compile.leaves.candidates import Candidate
from k31compile.leaves.confirm import Denied, agrees, confirm_call
from k31compile.leaves.form import Form
from k31compile.leaves.known import KNOWN

log = logging.getLogger("k31compile")

_FEW_FORMS = 12

_checked: list[tuple[str, Form]] = []


def form_of(candidate: Candidate, call: Call, stored: bool) -> tuple[Form, bool]:
    """What a call of a candidate computes, and whether that was known before.

    What is remembered is not tried again: the digest of its source tells all that decides what the function does. One
    that is opaque is run once in each process.

    Raises:
        Unfit: nothing that is known; the reason was found now, or when the function was first tried.
    """
    source = candidate.source
    assert source is not None
    known = KNOWN.of(source, stored)
    key = call.key()
    for form in list(known.forms.get(key, ())):
        if form.fits(call):
            if not source.is_opaque or (source.digest, form) in _checked:
                return form, True
            if agrees(form, call):
                _checked.append((source.digest, form))
                return form, True
            log.warning(
                "%s is not what an earlier process remembers, and is confirmed anew", source.functions[0].__name__
            )
            known.forms[key].remove(form)
    # Loops of any purpose are tried: what is none of our rules must not take long to be found so.
    most = _FEW_FORMS if candidate.why == "nested loops" else None
    sizes = (
        f"{'few: ' if most else ''}{key} {[str(tensor.shape[-1]) for tensor in call.tensors.values() if tensor.dim()]}"
    )
    if sizes in known.refused:
        raise Unfit(known.refused[sizes])
    chunked = candidate.operator.endswith("chunk") if candidate.operator else None
    try:
        form = confirm_call(call, source, chunked, most)
    except (Unfit, Denied) as refusal:
        known.refused[sizes] = str(refusal)
        if stored:
            KNOWN.keep(source)
        raise Unfit(str(refusal)) from None
    known.forms.setdefault(key, []).append(form)
    _checked.append((source.digest, form))
    if stored:
        KNOWN.keep(source)
    if not form.fits(call):
        raise Unfit(
            f"it is {form.operator} for lengths from {form.shortest} on in steps of {form.step}, and this is none"
        )
    return form, False
