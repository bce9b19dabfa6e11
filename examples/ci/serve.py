"""What runs in production: every size up to the maximum, each served by a graph that was warmed before."""

import torch

from k31compile.buckets import Bucketed
from model import MOST_REQUESTS, arguments, decode

torch.set_num_threads(1)
entry = decode()
buckets = {"batch": (MOST_REQUESTS, 3)}
picker = Bucketed(entry, buckets, fill={"0": 0.0, "1": 0.0}, outputs={"0": {0: "batch"}, "1": {0: "batch"}})
picker.warm()
for requests in range(1, MOST_REQUESTS + 1):
    given = arguments(requests)
    with torch.no_grad():
        expected = entry.model(*given)
    torch.testing.assert_close(picker(*given)[1], expected[1])
print(picker.summary())
