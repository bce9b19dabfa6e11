"""Change one thing in a confirmed function: it must be refused, or give the operator's numbers on fresh inputs."""

import ast
import copy
import inspect
import textwrap

import functions
import pytest
import torch

from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call, alone
from k31compile.leaves.confirm import Denied, confirm_call
from k31compile.leaves.reading import CalledReading
from k31compile.leaves.source import examine

SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.MatMult: None, ast.Div: ast.Mult}
DROPPED = ("exp", "cumsum", "masked_fill", "tril", "triu", "clone")


def sites(tree):
    """Every single change: (node, how), for nodes of the function's body."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and SWAPS.get(type(node.op)):
            yield node, "operator"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, "more"
            yield node, "less"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
            yield node, "dropped"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node, "sign"


def mutants(function):
    """(what was changed, the function with that change) for every change."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for i, (node, how) in enumerate(list(sites(tree))):
        changed = copy.deepcopy(tree)
        node, how = list(sites(changed))[i]
        before = ast.unparse(node)
        if how == "operator":
            node.op = SWAPS[type(node.op)]()
        elif how in ("more", "less"):
            node.value += 1 if how == "more" else -1
        elif how == "dropped":
            # x.exp() becomes x.clone(): the value without the deed.
            node.func.attr, node.args, node.keywords = "clone", [], []
        else:
            node.op = ast.UAdd()
        space = dict(vars(functions))
        exec(compile(ast.fix_missing_locations(changed), "mutant.py", "exec"), space)
        yield f"{before} ({how})", space[function.__name__]


def arguments(function, length):
    """The tensors of a call by parameter."""
    if function.__name__ == "kda_chunk":
        q, k, v, g, beta, _ = functions.operands(length, heads_first=True)
        return {"keys": k, "queries": q, "values": v, "decay": g, "lr": beta}
    q, k, v, g, beta, state = functions.operands(length, scalar=function.__name__.startswith("gated"))
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}


def gives_the_operators_numbers(call, form):
    """On samples of other seeds, at lengths that no confirmation ran."""
    reading = CalledReading(form, call)
    with alone():
        try:
            for trial, length in enumerate((37, 90, 4, 1)):
                reading.at(2, -(-max(length, form.shortest) // form.step) * form.step, 5)
                sample = reading.sample(torch.Generator().manual_seed(90 + trial), trial)
                reading.judge(sample, reading.run(sample, {}, trial))
        except Exception:
            return False
    return True


def judged(function, limit=None):
    """How many mutants were refused, and what was changed in those that were taken wrongly."""
    refused, wrong = 0, []
    for what, mutant in list(mutants(function))[:limit]:
        call = Call.of(mutant, (), arguments(function, 23))
        try:
            form = confirm_call(call, examine(mutant))
        except (Unfit, Denied):
            refused += 1
            continue
        if not gives_the_operators_numbers(call, form):
            wrong.append(what)
    return refused, wrong


def test_mutants_of_steps():
    refused, wrong = judged(functions.kda_recurrent)
    assert wrong == []
    assert refused >= 12


@pytest.mark.slow
@pytest.mark.parametrize(("function", "least"), [(functions.kda_chunk, 30), (functions.gated_delta_recurrent, 10)])
def test_mutants_of_other_forms(function, least):
    refused, wrong = judged(function)
    assert wrong == []
    assert refused >= least
