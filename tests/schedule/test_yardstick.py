"""K3.1's attention layer at its real sizes beside what people place by hand: ours has its overlaps and its joins.

The yardstick (public recipes for DeepSeek-V3.2 and Kimi K3): the query branch of the indexer on a stream beside the key
branch, its weights' product after the query's, the latent cache written beside the query chain, and waits in front of
the indexer. One thing nobody places: the output gate depends on the layer's input alone and is computed early.
"""

import itertools

import pytest
import torch

from k31compile.backend import captured_graph
from k31compile.graph.views import behind_views_and_casts
from k31compile.model import Caches, K31Config, K31ForCausalLM
from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.targets.reinplace import reinplace_cache_writes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def layer():
    """One attention layer of K3.1 on the meta device, and which task reads which weight."""
    config = K31Config.full().replace(num_hidden_layers=1, full_attention_layers=(1,), vocab_size=1024)
    with torch.device("meta"):
        model = K31ForCausalLM(config).to_serving_dtype(torch.bfloat16).eval()
        caches = Caches.allocate(config, 1, 4096, dtype=torch.bfloat16)
        arguments = (torch.tensor([[7]]), caches, torch.tensor([4000]))
    with torch.no_grad():
        module, tensors = captured_graph(model, arguments, {}, "cpu")
    reinplace_cache_writes(module)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {}
    for node, tensor in zip(module.graph.find_nodes(op="placeholder"), tensors, strict=True):
        weights[node] = names.get(id(tensor), "").removeprefix("model.layers.0.self_attn.").removesuffix(".weight")
    products = {
        weights[source]: node.name
        for node in module.graph.nodes
        if node.target is torch.ops.aten.linear.default
        for source in [behind_views_and_casts(node.args[1])]
    }
    return module, products


@pytest.fixture(params=["ascend-a3", "ascend-950", "cuda"])
def scheduled(layer, request):
    module, products = layer
    costs = load_costs(request.param)
    graph = TaskGraph(tasks_of(module, costs))
    schedule = schedule_tasks(graph, costs.event.value)
    verify_schedule(graph, schedule)
    return graph, schedule, products


def ancestors(graph, name):
    found, left = set(), [graph.places[name]]
    while left:
        for other in graph.before[left.pop()]:
            if other not in found:
                found.add(other)
                left.append(other)
    return {graph.tasks[place].name for place in found}


def descendants(graph, name):
    return {task.name for task in graph.tasks if name in ancestors(graph, task.name)}


def overlap(schedule, some, others):
    """Seconds in which a task of one side runs on another stream than one of the other side."""
    spans = [(schedule.times[one], schedule.times[other]) for one in some for other in others
             if schedule.stream_of[one] != schedule.stream_of[other]]  # fmt: skip
    return sum(max(0.0, min(end, until) - max(start, since)) for (start, end), (since, until) in spans)


def branch(graph, product, indexer):
    """The product and what lies between it and the indexer."""
    return {product} | (descendants(graph, product) & ancestors(graph, indexer))


def the(graph, part):
    (found,) = [task.name for task in graph.tasks if task.name.startswith(part)]
    return found


def test_the_branches_of_the_indexer_run_beside_each_other(scheduled):
    """The query branch begins behind the product that makes its latent: the norm of that belongs to it."""
    graph, schedule, products = scheduled
    indexer = the(graph, "lightning_indexer")
    keys = branch(graph, products["indexer.wk"], indexer)
    latent = branch(graph, products["q_a_proj"], products["q_b_proj"]) - {products["q_a_proj"]}
    queries = {*latent, products["q_b_proj"], *branch(graph, products["indexer.wq_b"], indexer)}
    vectors = keys - {products["indexer.wk"]}
    assert overlap(schedule, vectors, queries) >= 0.3 * sum(graph.tasks[graph.places[name]].seconds for name in vectors)


def test_products_do_not_fight_for_the_cube(scheduled):
    _, schedule, products = scheduled
    spans = sorted(schedule.times[products[name]] for name in ("indexer.wq_b", "indexer.weights_proj", "indexer.wk"))
    assert all(one[1] <= other[0] + 1e-12 for one, other in itertools.pairwise(spans))


def test_the_latent_is_written_beside_the_query_chain(scheduled):
    graph, schedule, products = scheduled
    latent = descendants(graph, products["kv_a_proj"]) & {task.name for task in graph.tasks if task.writes}
    latent = {name for name in latent if products["indexer.wk"] not in ancestors(graph, name)}
    chain = {products["q_b_proj"], products["indexer.wq_b"], products["indexer.weights_proj"]}
    assert latent
    assert overlap(schedule, latent, chain) > 0


def test_the_output_gate_is_computed_before_attention(scheduled):
    graph, schedule, products = scheduled
    attention = the(graph, "sparse_flash_attention")
    assert schedule.times[products["g_proj"]][1] <= schedule.times[attention][0]
    assert products["g_proj"] not in ancestors(graph, attention)


def test_every_branch_is_joined_before_the_indexer(scheduled):
    """The verifier has seen that events order it; here, that there is something to join and that it has ended."""
    graph, schedule, _ = scheduled
    indexer = the(graph, "lightning_indexer")
    awaited = ancestors(graph, indexer)
    assert {schedule.stream_of[name] for name in awaited} - {schedule.stream_of[indexer]}
    assert max(schedule.times[name][1] for name in awaited) <= schedule.times[indexer][0] + 1e-12


def test_it_is_near_the_bound(scheduled):
    graph, schedule, _ = scheduled
    assert schedule.predicted <= 1.10 * graph.bound
    assert schedule.predicted < schedule.serial
