"""CPU used by an idle job: every rank sleeps, and says how much CPU its process used, per minute."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--record", type=Path)
    arguments, _ = parser.parse_known_args()
    hvd.init()
    hvd.allreduce(np.ones(1))
    before = time.process_time()
    time.sleep(arguments.idle_seconds)
    used = (time.process_time() - before) * 60 / arguments.idle_seconds
    total = hvd.allreduce(np.array([used]), op=hvd.Sum)[0]
    if hvd.rank() == 0:
        print(f"idle: {total:.4f} s of CPU a minute over {hvd.size()} ranks", flush=True)
        if arguments.record:
            row = {"cpu_seconds_per_minute": total}
            arguments.record.write_text(json.dumps({"ranks": hvd.size(), "rows": [row]}, indent=1))
    hvd.shutdown()


if __name__ == "__main__":
    main()
