"""The training run: it repeats itself, goes on after a kill as if nothing had been, and refuses what does not fit."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from pico_training import card
from pico_training.corpus import Corpus, is_held_out, read_corpus, training_rows
from pico_training.recipe import CONFIG, Recipe, for_training, split_parameters
from pico_training.run_state import RunState, StateError
from pico_training.trainer import Trainer

SMALL = CONFIG.replace(num_hidden_layers=3, full_attention_layers=(2,), num_experts=4, page_size=16, index_topk=8)
BRIEF = Recipe(steps=6, indexer_steps=2, rows=2, context=48, warm_up=3)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus()


@pytest.fixture(autouse=True)
def _gradients() -> object:
    with torch.enable_grad():
        yield


def run(path: Path, corpus: Corpus, stop: int | None = None, recipe: Recipe = BRIEF) -> RunState:
    """Take up what is there, and train to `stop` or to the end."""
    state = RunState(path, Trainer(recipe, SMALL, corpus))
    state.take_up()
    while state.trainer.step < (stop or state.trainer.total_steps):
        state.record(state.trainer.advance())
    state.save()
    return state


def weights(state: RunState) -> dict[str, torch.Tensor]:
    return state.trainer.model.state_dict()


@pytest.mark.slow
def test_a_run_that_was_stopped_twice_ends_as_one_that_was_not(tmp_path: Path, corpus: Corpus) -> None:
    whole = run(tmp_path / "whole.pt", corpus)
    for stop in (2, 7, None):
        parts = run(tmp_path / "parts.pt", corpus, stop)
    assert parts.losses == whole.losses
    assert len(whole.losses) == 8
    assert all(torch.equal(weights(parts)[name], tensor) for name, tensor in weights(whole).items())


def test_the_last_steps_move_the_indexers_only(tmp_path: Path, corpus: Corpus) -> None:
    state = run(tmp_path / "state.pt", corpus, stop=6)
    before = {name: tensor.clone() for name, tensor in weights(state).items()}
    run_on = run(tmp_path / "state.pt", corpus)
    moved = {name for name, tensor in weights(run_on).items() if not torch.equal(before[name], tensor)}
    assert moved == {name for name in before if ".indexer." in name}


@pytest.mark.slow
def test_the_first_twenty_steps_of_the_shipped_run_come_again(pico_folder: Path, corpus: Corpus) -> None:
    training = json.loads((pico_folder / card.TRAINING).read_text())
    if training["text"] != corpus.digest:
        pytest.skip(f"this Python's library is another text than that of Python {training['python']}")
    trainer = Trainer(Recipe(**training["recipe"]), CONFIG, corpus)
    losses = [trainer.advance()["bits_per_byte"] for _ in range(20)]
    # The same mathematics in another order of sums, where the machine is another one.
    assert losses == pytest.approx(training["losses"]["bits_per_byte"][:20], abs=0.02)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is no state of a run"), (b"PK\x03\x04 nonsense", "is no state of a run")],
)
def test_a_damaged_state_is_named(tmp_path: Path, corpus: Corpus, content: bytes, says: str) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    with pytest.raises(StateError, match=says) as error:
        run(path, corpus)
    assert str(path) in str(error.value)
    assert "--fresh begins anew" in str(error.value)


def test_a_truncated_state_is_named(tmp_path: Path, corpus: Corpus) -> None:
    run(tmp_path / "state.pt", corpus, stop=1)
    content = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(StateError, match="is no state of a run"):
        run(tmp_path / "state.pt", corpus)


def test_a_state_of_another_run_names_the_difference(tmp_path: Path, corpus: Corpus) -> None:
    run(tmp_path / "state.pt", corpus, stop=1)
    with pytest.raises(StateError, match="of a run with another muon_rate, seed: --fresh"):
        run(tmp_path / "state.pt", corpus, recipe=dataclasses.replace(BRIEF, seed=1, muon_rate=0.01))


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_state(tmp_path: Path, corpus: Corpus) -> None:
    state = run(tmp_path / "state.pt", corpus, stop=1)
    before = (tmp_path / "state.pt").read_bytes()
    with torch.no_grad():
        state.trainer.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(StateError, match=r"step 2: bits_per_byte.* is not finite"):
        state.record(state.trainer.advance())
    assert (tmp_path / "state.pt").read_bytes() == before


def test_every_parameter_learns_by_one_optimiser() -> None:
    model = Trainer(BRIEF, CONFIG, tiny_corpus()).model
    groups = split_parameters(model)
    owners = list(itertools.chain.from_iterable(groups.values()))
    assert len({id(parameter) for parameter in owners}) == len(owners)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left = set(names.values()) - {names[id(parameter)] for parameter in owners}
    assert {name.rpartition(".")[2] for name in left} == {"e_score_correction_bias"}
    muon = {names[id(parameter)] for parameter in groups["muon"]}
    assert {"model.layers.0.self_attn.f_b_proj.weight", "model.layers.2.self_attn.q_b_proj.weight"} <= muon
    assert not {name for name in muon if "embed" in name or (name.endswith(("b_proj.weight",)) and ".b_proj" in name)}
    assert all(parameter.dim() in (2, 3) for parameter in groups["muon"])


def test_the_shipped_model_is_the_trained_one_in_other_forms(corpus: Corpus) -> None:
    trainer = Trainer(BRIEF, SMALL, corpus)
    served = trainer.for_serving()
    assert served.config == SMALL
    assert trainer.model.config == for_training(SMALL)
    for name, tensor in served.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name].to(tensor.dtype))


def tiny_corpus() -> Corpus:
    stream = torch.arange(600).remainder(256).to(torch.uint8)
    return Corpus(stream, stream, (b"x",), 1)


def test_batches_depend_on_seed_and_step_alone() -> None:
    corpus = tiny_corpus()
    first = training_rows(corpus, 0, 5, rows=3, length=40)
    assert first.shape == (3, 41)
    assert torch.equal(first, training_rows(corpus, 0, 5, rows=3, length=40))
    assert not torch.equal(first, training_rows(corpus, 0, 6, rows=3, length=40))
    assert not torch.equal(first, training_rows(corpus, 1, 5, rows=3, length=40))


def test_whole_files_are_held_out_and_programs_alone_are_read(tmp_path: Path) -> None:
    names = [f"package{i}/module{j}.py" for i in range(5) for j in range(20)]
    for name in [*names, "test/skipped.py", "site-packages/foreign.py", "package0/data.txt", "package0/empty.py"]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if path.stem == "empty" else f"[{name}]")
    corpus = read_corpus(tmp_path)
    held = [f"[{name}]".encode() for name in sorted(names) if is_held_out(name)]
    assert 0 < len(held) < 20
    assert sorted(corpus.held_out_files) == sorted(held)
    train = bytes(corpus.train.tolist()).split(b"\0")
    assert sorted([*train[:-1], *held]) == sorted(f"[{name}]".encode() for name in names)
    assert train[-1] == b""
    assert corpus.num_train_files == len(names) - len(held)


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds too few \.py files"):
        read_corpus(tmp_path)
