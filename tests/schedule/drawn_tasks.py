"""Task graphs drawn at random, and the work that their tasks do on memory when a schedule is played."""

from hypothesis import strategies as st

from k31compile.passes.schedule.tasks import ENGINES, Task, TaskGraph

CACHES = {"cache": 1, "state": 2}


def drawn_graph(draw, most=30, least=1):
    """Tasks as a random.Random draws them: few inputs, some caches read and written, a buffer used again."""
    tasks = []
    density = draw.choice([0.05, 0.2, 0.5])
    for place in range(draw.randint(least, most)):
        inputs = [task.name for task in tasks if draw.random() < density][-4:]
        reads = [name for name in CACHES if draw.random() < 0.1]
        writes = [name for name in (*CACHES, "buffer", *inputs) if draw.random() < 0.07]
        seconds = draw.choice([0.0, draw.randint(1, 10), draw.uniform(0.5, 10.0)])
        tasks.append(
            Task(f"t{place}", seconds * 1e-6, draw.choice(ENGINES), tuple(reads), tuple(writes), tuple(inputs))
        )
    return TaskGraph(tasks)


graphs = st.randoms(use_true_random=False).map(drawn_graph)


def mix(task, memory):
    """Work whose result depends on everything that the task may read, poison too."""
    seen = tuple(memory.get(name) for name in task.read)
    for name in task.written:
        memory[name] = hash((task.name, name, seen))
