"""A schedule to be looked at: lanes of tasks in time as a drawing, as a trace file, and as a few numbers.

Everything here is made from a `TaskGraph` and a `Schedule`, so its times are predictions of a cost model.
"""
