"""The files beside the weights: training.json, measurements.json, the loss curve, and the model card made of them."""

import dataclasses
import json
import platform
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from k31compile.model import K31ForCausalLM, count_parameters, load_config
from pico_training.corpus import SKIPPED_FOLDERS, Corpus, compressed_bits_per_byte
from pico_training.run_state import RunState

TRAINING, MEASUREMENTS, CURVE, CARD = "training.json", "measurements.json", "loss.svg", "README.md"


def write_training(out: Path, state: RunState, corpus: Corpus) -> None:
    """Keep what only the run itself knows: recipe, text, time, and its losses step by step."""
    names = sorted({name for losses in state.losses for name in losses})
    content = {
        "recipe": dataclasses.asdict(state.trainer.recipe),
        "text": corpus.digest,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "seconds": round(state.seconds, 1),
        "held_out": [[step, round(bits, 4)] for step, bits in state.held_out],
        "losses": {name: [_rounded(losses.get(name)) for losses in state.losses] for name in names},
    }
    (out / TRAINING).write_text(json.dumps(content) + "\n")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def write(out: Path, measured: dict[str, Any], corpus: Corpus) -> None:
    """Write measurements, curve and card of the checkpoint in `out`."""
    text = {
        "digest": corpus.digest,
        "train_files": corpus.num_train_files,
        "train_bytes": len(corpus.train),
        "held_out_files": len(corpus.held_out_files),
        "held_out_bytes": len(corpus.held_out),
    }
    measured = {**measured, "text": text, "compressors": compressed_bits_per_byte(corpus.held_out_files)}
    (out / MEASUREMENTS).write_text(json.dumps(measured, indent=1) + "\n")
    training = json.loads((out / TRAINING).read_text())
    draw_curve(out / CURVE, training, measured["compressors"])
    (out / CARD).write_text(card_text(out, training, measured))


