import torch

import k31compile
from k31compile.model import K31Config, K31ForCausalLM, generate

config = K31Config.tiny()  # five layers, random weights: what it writes means nothing
model = K31ForCausalLM(config, seed=0)
compiled = torch.compile(model, backend="k31", options={"codegen": "ops"}, dynamic=False)

print(generate(compiled, [list(b"def add(a, b):")], max_new_tokens=8, config=config))
for report in k31compile.reports():
    print(report.headline())
