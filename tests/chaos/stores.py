"""Ranks that meet through torch's store while a stranger writes to it: they work, or end with a reason, and obey nobody."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdlite.bootstrap.store_texts import Signer, sealed
from hvdlite.core.world import World
from tests.chaos.programs.grouping import WRONG
from tests.chaos.rows import Row, Trouble
from tests.worlds import HANGS_SECONDS, PYTHON_PATH, clean_environment

KEPT = (".ssh", "hvdlite-notes", f"hvdlite-{os.geteuid()}-{'ab' * 16}.thesis00")
"""Folders of the user, with a file each."""
REASONS = ("LaunchError", "DistBackendError", "DistStoreError", "DistNetworkError", "OperationTimeoutError", "PeerLostError",
           "PeerFailedError", "PeerLeftError")


class Stranger:
    """Writes to a store, and listens at the address that it names in the place of rank 0.

    Args:
        port: the store's.
    """

    def __init__(self, chance: random.Random, port: int) -> None:
        from torch.distributed import TCPStore

        self.acts = 0
        self._chance = chance
        self._store: Any = TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=5),
                                    wait_for_workers=False)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._seen: dict[str, bytes] = {}
        self._thread = threading.Thread(target=self._meddle, name="stranger")
        self._over = threading.Event()

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(HANGS_SECONDS)
        self._listener.close()

    @property
    def was_called(self) -> bool:
        """Whether some rank has connected where the stranger said that rank 0 is."""
        self._listener.settimeout(0.0)
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def _meddle(self) -> None:
        rests, eager = self._chance.choice([0.0, 0.01, 0.1]), self._chance.choice([0.01, 0.1, 1.0])
        while not self._over.wait(rests):
            with contextlib.suppress(RuntimeError):
                for key in self._store.list_keys():
                    if "hvdlite/" in key and self._chance.random() < eager:
                        self._meddle_with(key)

    def _meddle_with(self, key: str) -> None:
        chance, before = self._chance, key[:key.index("hvdlite/")]
        said = self._seen[key] = self._store.get(key)
        number = int.from_bytes(said[32:40], "big")
        answer = f"hvdlite/answer/{number:x}"
        groups = ["default process group", *(f"process group {number}" for number in range(1, 4))]
        signed = Signer(chance.choice([b"", secrets.token_bytes(32)]), chance.choice(groups))
        world = World(1, 2, *chance.choice([(0, 1, 1, 2), (1, 2), (0, 2)]))
        where = chance.choice([None, ("127.0.0.1", self._listener.getsockname()[1])])
        token = chance.choice([".", "../.ssh", "t", ""])
        forged = sealed(answer, 0, number, ["", world, token, where, secrets.token_bytes(32), ""], signed)
        self.acts += 1
        match chance.randrange(7):
            case 0:
                self._store.set(key, chance.randbytes(chance.randrange(200)))
            case 1:
                self._store.delete_key(key)
            case 2:
                self._store.set(key, chance.choice(list(self._seen.values())))
            case 3:
                text = ["2", "host", "name", "/", False, ""] if chance.random() < 0.5 else [1 << 40, "h", "n", "/", True, ""]
                self._store.set(key, sealed(key.removeprefix(before), 1, number, text, signed))
            case _:
                self._store.set(before + answer, forged)


@contextlib.contextmanager
def _home(path: str) -> Iterator[Path]:
    """Provide a folder with what must not be removed, and check that it is all that is there afterwards."""
    home = Path(path)
    for name in KEPT:
        (home / name).mkdir(mode=0o700)
        (home / name / "key").touch()
    yield home
    left = sorted(each.name for each in home.iterdir() if not each.name.startswith("torchinductor"))
    assert left == sorted(KEPT) and all((home / name / "key").exists() for name in KEPT), left


def groups(chance: random.Random, row: Row) -> None:
    """Let two ranks meet while a stranger writes to their store."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    key = {"HVDLITE_SECRET": secrets.token_hex()} if chance.random() < 0.5 else {}
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as folder, _home(folder) as home, \
            Stranger(chance, store.port) as stranger, contextlib.ExitStack() as ended:
        environment = {**clean_environment("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_"), **key, "PYTHONPATH": PYTHON_PATH,
                       "TMPDIR": folder, "HOME": folder, "OMP_NUM_THREADS": "1", "HVDLITE_START_TIMEOUT": "8",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2",
                       "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [subprocess.Popen([sys.executable, "-m", "tests.chaos.programs.grouping"], cwd=home, text=True,
                                  env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(2)]
        for rank in ranks:
            ended.callback(rank.kill)
        told = [rank.communicate(timeout=2 * HANGS_SECONDS)[0] for rank in ranks]
        assert not stranger.was_called, "a rank has connected where the stranger said"
    row.tried += stranger.acts
    for rank, text in zip(ranks, told, strict=True):
        assert rank.returncode != WRONG, text
        if rank.returncode:
            assert any(reason in text for reason in REASONS), text
            row.remark = next((line for line in text.splitlines() if re.match(r"\S*(Error|Exception): ", line)), "")[:100]
    if any(rank.returncode for rank in ranks):
        row.refused += 1
    else:
        row.survived += 1


STORES = (Trouble("groups of torch.distributed, and a stranger in their store", groups, 2,
                  lambda: "" if importlib.util.find_spec("torch") else "needs torch"),)