def draw_curve(path: Path, training: dict[str, Any], compressors: dict[str, float]) -> None:
    """Bits per byte against steps: the training text smoothed, the held-out text, and what compressors need."""
    matplotlib.rcParams.update({"svg.hashsalt": "pico", "svg.fonttype": "none", "font.family": "sans-serif"})
    recipe, bits = training["recipe"], training["losses"]["bits_per_byte"]
    smooth = torch.tensor(bits).unfold(0, min(25, len(bits)), 5).mean(-1).tolist()
    figure = Figure(figsize=(8, 4.2))
    axes = figure.subplots()
    axes.plot([5 * i + 12 for i in range(len(smooth))], smooth, color="#9ab", label="training text, mean of 25 steps")
    axes.plot(*zip(*training["held_out"], strict=True), "o-", color="#b03a2e", ms=3, label="held-out files")
    for style, (name, value) in zip(("--", ":"), compressors.items(), strict=True):
        axes.axhline(value, color="#555", ls=style, lw=0.8, label=f"{name}, each held-out file on its own")
    for share, what in (
        (recipe["lookup_until"], "lookup no longer taught"),
        (recipe["sparse_from"], "sparse from here"),
    ):
        axes.axvline(share * recipe["steps"], color="#ccc", lw=0.8)
        axes.text(share * recipe["steps"] + 10, 4.1, what, fontsize=7, color="#555")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(1.3, 4.3), xlim=(0, len(bits)))
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def card_text(out: Path, training: dict[str, Any], measured: dict[str, Any]) -> str:
    """The model card, in Markdown, from nothing but the files in `out`."""
    config, recipe, bits = load_config(out), training["recipe"], measured["bits_per_byte"]
    with torch.device("meta"):
        parameters = count_parameters(K31ForCausalLM(config))
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    tokens = recipe["steps"] * recipe["rows"] * recipe["context"]
    text = measured["text"]
    mla = ", ".join(str(layer) for layer in config.full_attention_layers)
    compressors = measured["compressors"]
    text_of_card = f"""# pico

A K3.1 language model of {parameters / 1e6:.2f} M parameters over bytes, trained on the source text of the Python
standard library. It exists so that this project's demo, checks and tests run on weights that have learned something;
it writes text that looks like Python and knows nothing.

`model-*.safetensors` ({size / 1e6:.1f} MB: matrices in bfloat16; conv taps, gate constants, norms and router in
float32), `config.json`, `loss.svg`, `training.json` (recipe and losses of every step), `measurements.json`.

## Model

{config.num_hidden_layers} layers: gated MLA with sparse attention in layers {mla}, KDA in the others; attention
residuals over {-(-config.num_hidden_layers // config.attn_res_block_size)} blocks; {config.num_experts} latent experts,
{config.num_experts_per_token} for each token; {config.index_topk} of up to {recipe["context"]} keys selected. Byte
vocabulary, byte 0 between files.

## Training

    python examples/train_pico.py --seed {recipe["seed"]} --steps {recipe["steps"]}

{recipe["steps"]} steps of {recipe["rows"]} x {recipe["context"]} bytes ({tokens / 1e6:.2f} M), then
{recipe["indexer_steps"]} steps for the indexers alone, in {training["seconds"] / 60:.0f} minutes on
{training["threads"]} threads ({training["isa"]}), Python {training["python"]}, torch {training["torch"]}.
Text: {text["train_files"]} files, {text["train_bytes"] / 1e6:.2f} MB; held out by a hash of the file's name:
{text["held_out_files"]} files, {text["held_out_bytes"] / 1e6:.2f} MB. Not read: {", ".join(sorted(SKIPPED_FOLDERS))}.

![bits per byte against steps](loss.svg)

The curve's held-out points are 32 windows, whose text is harder than the average.

Dense attention until step {recipe["sparse_from"] * recipe["steps"]:.0f}, sparse from there on. The indexers learn from
the first step to foresee the attention (KL to its mean over the heads), and cannot touch the rest. Until step
{recipe["lookup_until"] * recipe["steps"]:.0f} a further loss, falling to 0, teaches {recipe["lookup_heads"]}
heads of each MLA layer to attend to what followed an earlier occurrence of the last 3 to 6 bytes: left to itself,
attention does not learn that in so few bytes, and then it hardly matters which keys it reads
([why](../../docs/adr/0005-attention-is-taught-to-look-up.md)). The time was taken while the machine compiled and tested
other things; by itself a step takes about 0.9 s.

## Measured

On {measured["windows"]} windows of {recipe["context"]} bytes spread over the held-out files, each read from an empty
cache, with the weights as shipped (in float32):

| attention reads | bits per byte |
|---|---|
{_rows((_SELECTION[name].format(k=config.index_topk), f"{value:.4f}") for name, value in bits.items())}
| *zlib -9, each file on its own* | *{compressors["zlib"]:.3f}* |
| *xz, each file on its own* | *{compressors["xz"]:.3f}* |

A random selection costs **{bits["random"] - bits["indexer"]:.3f} bits per byte**, so a broken selection shows. The
compressors see whole files, the model 512 bytes at most.

Share of the attention's mass, averaged over heads, that {config.index_topk} keys hold (for tokens that see more):

| layer | indexer | the best keys | random | last {config.index_topk} |
|---|---|---|---|---|
{_rows(_recall_row(recall) for recall in measured["recall"])}

Weight of each head on places that continue an earlier occurrence of the last bytes: {_lookup(measured["lookup"])}.

Load of the experts (1 is even):

| MoE layer | least | most |
|---|---|---|
{_rows((str(i), f"{min(load):.2f}", f"{max(load):.2f}") for i, load in enumerate(measured["expert_load"], 2))}

One run, one seed: differences below 0.02 bits mean nothing.
"""
    return "\n\n".join(_filled(paragraph) for paragraph in text_of_card.split("\n\n")) + "\n"


def _filled(paragraph: str) -> str:
    """A paragraph of prose in lines of even length; tables, headings, pictures and code as they are."""
    if paragraph.startswith(("|", "#", "!", "    ")):
        return paragraph
    return textwrap.fill(paragraph.strip(), 116, break_long_words=False, break_on_hyphens=False)


_SELECTION = {
    "indexer": "{k} keys that the indexer selects",
    "dense": "all keys",
    "random": "{k} random keys",
    "last window": "the last {k} keys",
}
NUM_MEASUREMENTS = len(_SELECTION) + 3


def _rows(rows: Any) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _recall_row(recall: dict[str, float]) -> tuple[str, ...]:
    kept = (recall[name] for name in ("indexer", "oracle", "random", "window"))
    return str(recall["layer"]), *(f"{share:.3f}" for share in kept)


def _lookup(lookup: dict[str, list[float]]) -> str:
    return "; ".join(f"layer {n}: {', '.join(f'{share:.2f}' for share in heads)}" for n, heads in lookup.items())
