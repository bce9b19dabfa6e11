"""The parts of examples/train_pico.py: data, optimiser, objectives, measurements, model card."""
