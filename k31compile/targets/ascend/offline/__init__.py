"""torchair's own conversion on a machine without CANN and without an NPU: structure is checked, nothing is run."""
