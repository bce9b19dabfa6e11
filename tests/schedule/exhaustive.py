"""The shortest schedule of a small graph, by trying all: written apart from the scheduler, to judge it by."""

from k31compile.passes.schedule.tasks import IN_ONE_ORDER, ONE_AT_A_TIME


def optimum(graph, event, streams, upper):
    """The least makespan, given one that is known to be reached; every order and every placement is looked at.

    A branch is left only when what is still to come cannot be done before the best end so far.
    """
    tasks, before = graph.tasks, graph.before
    tail = [0.0] * len(tasks)
    for place in reversed(range(len(tasks))):
        followers = [other for other in range(len(tasks)) if place in before[other]]
        tail[place] = tasks[place].seconds + max((tail[other] for other in followers), default=0.0)
    best = upper

    def go_on(done, free, held):
        nonlocal best
        if len(done) == len(tasks):
            best = min(best, max((end for end, _ in done.values()), default=0.0))
            return
        for place, task in enumerate(tasks):
            if place in done or any(other not in done for other in before[place]):
                continue
            waits = [done[other] for other in before[place]]
            for stream in range(min(len(free) + 1, streams)):
                idle = free[stream] if stream < len(free) else 0.0
                asked = start = max([idle, *(end + event * (there != stream) for end, there in waits)])
                if task.engine in held:
                    end, there, asked_before = held[task.engine]
                    start = max(asked, end)
                    if asked <= asked_before or task.engine in IN_ONE_ORDER:
                        asked = start = max(asked, end + event * (there != stream))
                if start + tail[place] >= best - 1e-15:
                    continue
                end = start + task.seconds
                now = (*free[:stream], end, *free[stream + 1 :])
                took = {**held, task.engine: (end, stream, asked)} if task.engine in ONE_AT_A_TIME else held
                go_on({**done, place: (end, stream)}, now, took)

    go_on({}, (), {})
    return best
