"""The comparison that the structural tests rest on tells graphs apart."""

import pytest
import torch
from captured import sketch
from isomorphic import difference

X, Y = torch.randn(3, 4), torch.randn(3, 4)


def base(x, y):
    x.add_(1)
    return (x.sin() + y).sum(-1), y * torch.tensor([1.0, 2.0, 3.0, 4.0])


def write(x, y, result):
    x.add_(1)
    return result(x, y), y * torch.tensor([1.0, 2.0, 3.0, 4.0])


OTHERS = {
    "an operator": lambda x, y: write(x, y, lambda x, y: (x.cos() + y).sum(-1)),
    "an argument": lambda x, y: write(x, y, lambda x, y: (x.sin() + y).sum(0)),
    "the operands": lambda x, y: write(x, y, lambda x, y: (y.sin() + x).sum(-1)),
    "a keyword": lambda x, y: write(x, y, lambda x, y: (x.sin() + y).sum(-1, keepdim=True)),
    "a constant": lambda x, y: (base(x, y)[0], y * torch.tensor([1.0, 2.0, 3.0, 5.0])),
    "no write": lambda x, y: base(x.clone(), y),
    "an output more": lambda x, y: (*base(x, y), y.sin()),
    "the order of outputs": lambda x, y: base(x, y)[::-1],
}


def test_equal_programs_are_equal():
    def renamed(first, second):
        scaled = second * torch.tensor([1.0, 2.0, 3.0, 4.0])
        first.add_(1)
        return torch.sum(torch.add(torch.sin(first), second), dim=-1), scaled

    assert difference(sketch(base, X, Y).module, sketch(renamed, X, Y).module) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_are_told(name):
    assert difference(sketch(base, X, Y).module, sketch(OTHERS[name], X, Y).module) != ""


def test_one_value_used_twice_is_not_two_values():
    once = sketch(lambda x: (y := x.sin()) + y, X).module
    assert difference(once, sketch(lambda x: x.sin() + x.sin(), X).module) != ""
