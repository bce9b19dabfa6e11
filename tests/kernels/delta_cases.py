"""Samples for the delta-rule operators, and their definition as a loop over tokens in float64."""

import torch


def draw(batch, tokens, heads, width, depth, strength=5.0, seed=0, dtype=torch.float32):
    """Arguments of the operators in their order; gates uniform in [-strength, 0], keys of length one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    key = torch.nn.functional.normalize(normal(batch, tokens, heads, width), dim=-1)
    gate = -strength * torch.rand(batch, tokens, heads, width, generator=generator, dtype=torch.float64)
    case = {
        "query": normal(batch, tokens, heads, width),
        "key": key,
        "value": normal(batch, tokens, heads, depth),
        "gate": gate,
        "beta": torch.sigmoid(normal(batch, tokens, heads)),
        "initial_state": normal(batch, heads, width, depth),
    }
    return {name: tensor.to(dtype) for name, tensor in case.items()}


def definition(query, key, value, gate, beta, initial_state, scale=1.0):
    """S <- (I - beta k k^T) Diag(exp g) S + beta k v^T, out = scale S^T q; everything in float64."""
    query, key, value, gate, beta, state = (x.double() for x in (query, key, value, gate, beta, initial_state))
    output = torch.empty(value.shape, dtype=torch.float64)
    unit = torch.eye(query.shape[3], dtype=torch.float64)
    for t in range(query.shape[1]):
        column, strength = key[:, t, :, :, None], beta[:, t, :, None, None]
        erase = (unit - strength * column * column.mT) * gate[:, t, :, None, :].exp()
        state = erase @ state + strength * column * value[:, t, :, None, :]
        output[:, t] = scale * torch.einsum("bhkv,bhk->bhv", state, query[:, t])
    return output, state


def relative(actual, expected):
    """Distance by length, relative to the expected; equal emptiness is no distance."""
    assert actual.shape == expected.shape
    distance = (actual.double() - expected.double()).norm().item()
    return distance / expected.double().norm().item() if distance else 0.0


def within(bound, actual, expected):
    """Assert that an output and a state are finite and nearer than `bound` to what they should be."""
    for a, e in zip(actual, expected, strict=True):
        assert torch.isfinite(a).all()
        assert relative(a, e) < bound


def value_first(case):
    """The same call with its state laid out as 'VK'."""
    state = case["initial_state"].transpose(2, 3).contiguous()
    return case | {"initial_state": state, "state_layout": "VK"}
