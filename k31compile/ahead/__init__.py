"""What makes F.k31: each entry captured as one graph, its call written down as plain data, its library built."""

from k31compile.ahead.make import Progress, make_artefact

__all__ = ["Progress", "make_artefact"]
