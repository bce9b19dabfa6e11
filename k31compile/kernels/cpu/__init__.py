"""CPU kernels in C++: built once per machine on first use, kept in the user's cache, called through ctypes."""
