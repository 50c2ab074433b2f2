"""NCCL through ctypes: over a library in C that checks what it is given, and over the real one where there is one."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdlite.planes.nccl import api
from hvdlite.planes.nccl.api import CONFIG, IN_PROGRESS, SHRINK, SUCCESS, WINDOWS, Config, NcclApi, NcclError
from hvdlite.planes.nccl.communicator import ConfiguredCommunicator, Groups, NcclOptions
from tests.worlds import HANGS_SECONDS

COMPILER = shutil.which("gcc") or shutil.which("cc")
FIELDS = [name for name, _ in Config._fields_]
_LIBRARY = """
#include <limits.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct {
  size_t size; unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs; const char* netName; int splitShare, trafficClass; const char* commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
} ncclConfig_t;
struct comm { volatile int state, polls; int rank, size; volatile int freed; char called[256]; };
static struct comm comms[4];
static int made;
int steps;            /* how many polls a call of a nonblocking communicator takes */
static int nonblocking, grouped;
const char* ncclGetErrorString(int status) { return status == 4 ? "invalid argument" : "system error"; }
int ncclGetVersion(int* version) { *version = VERSION; return 0; }
int ncclCommInitRankConfig(struct comm** comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config->size > sizeof(ncclConfig_t) || config->magic != 0xcafebeef || config->version != 22700) return 4;
  if (config->cgaClusterSize != INT_MIN || config->nvlsCTAs != INT_MIN || config->netName || config->shrinkShare != INT_MIN
      || config->trafficClass != INT_MIN || config->minCTAs != INT_MIN) return 4;
  if (config->maxCTAs != INT_MIN && config->maxCTAs != 4) return 4;
  if (config->CTAPolicy != INT_MIN && config->CTAPolicy != 1) return 4;
  if (strcmp(config->commName, "hvdlite.3") || rank != 1 || size != 2) return 4;
  if (id.internal[0] != 7 || id.internal[127] != 9) return 4;
  *comm = &comms[made++ % 4];
  memset(*comm, 0, sizeof **comm);
  nonblocking = config->blocking == 0;
  (*comm)->rank = rank; (*comm)->size = size;
  (*comm)->polls = nonblocking ? steps : 0;
  return nonblocking ? 7 : 0;
}
int ncclCommGetAsyncError(struct comm* comm, int* status) {
  if (comm->freed) return 3;
  *status = comm->state ? comm->state : comm->polls > 0 ? (comm->polls--, 7) : 0;
  return 0;
}
int ncclCommAbort(struct comm* comm) { comm->freed = 1; return 0; }
static int call(struct comm* comm, const char* what) {
  if (comm->freed) return 3;
  strcat(comm->called, what);
  comm->polls = nonblocking ? steps : 0;
  return nonblocking && !grouped ? 7 : 0;
}
int ncclAllReduce(void* a, void* b, size_t n, int t, int op, struct comm* c, void* s) {
  return a == (void*)1 && b == (void*)2 && n == 1ull << 40 && t == 4 && op == 5 && s == (void*)~0ull ? call(c, "A") : 4; }
int ncclReduce(void* a, void* b, size_t n, int t, int op, int root, struct comm* c, void* s) {
  return a == (void*)1 && b == (void*)2 && n == 3 && t == 4 && op == 5 && root == 6 && s == (void*)7 ? call(c, "R") : 4; }
int ncclBroadcast(void* a, void* b, size_t n, int t, int root, struct comm* c, void* s) {
  return a == (void*)1 && b == (void*)2 && n == 3 && t == 4 && root == 5 && s == (void*)6 ? call(c, "B") : 4; }
int ncclReduceScatter(void* a, void* b, size_t n, int t, int op, struct comm* c, void* s) {
  return a == (void*)1 && b == (void*)2 && n == 3 && t == 4 && op == 5 && s == (void*)6 ? call(c, "S") : 4; }
int ncclAllGather(void* a, void* b, size_t n, int t, struct comm* c, void* s) {
  return a == (void*)1 && b == (void*)2 && n == 3 && t == 4 && s == (void*)5 ? call(c, "G") : 4; }
int ncclSend(void* a, size_t n, int t, int peer, struct comm* c, void* s) {
  return a == (void*)1 && n == 2 && t == 3 && peer == 4 && s == (void*)5 ? call(c, ">") : 4; }
int ncclRecv(void* a, size_t n, int t, int peer, struct comm* c, void* s) {
  return a == (void*)1 && n == 2 && t == 3 && peer == 4 && s == (void*)5 ? call(c, "<") : 4; }
