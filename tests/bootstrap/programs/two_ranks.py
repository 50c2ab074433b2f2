"""Two ranks that reduce once."""

import numpy as np

import hvdlite as hvd

hvd.init()
assert hvd.size() == 2 and hvd.allreduce(np.array(hvd.rank() + 1), op=hvd.Sum) == 3
print("fine")
