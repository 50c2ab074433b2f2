"""Several hosts on one machine: a network namespace each, with an sshd of its own, all on one bridge.

Needs root, iproute2 and openssh-server; `unavailable()` says what is missing. Everything is removed afterwards. A namespace
is entered by `ip netns exec`; its host name is its own too, and processes are found by their namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.worlds import HVDRUN, clean_environment

_NUMBERS = itertools.count()
SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin:/bin")


def unavailable() -> str:
    """Return why there can be no hosts here, "" when there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None or shutil.which("nft", path="/usr/sbin:/sbin") is None:
        return "needs iproute2 and nftables (make test as root installs them)"
    if SSHD is None or shutil.which("ssh-keygen") is None:
        return "needs openssh-server (make test as root installs it)"
    name = f"hvdtry{os.getpid()}"  # test processes ask at the same time
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class Hosts:
    """Hosts a, b, c, ... at 10.77.0.1, .2, .3 and fd77::1, ..., known by name to each other; launchers run on a."""

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        self.names, self.directory = list(names), directory
        self._tag = f"h{os.getpid() % 100000}{next(_NUMBERS)}"
        self._bridge = f"{self._tag}br"
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        self.home = directory / "home"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for sshd in self._sshds.values():
            sshd.kill()
            sshd.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / self.namespace(name), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def namespace(self, name: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._tag}{name}"

    def address(self, name: str, version: int = 4) -> str:
        """Return a host's address."""
        number = self.names.index(name) + 1
        return f"10.77.0.{number}" if version == 4 else f"fd77::{number}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs on a host."""
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh", *command]
        return ["ip", "netns", "exec", self.namespace(name), *inside]

    def environment(self) -> dict[str, str]:
        """Return the environment of a user's shell on any host."""
        return {**clean_environment("SSH_"), "HOME": str(self.home),
                "OMP_NUM_THREADS": "1", "TMPDIR": str(self.directory / "tmp")}

    def ssh_arguments(self) -> str:
        """Return what ssh needs here and would have in a user's ~/.ssh/config (it takes no HOME for that)."""
        return (f"-i {self.directory}/key -o UserKnownHostsFile={self.directory}/known_hosts "
                f"-o GlobalKnownHostsFile=/dev/null -o HashKnownHosts=no")

    def hvdrun(self, *arguments: str, on: str = "a") -> list[str]:
        """Return the command of an hvdrun on a host."""
        return self.command(on, [*HVDRUN, f"--ssh-args={self.ssh_arguments()}",
                                 *arguments])

    def processes(self, name: str) -> list[int]:
        """Return the processes in a host's namespace, but for its sshd, which keeps cut connections for a while."""
        try:
            network = os.stat(f"/var/run/netns/{self.namespace(name)}").st_ino
        except OSError:
            return []
        excluded = {sshd.pid for sshd in self._sshds.values()}
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{entry}/ns/net").st_ino == network and int(entry) not in excluded:
                    name, _, rest = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")
                    if rest.split()[0] not in "ZX" and not name.endswith("(sshd"):
                        found.append(int(entry))
            except OSError:
                continue
        return found

    def wait_until_empty(self, seconds: float, *names: str) -> float:
        """Wait until no process is left on hosts; return how long that took."""
        begun = time.monotonic()
        while any(self.processes(name) for name in names or self.names):
            if time.monotonic() - begun > seconds:
                left = {name: [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200]
                               for pid in self.processes(name)] for name in names or self.names}
                raise AssertionError(f"after {seconds} s there is still: {left}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def cut(self, name: str) -> None:
        """Pull a host's cable."""
        self._ip("link", "set", f"{self._tag}{name}p", "down")

    def mend(self, name: str) -> None:
        """Put it back."""
        self._ip("link", "set", f"{self._tag}{name}p", "up")

    def stop_sshd(self, name: str) -> None:
        """Let a host refuse connections to its ssh port."""
        self._sshds.pop(name).kill()

    def filter(self, name: str, rule: str) -> Callable[[], None]:
        """Add an nftables rule to a host's input chain; return what removes it."""
        inside = ["ip", "netns", "exec", self.namespace(name), "nft"]
        subprocess.run([*inside, "add table inet t; add chain inet t c { type filter hook input priority 0; }; "
                        f"add rule inet t c {rule}"], check=True)
        return lambda: subprocess.run([*inside, "delete table inet t"], check=True) and None

    def limit(self, name: str, rate: str, burst: str = "32kbit") -> Callable[[], None]:
        """Limit what a host sends and receives, as tc-tbf(8) writes rates and sizes; return what removes the limit."""
        outside, inside = ["tc", "qdisc"], ["ip", "netns", "exec", self.namespace(name), "tc", "qdisc"]
        ends = [(outside, f"{self._tag}{name}p"), (inside, "eth0")]
        for tc, device in ends:
            subprocess.run([*tc, "add", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", "400ms"],
                           check=True)
        return lambda: [subprocess.run([*tc, "del", "dev", device, "root"], check=True) for tc, device in ends] and None

    def new_host_key(self, name: str) -> None:
        """Set a host's sshd up anew."""
        self._sshds.pop(name).kill()
        (self.directory / f"host_{name}").unlink()
        self._start_sshd(name)

    def _make(self) -> None:
        for folder in (self.home, self.directory / "tmp"):
            folder.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / "key")], check=True)
        self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("link", "set", self._bridge, "up")
        for name in self.names:
            namespace, port = self.namespace(name), f"{self._tag}{name}p"
            own = Path("/etc/netns") / namespace  # `ip netns exec` puts what is there over /etc
            own.mkdir(parents=True)
            (own / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
                f"{self.address(each, version)} {each}\n" for each in self.names for version in (4, 6)))
            self._ip("netns", "add", namespace)
            self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            self._ip("link", "set", port, "master", self._bridge, "up")
            for words in (["addr", "add", f"{self.address(name)}/24", "dev", "eth0"],
                          ["addr", "add", f"{self.address(name, 6)}/64", "dev", "eth0", "nodad"],
                          ["link", "set", "lo", "up"], ["link", "set", "eth0", "up"]):
                self._ip("-n", namespace, *words)
            self._start_sshd(name)
        known = "".join(f"{name},{self.address(name)},{self.address(name, 6)} "
                        f"{(self.directory / f'host_{name}.pub').read_text().rsplit(' ', 1)[0]}\n"
                        for name in self.names)
        (self.directory / "known_hosts").write_text(known)

    def _start_sshd(self, name: str) -> None:
        key = self.directory / f"host_{name}"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        config = self.directory / f"sshd_{name}"
        config.write_text(f"HostKey {key}\nAuthorizedKeysFile {self.directory}/key.pub\nPidFile none\nUsePAM no\n"
                          "StrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
                          f"SetEnv HOME={self.home}\n")  # no ~/.bashrc, which may take locks that killed sessions leave
        Path("/run/sshd").mkdir(exist_ok=True)
        with open(self.directory / f"sshd_{name}.log", "ab") as log:
            self._sshds[name] = subprocess.Popen(
                self.command(name, [str(SSHD), "-D", "-e", "-f", str(config)]), stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while "listening" not in (self.directory / f"sshd_{name}.log").read_text().rpartition("\n[")[2]:
            assert time.monotonic() < deadline and self._sshds[name].poll() is None, log.name
            time.sleep(0.02)

    @staticmethod
    def _ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