int ncclGroupStart(void) { grouped = 1; return 0; }
int ncclGroupEnd(void) { grouped = 0; return nonblocking ? 7 : 0; }
int ncclMemAlloc(void** p, size_t n) { if (n > 1ull << 41) return 1; *p = (void*)0x700000001000; return 0; }
int ncclMemFree(void* p) { return p == (void*)0x700000001000 ? 0 : 4; }
int ncclCommWindowRegister(struct comm* c, void* p, size_t n, void** win, int flags) {
  if (p != (void*)0x700000001000 || n != 4096 || flags != 1) return 4;
  *win = c->rank == 1 ? (void*)0x700000002000 : 0;
  return call(c, "w");
}
int ncclCommRevoke(struct comm* c, int flags) { return flags ? 4 : call(c, "r"); }
int ncclCommShrink(struct comm* c, int* excluded, int count, struct comm** new, ncclConfig_t* config, int flags) {
  if (count != 2 || excluded[0] != 0 || excluded[1] != 5 || config || flags) return 4;
  *new = &comms[made++ % 4];
  memset(*new, 0, sizeof **new);
  return call(c, "s");
}
const char* called(struct comm* comm) { return comm->called; }
void fails(struct comm* comm) { comm->state = 2; }
"""


@pytest.fixture
def build(tmp_path: Path) -> Callable[[int], str]:
    """Return what builds a library of a version."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "nccl.c"
    source.write_text(_LIBRARY, encoding="utf-8")

    def built(version: int) -> str:
        library = tmp_path / f"libnccl-{version}.so"
        subprocess.run([COMPILER, "-shared", "-fPIC", f"-DVERSION={version}", "-o", str(library), str(source)], check=True)
        return str(library)
    return built


def made(library: NcclApi, options: NcclOptions) -> tuple[ConfiguredCommunicator, Groups]:
    groups, config = Groups(library), options.config("hvdlite.3")
    comm = library.init(2, bytes([7, *[0] * 126, 9]), 1, config)
    return ConfiguredCommunicator(library, comm, groups, config, blocking=options.blocking), groups


OPTIONS = [NcclOptions(max_ctas=4), NcclOptions(blocking=False), NcclOptions(blocking=False, cta_policy="efficiency")]


@pytest.mark.parametrize("options", OPTIONS, ids=["blocking", "nonblocking", "policy"])
def test_a_communicator_gives_nccl_its_arguments(build: Callable[[int], str], options: NcclOptions) -> None:
    path = build(22809)
    library, double = NcclApi(path), ctypes.CDLL(path)
    double.called.restype, double.called.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    ctypes.c_int.in_dll(double, "steps").value = 3
    assert options.needs_config and not NcclOptions().needs_config
    communicator, groups = made(library, options)
    communicator.complete()
    communicator.allReduce(1, 2, 1 << 40, 4, 5, 2**64 - 1)
    communicator.reduce(1, 2, 3, 4, 5, 6, 7)
    communicator.broadcast(1, 2, 3, 4, 5, 6)
    communicator.reduceScatter(1, 2, 3, 4, 5, 6)
    communicator.allGather(1, 2, 3, 4, 5)
    with groups.begin():
        communicator.send(1, 2, 3, 4, 5)
        communicator.recv(1, 2, 3, 4, 5)
    assert library.state(communicator.comm) == SUCCESS, "a group has ended when its calls are under way"
    pointer = library.allocate(4096)
    assert communicator.register_window(pointer, 4096) == 0x700000002000, "the address of a window has 64 bits"
    library.free(pointer)
    assert double.called(communicator.comm) == b"ARBSG><w"
    with pytest.raises(NcclError, match=r"ncclAllGather: invalid argument \(ncclResult_t 4\)"):
        communicator.allGather(1, 2, 3, 4, 6)
    communicator.check_async_error()
    double.fails(ctypes.c_void_p(communicator.comm))
    with pytest.raises(NcclError, match="work under way: system error"):
        communicator.check_async_error()
    communicator.abort()
    communicator.abort()
    communicator.check_async_error()
    with pytest.raises(NcclError, match="aborted"):
        communicator.send(1, 2, 3, 4, 5)


def test_an_abort_ends_a_wait_for_other_ranks(build: Callable[[int], str]) -> None:
    library, path = NcclApi(build(22809)), build(22809)
    ctypes.c_int.in_dll(ctypes.CDLL(path), "steps").value = 1 << 30  # the other ranks do not come
    communicator, _ = made(library, NcclOptions(blocking=False))
    assert library.state(communicator.comm) == IN_PROGRESS
    caught: list[Exception] = []

    def wait() -> None:
        try:
            communicator.complete()
        except NcclError as error:
            caught.append(error)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    communicator.abort()
    thread.join(HANGS_SECONDS)
    assert "the communicator has been aborted" in str(caught)


def test_shrinking_a_revoked_communicator(build: Callable[[int], str]) -> None:
    library = NcclApi(build(22809))
    communicator, _ = made(library, NcclOptions(max_ctas=4))
    library.revoke(communicator.comm)
    child = ctypes.c_void_p()
    library.shrink(communicator.comm, [0, 5], child)
    assert child.value and child.value != communicator.comm
    with pytest.raises(NcclError, match="invalid argument"):
        library.shrink(communicator.comm, [0], child)


