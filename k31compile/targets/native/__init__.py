"""A graph as one shared library: built once by AOTInductor, loaded by any later process without a compiler."""
