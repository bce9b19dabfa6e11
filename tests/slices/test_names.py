"""Names of a loop over experts that its function uses again: for something else, or for what the loop left in them."""

import pytest
import torch
from expert_loops import EXPERTS, WIDTH, Layer


class Again(Layer):
    """The names `rows` and `i` are used for something else after the loop."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            rows, share = flat[idx], weights[idx, top, None]
            y.index_add_(0, idx, self.experts[i](rows) * share)
        rows, share = self.shared_experts(flat), 0.5
        for i in range(2):
            rows = rows + i * share
        return (y + rows).view(x.shape)


class OnBothBranches(Layer):
    """A name is assigned again on each branch before it is read."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            rows = flat[idx]
            y.index_add_(0, idx, self.experts[i](rows) * weights[idx, top, None])
        if self.training:
            rows = flat
            y = y + 1
        else:
            rows = self.shared_experts(flat)
        return (y + rows).view(x.shape)


class Left(Layer):
    """What the last expert left in a name is read after the loop."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            rows = flat[idx]
            y.index_add_(0, idx, self.experts[i](rows) * weights[idx, top, None])
        total = rows.sum()
        rows = self.shared_experts(flat)
        return (y + rows + total).view(x.shape)


class LeftOnOneBranch(Layer):
    """A name is assigned again on one branch alone."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            rows = flat[idx]
            y.index_add_(0, idx, self.experts[i](rows) * weights[idx, top, None])
        if self.training:
            rows = self.shared_experts(flat)
        return (y + rows.sum()).view(x.shape)


class LeftByAnEmptyLoop(Layer):
    """A name is the variable of a later loop that may have no turn."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            y.index_add_(0, idx, self.experts[i](flat[idx]) * weights[idx, top, None])
        for i in range(len(self.gate.bias) - EXPERTS):
            y = y + i
        return (y + i).view(x.shape)


class LeftToAFunction(Layer):
    """A function made before the loop reads what the loop leaves."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        i = 40.0
        last = lambda: i  # noqa: E731
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            y.index_add_(0, idx, self.experts[i](flat[idx]) * weights[idx, top, None])
        return (y + last()).view(x.shape)


class Deleted(Layer):
    """A name of the loop is deleted after it."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            y.index_add_(0, idx, self.experts[i](flat[idx]) * weights[idx, top, None])
        del idx
        return y.view(x.shape)


LEFT = [Left, LeftOnOneBranch, LeftByAnEmptyLoop, LeftToAFunction, Deleted]


@pytest.mark.parametrize("kind", [Again, OnBothBranches], ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_a_name_assigned_again_does_not_matter(kind, tokens, compiled, fused):
    layer = kind().eval()
    model = compiled(layer, fullgraph=True)
    for length in (5, 9):
        torch.testing.assert_close(model(tokens(2, length)), layer(tokens(2, length)), atol=2e-6, rtol=1e-5)
        assert fused()["grouped_experts"] == 1


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_what_a_loop_leaves_in_a_name_is_kept(kind, tokens, compiled):
    layer = kind().eval()
    model = compiled(layer)
    for length in (5, 9):
        torch.testing.assert_close(model(tokens(2, length)), layer(tokens(2, length)), atol=2e-6, rtol=1e-5)
