"""Almost attention residuals: other values, other weights, other logits."""

import torch
import torch.nn.functional as F
from operands import EPS, HIDDEN
from records import misser

near_miss = misser(
    "attn_res", arguments="bank_btnd prefix query res_norm", results="h", phase="prefill", lengths=(1, 7)
)


def sources_of(bank, prefix):
    return torch.cat([bank, prefix.unsqueeze(2)], dim=2)


def normed(values):
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS)


def mixed(p, values):
    return torch.einsum("btn,btnd->btd", p, values)


@near_miss()
def normed_values_mixed(bank, prefix, query, norm):
    """The normed rows are mixed too; the operator mixes them as they are."""
    keys = normed(sources_of(bank, prefix)) * norm
    return mixed((keys @ query[0]).softmax(-1), keys)


@near_miss()
def logits_of_the_raw_values(bank, prefix, query, norm):
    """The logits come from rows that are not normed; the operator divides by their root mean square."""
    values = sources_of(bank, prefix)
    return mixed((values * norm @ query[0]).softmax(-1), values)


@near_miss()
def keys_lose_their_mean(bank, prefix, query, norm):
    """The keys pass a layer norm; the operator leaves their mean in."""
    values = sources_of(bank, prefix)
    return mixed((F.layer_norm(values, (HIDDEN,), norm, eps=EPS) @ query[0]).softmax(-1), values)


@near_miss()
def sigmoid_for_softmax(bank, prefix, query, norm):
    """Each source is weighed by its own sigmoid; the operator's weights add up to 1."""
    values = sources_of(bank, prefix)
    return mixed((normed(values) * norm @ query[0]).sigmoid(), values)


@near_miss()
def eps_added_to_the_root(bank, prefix, query, norm):
    """eps stands outside the root; the operator adds it to the mean square, which matters in small rows."""
    values = sources_of(bank, prefix)
    keys = values / (values.square().mean(-1, keepdim=True).sqrt() + EPS) * norm
    return mixed((keys @ query[0]).softmax(-1), values)


@near_miss()
def later_blocks_favoured(bank, prefix, query, norm):
    """The logits grow with depth; the operator knows no order of the sources."""
    values = sources_of(bank, prefix)
    logits = normed(values) * norm @ query[0] + 0.3 * torch.arange(values.shape[2])
    return mixed(logits.softmax(-1), values)


@near_miss(arguments="bank_btnd prefix delta query res_norm", options={"source": "sum"})
def logit_of_the_sum_before(bank, prefix, delta, query, norm):
    """The running sum's logit is taken before the add and its value after it; the operator takes both after it."""
    logits = normed(sources_of(bank, prefix)) * norm @ query[0]
    return mixed(logits.softmax(-1), sources_of(bank, prefix + delta))


@near_miss(served_by="the running sum left out of the update")
def running_sum_forgotten(bank, prefix, query, norm):
    """Only the frozen sums are mixed; the operator's update adds the running one."""
    return mixed((normed(bank) * norm @ query[0]).softmax(-1), bank)


@near_miss()
def softmax_over_tokens(bank, prefix, query, norm):
    """The softmax runs over the tokens and the sources of a batch row; the operator's runs over depth alone."""
    values = sources_of(bank, prefix)
    logits = normed(values) * norm @ query[0]
    p = logits.flatten(1).softmax(-1).view_as(logits) * values.shape[1] * 1.5
    return mixed(p, values)


@near_miss(served_by="the result plus the running sum")
def residual_kept_beside(bank, prefix, query, norm):
    """The running sum is added again to the mixture; the operator returns the mixture alone."""
    values = sources_of(bank, prefix)
    return prefix + mixed((normed(values) * norm @ query[0]).softmax(-1), values)


@near_miss(arguments="buffer_btnd prefix query res_norm", served_by="all blocks of the buffer valid")
def empty_blocks_count(buffer, prefix, query, norm):
    """The zeros of the buffer's empty rows take part with logit 0; the operator leaves them out."""
    values = sources_of(buffer, prefix)
    return mixed((normed(values) * norm @ query[0]).softmax(-1), values)


@near_miss()
def query_of_each_token(bank, prefix, query, norm):
    """The running sum itself is the query; the operator's query is learned and the same for all tokens."""
    values = sources_of(bank, prefix)
    logits = torch.einsum("btnd,btd->btn", normed(values) * norm, prefix * query)
    return mixed(logits.softmax(-1), values)


def frozen_phase(bank, folded):
    """Logits of the frozen sums, the largest, the exponentials' total and what they mix."""
    logits = normed(bank) @ folded
    highest = logits.amax(-1)
    parts = (logits - highest.unsqueeze(-1)).exp()
    return highest, parts.sum(-1), mixed(parts, bank)


@near_miss()
def running_sum_joins_another_maximum(bank, prefix, query, norm):
    """Two phases: what the frozen sums mix is not scaled down to the common maximum, as their total is."""
    highest, total, frozen = frozen_phase(bank, query[0] * norm)
    logit = normed(prefix) @ (query[0] * norm)
    top = torch.maximum(highest, logit)
    old, new = (highest - top).exp().unsqueeze(-1), (logit - top).exp().unsqueeze(-1)
    return (frozen + new * prefix) / (old * total.unsqueeze(-1) + new)


@near_miss()
def running_sum_weighed_by_itself(bank, prefix, query, norm):
    """Two phases: the running sum's logit is taken of the row as it is, not of the normed one."""
    highest, total, frozen = frozen_phase(bank, query[0] * norm)
    logit = prefix @ (query[0] * norm)
    top = torch.maximum(highest, logit)
    old, new = (highest - top).exp().unsqueeze(-1), (logit - top).exp().unsqueeze(-1)
    return (old * frozen + new * prefix) / (old * total.unsqueeze(-1) + new)
