"""Another user, who takes every name that a job may use in a folder for temporary files, until standard input ends."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import sys

from tests.bootstrap.other_user import OTHER


def main(folder: str, seed: int) -> None:
    """Make directories and links, and connect to sockets; print how often in the end."""
    os.setgid(OTHER)
    os.setuid(OTHER)
    chance, acts = random.Random(seed), 0
    os.symlink("hvdlite-job-1-loop", f"{folder}/hvdlite-job-1-loop")
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0] or sys.stdin.read(1):
        for name in os.listdir(folder):
            stem, random_end = name.rpartition(".")[0] or name, "".join(chance.choices("abcdefgh", k=8))
            with contextlib.suppress(OSError):
                match chance.randrange(4):
                    case 0:
                        os.mkdir(f"{folder}/{stem}.{random_end}", chance.choice([0o700, 0o777]))
                    case 1:
                        os.symlink(chance.choice([name, "/etc", folder]), f"{folder}/{stem}.{random_end}")
                    case 2:
                        os.rename(f"{folder}/{name}", f"{folder}/{random_end}")
                    case _:
                        with socket.socket(socket.AF_UNIX) as sock:
                            sock.connect(f"{folder}/{name}/control.sock")
            acts += 1
        if len(os.listdir(folder)) > 200:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{folder}/{name}") if not os.path.islink(f"{folder}/{name}") else os.unlink(f"{folder}/{name}")
    print(acts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
