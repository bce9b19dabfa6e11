"""An artefact F.k31: what was compiled ahead of time, loaded and called without Dynamo, Inductor or a compiler."""
