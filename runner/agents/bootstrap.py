"""The program that ssh starts on another host, with any Python: it checks versions and starts the agent.

The launcher sends it as the argument of `python -c`, so it is short, needs no installed package, and works with any Python
3. It reads a length (8 hexadecimal digits) and that many bytes of JSON from standard input, which include the environment: a
command line would be public. A problem is reported as one line on standard error that begins with "hvdlite: ", with exit
code 96.
"""
import json
import os
import sys


def stop(problem: str) -> None:
    """Report a problem of this host to the launcher, and exit."""
    sys.stderr.write("\nhvdlite: " + problem + "\n")
    sys.stderr.flush()
    os._exit(96)


def read(count: int) -> bytes:
    """Return exactly this many bytes of standard input."""
    content = b""
    while len(content) < count:
        piece = os.read(0, count - len(content))
        if not piece:
            os._exit(0)  # the launcher has ended
        content += piece
    return content


def start_agent() -> None:
    """Adopt the launcher's environment and directory, and become the agent."""
    given = json.loads(read(int(read(8), 16)).decode())
    here = list(sys.version_info[:2])
    if here != given["python"]:
        stop("runs Python %d.%d (%s), but the launcher %d.%d; have the same one there, or name it with --remote-python PATH"
             % (here[0], here[1], sys.executable, given["python"][0], given["python"][1]))
    os.environ.update(given["environment"])
    try:
        os.chdir(given["directory"])
    except OSError as error:
        stop("cannot enter the working directory %s: %s; name another one with --working-directory DIR"
             % (given["directory"], error.strerror))
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        from hvdlite._version import __version__ as version
        from hvdlite_runner.agents.agent import main
    except ImportError as error:
        return stop("%s cannot import hvdlite: %s; install it there: %s -m pip install hvdlite==%s"
                    % (sys.executable, error, sys.executable, given["version"]))
    if version != given["version"]:
        stop("has hvdlite %s, but the launcher %s; install the same one: %s -m pip install hvdlite==%s"
             % (version, given["version"], sys.executable, given["version"]))
    main(given["silence"])


if __name__ == "__main__":
    start_agent()