def test_what_a_late_shrink_makes_is_aborted_with_its_parent(build: Callable[[int], str]) -> None:
    path = build(22809)
    library, steps = NcclApi(path), ctypes.c_int.in_dll(ctypes.CDLL(path), "steps")
    parent, groups = made(library, NcclOptions(blocking=False))
    child = parent.shrink([0, 5], groups, HANGS_SECONDS)
    steps.value = 1 << 30  # the other ranks do not come
    with pytest.raises(NcclError, match="it takes longer than 0 s"):
        parent.shrink([0, 5], groups, 0.0)
    assert parent._child is not None
    late = parent._child.value or 0
    assert late != child.comm and library.state(late) == SUCCESS
    parent.abort()
    with pytest.raises(NcclError):
        library.state(late)
    assert library.state(child.comm) == SUCCESS, "the first one is another's"


@pytest.mark.parametrize(("version", "lacks"), [
    (22602, {WINDOWS: r"NCCL 2.26.2 has no ncclCommWindowRegister; 2.27.3 has it", CONFIG: "2.27.0 has it",
             SHRINK: "2.28.7 has it"}), (22707, {SHRINK: "NCCL 2.27.7 has no ncclCommRevoke; 2.28.7 has it"}), (22809, {})])
def test_what_a_version_has(build: Callable[[int], str], version: int, lacks: dict[Any, str]) -> None:
    library = NcclApi(build(version))
    for functions in (WINDOWS, CONFIG, SHRINK):
        assert library.lacks(functions).endswith(lacks.get(functions, "")) and bool(library.lacks(functions)) == (
            functions in lacks)
    if SHRINK in lacks:
        with pytest.raises(NcclError, match="has no ncclCommRevoke"):
            library.revoke(1)


def test_without_a_library() -> None:
    library = NcclApi("libnothing-of-this-name.so.2")
    assert library.version == 0 and "cannot be called through ctypes" in library.lacks(WINDOWS)
    with pytest.raises(NcclError, match="cannot be called through ctypes"):
        library.allocate(10)


# --- the real one ----------------------------------------------------------------------------------------------------------


def real() -> Path:
    """Return the path of an installed NCCL wheel's library, without loading it."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (found := Path(place) / "nccl/lib/libnccl.so.2").is_file():
            return found
    pytest.skip("needs NCCL: pip install nvidia-nccl-cu12 (or -cu13)")


def test_the_real_librarys_functions_take_these_arguments() -> None:
    """Without a GPU, calls fail for what they are given (4) or for want of a driver (1), and none of them crashes."""
    ended = subprocess.run([sys.executable, "-m", "tests.planes.programs.real_nccl", str(real())], capture_output=True,
                           text=True, check=False, timeout=HANGS_SECONDS)
    assert ended.returncode == 0, ended.stderr
    first, *lines = ended.stdout.splitlines()
    version, *texts = first.split("; ")
    assert texts == ["invalid argument", "NCCL operation in progress"]
    answers = dict(line.split() for line in lines)
    version_has = {function for function, (since, _) in api._FUNCTIONS.items() if int(version) >= since}
    assert answers.keys() == version_has, "the table says from which version on NCCL has a function"
    calls = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclReduceScatter", "ncclAllGather", "ncclSend", "ncclRecv",
             "ncclCommGetAsyncError"}
    assert {function for function, status in answers.items() if status == "4"} >= calls
    for function in ("ncclGroupStart", "ncclCommRevoke", "ncclCommAbort"):
        assert answers.pop(function, "0") == "0", "no communicator is none to revoke or to abort"
    assert answers.pop("ncclGroupEnd") == "5", "this thread has begun no group"
    assert set(answers.values()) <= {"1", "4"}, answers


def test_the_layout_of_the_real_configuration(tmp_path: Path) -> None:
    header = real().parents[1] / "include/nccl.h"
    if COMPILER is None or not header.is_file():
        pytest.skip("needs a C compiler and nccl.h")
    ours, version = Config(), re.search(r"#define NCCL_VERSION_CODE (\d+)", header.read_text(encoding="utf-8"))
    if version is None or int(version.group(1)) < ours.version:
        pytest.skip("NCCL before 2.27 is not configured")
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        (tmp_path / name).write_text("typedef struct CUstream_st* cudaStream_t; typedef struct CUevent_st* cudaEvent_t;"
                                     if name == "cuda_runtime.h" else "", encoding="ascii")
    begins = "".join(f'printf("%zu ", offsetof(ncclConfig_t, {name}));' for name in FIELDS)
    (tmp_path / "layout.c").write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include \"{header}\"\nint main(void) {{ ncclConfig_t c = "
        f"NCCL_CONFIG_INITIALIZER; {begins} printf(\"%u %d %zu\", c.magic, c.blocking, sizeof c); }}",
        encoding="utf-8")
    subprocess.run([COMPILER, "-I", str(tmp_path), "-o", str(tmp_path / "layout"), str(tmp_path / "layout.c")], check=True)
    said = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout.split()
    *offsets, magic, undefined, size = map(int, said)
    assert offsets == [getattr(Config, name).offset for name in FIELDS]
    assert (magic, undefined) == (ours.magic, ours.blocking) and ours.size <= size
