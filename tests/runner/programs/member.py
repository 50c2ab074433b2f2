"""A member of an elastic job without a runtime: it speaks with the authority, and does what a test tells it.

It prints what it hears, one line each. The test writes words to the datagram socket FOLDER/ID: see `_told`. After `be MODE`:

- deaf: it obeys and answers nothing;
- computing: it answers that it lives, and does not stop before it is told `stop`;
- dying: it is killed when it is ordered into a world;
- staying: it does not exit when all have finished.

The members in OUTSIDE ("1,3") do not call elastic.run.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from pathlib import Path

from hvdlite.core.launch_contract import JOB_DIRECTORY, JOINER, MEMBER, MEMBER_SOCKET, FailureRecord
from hvdlite.membership.messages import (
    Alive,
    AllFinished,
    AskAlive,
    BoundaryReport,
    Dismissed,
    MemberFinished,
    MemberFrames,
    MemberHello,
    MemberIdle,
    MemberReady,
    MembershipMessage,
    Met,
    PrepareStop,
    StateReport,
    StopAt,
    StopNow,
    WorldOrder,
    frame,
)

COMMITS = 12


class Member:
    """The member."""

    def __init__(self, folder: Path) -> None:
        self.directory, self.id = os.environ[JOB_DIRECTORY], int(os.environ[MEMBER])
        self.epoch, self.commits, self.mode = 1, COMMITS, ""
        self.stop: MemberIdle | None = None  # what it says when it has computed
        self.link = socket.socket(socket.AF_UNIX)
        self.link.connect(f"{self.directory}/{MEMBER_SOCKET}")
        self.orders = MemberFrames(orders=True)
        self.test = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.test.bind(str(folder / str(self.id)))
        names = ("HVDLITE_RANK", "HVDLITE_SIZE", "HVDLITE_LOCAL_RANK", "HVDLITE_SLOT", "HOROVOD_HOSTNAME",
                 "HOROVOD_ELASTIC", "HVDLITE_JOINER")
        self.say(MemberHello(self.id, os.getpid()))
        if str(self.id) not in os.environ.get("OUTSIDE", "").split(","):
            self.say(MemberReady())
        if JOINER not in os.environ:
            self.say(Met(1))
        print("begun", self.id, os.getpid(), *(os.environ.get(name, "-") for name in names), flush=True)

    def say(self, message: MembershipMessage) -> None:
        self.link.sendall(frame(message))

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ, self.hear)
            selector.register(self.test, selectors.EVENT_READ, self.obey)
            while True:
                for key, _ in selector.select():
                    key.data()

    def hear(self) -> None:
        content = self.link.recv(65536)
        if not content:
            sys.exit(3)
        for order in self.orders.feed(content):
            if self.mode != "deaf":
                self.answer(order)

    def answer(self, order: object) -> None:
        if isinstance(order, WorldOrder):
            if self.mode == "dying":
                os.kill(os.getpid(), 9)
            print("heard", order.epoch, *order.members, *order.host_names, order.ranks_by_machine, flush=True)
            self.epoch = order.epoch
            self.say(Met(order.epoch))
        elif isinstance(order, StopNow):
            self.end_world(MemberIdle(order.epoch, StateReport(commits=self.commits), order.reason))
        elif isinstance(order, PrepareStop):
            self.say(BoundaryReport(order.change, 7))
        elif isinstance(order, StopAt):
            self.end_world(MemberIdle(self.epoch, StateReport(commits=self.commits, at_rest=True)))
        elif isinstance(order, AskAlive):
            self.say(Alive(order.epoch, in_user_code=self.mode == "computing"))
        elif isinstance(order, (AllFinished, Dismissed)):
            print("heard", type(order).__name__, flush=True)
            if self.mode != "staying":
                sys.exit(0)

    def end_world(self, idle: MemberIdle) -> None:
        if self.mode == "computing":
            self.stop = idle
        else:
            self.say(idle)

    def obey(self) -> None:
        word, *more = self.test.recv(1000).decode().split()
        _told(self, word, more)


def _told(member: Member, word: str, more: list[str]) -> None:
    if word == "finish":
        member.say(MemberFinished(member.epoch))
        print("has finished", flush=True)
    elif word == "again":
        member.say(MemberReady())
    elif word == "be":
        member.mode = more[0]
        print("is", member.mode, flush=True)
    elif word == "stop" and member.stop is not None:
        member.mode = ""
        member.end_world(member.stop)
    elif word == "blame":
        member.say(MemberIdle(member.epoch, StateReport(commits=member.commits), "StallError: a rank never came",
                              (int(more[0]),)))
    elif word == "exit":
        os._exit(int(more[0]))
    elif word == "kill":
        os.kill(os.getpid(), 9)
    elif word == "raise":
        FailureRecord(member.id, member.id, 1.0, "ValueError", more[0], f"Traceback of {more[0]}").write(member.directory)
        os._exit(1)
    elif word == "commits":
        member.commits = int(more[0])
        print("has commits", flush=True)
    elif word == "talk":
        member.link.sendall(b"\0\0\0\1\xc1")  # no message
    elif word == "child":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("child", child.pid, flush=True)


if __name__ == "__main__":
    member = Member(Path(sys.argv[1]))
    member.run()
