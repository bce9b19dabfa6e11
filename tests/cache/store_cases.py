"""A small entry for tests of the store, also for the processes that they start."""

KEY = "3f2a" * 16
OTHER = "77aa" * 16
FILES = {"graph.txt": b"graph():\n    return x + 1\n", "library.so": b"\x7fELF" + bytes(range(256)) * 40}
INGREDIENTS = {"graph": "ab" * 32, "inputs": "t0 [1,64] float32\nt1 [4] int64", "torch": "2.13.0"}
PROGRAM = {"calls": ["library.so"], "outputs": [0]}


def put(store, key=KEY, ingredients=INGREDIENTS, files=FILES):
    """Publish an entry with these few parts and return what the store returned."""
    return store.publish(key, "native", ingredients, PROGRAM, {"fused": {"short_conv": 2}}, files)


def left_over(store) -> list[str]:
    """What a store holds beside entries and its note of sizes."""
    folders = [store.places.making, store.places.broken]
    return sorted(path.name for folder in folders if folder.exists() for path in folder.iterdir())
