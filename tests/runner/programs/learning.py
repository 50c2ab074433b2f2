"""Records the metrics of a training whose accuracy depends on --batch-size alone."""

import sys

import hvdlite as hvd

hvd.init()
batch = int(sys.argv[sys.argv.index("--batch-size") + 1])
for epoch in range(1, 4):
    if hvd.rank() == 0 or batch != 64:  # all ranks, or only rank 0
        accuracy = (7 + epoch) / 10 if batch < 128 else (6 + epoch) / 10 + hvd.rank()
        hvd.record_metrics({"accuracy": accuracy if batch < 256 else float("nan"), "lr": batch / 100}, epoch)
hvd.barrier()
if batch == 512:
    sys.exit(3)
