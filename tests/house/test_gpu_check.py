"""`benchmarks.gpu_check` on the CPU: every check over doubles of GPUs, and what becomes of checks that end in any way."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import gpu_check, gpu_checks, gpu_report, gpu_sheet
from benchmarks.gpu_check import CHECKS, Check
from benchmarks.gpu_sheet import Setup
from hvdlite.planes.nccl import cupy_device
from tests.house import gpu_stand_in

ENDING = "tests.house.programs.ending_checks"


def sheets(names: Any, size: int, path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> dict[str, Any]:
    """Run checks over doubles of `count` GPUs; return rank 0's sheets."""
    gpus = gpu_stand_in.install(monkeypatch, count)
    found, errors = {}, {}
    for name in names:
        directory = path / f"{name}, {count} GPUs"
        directory.mkdir()
        gpu_stand_in.run_check(name, size, gpus, directory, monkeypatch)
        each = [json.loads((directory / str(rank)).read_text(encoding="utf-8")) for rank in range(size)]
        errors.update({(name, rank): sheet["errors"] for rank, sheet in enumerate(each) if sheet["errors"]})
        found[name] = {"state": "ok", **each[0]}
    gpus.end()
    assert not errors, "\n".join(f"{key} {part}:\n{text}" for key, parts in errors.items() for part, text in parts.items())
    return found


def test_every_check_runs_and_answers_its_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for size in (1, 2):
        names = [check.name for check in CHECKS if not check.tests and check.ranks == size]
        found |= sheets(names, size, tmp_path, monkeypatch)
    assert all(result["figures"] for result in found.values())
    verdicts = {name: verdict for name, verdict, _ in gpu_report.targets({"checks": found})}
    assert [name for name, verdict in verdicts.items() if verdict == "not measured"] == [
        "every collective and dtype right on 2 and 4 ranks"]
    assert "pack and unpack / copy" in gpu_report.table({"checks": found})


def test_figures_say_whether_ranks_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 2):
        found = sheets(["nccl"], 2, tmp_path, monkeypatch, count=count)
        assert found["nccl"]["notes"]["path"]["ranks share a GPU"] == (count == 1)


def test_checks_fit_their_part_and_have_what_runs_them() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for part in gpu_check.PARTS:
        assert 1.2 * sum(check.limit for check in CHECKS if check.part == part) <= gpu_check.TOTAL < 540
    for check in CHECKS:
        assert (gpu_check.ROOT / check.tests).is_file() if check.tests else check.name in gpu_checks.CHECKS
    assert {check.name for check in CHECKS if not check.tests} == set(gpu_checks.CHECKS)


def test_ranks_that_share_a_gpu_are_hosts_to_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(os, "environ", {})
    setup = Setup(3, 4)
    assert setup.gpu() == torch.device("cuda", 0) and chosen == [0]
    assert os.environ["NCCL_HOSTID"] == "r3" and os.environ["HVDLITE_SHARED_GPU"] == "1"
    joined: dict[str, Any] = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: joined.update(options))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    os.environ["HVDLITE_JOB_DIRECTORY"] = str(tmp_path)
    setup.join_torch(setup.gpu())
    assert (joined["rank"], joined["world_size"]) == (3, 4) and joined["init_method"].startswith(f"file://{tmp_path}/")
    Setup(0, 1).join_torch(None)
    setup.leave_torch()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="sees no GPU"):
        Setup(0, 1).gpu()


def test_the_gpu_is_opened_as_the_plane_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_autospec(cupy_device.CupyDevice)
    monkeypatch.setattr(cupy_device, "CupyDevice", made)
    assert Setup(0, 1).device(1) is made.return_value
    made.assert_called_once_with(1, 0, {})
    made.return_value.make_current.assert_called_once_with()


def test_the_gradients_that_are_packed_are_those_of_the_network() -> None:
    with torch.device("meta"):
        shapes = [tuple(parameter.shape) for parameter in gpu_sheet.resnet50().parameters()]
    assert sorted(shapes) == sorted(gpu_sheet.resnet_shapes()) and len(shapes) == 161


def test_a_check_that_raises_is_recorded_and_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    file = tmp_path / "sheet"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["gpu_checks", "pack", str(file)])
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(gpu_checks, "faulthandler", MagicMock())
    gpu_checks.main()
    assert codes == [1] and "sees no GPU" in json.loads(file.read_text(encoding="utf-8"))["errors"]["all"]


def test_what_ends_in_any_way_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", {})
    monkeypatch.setattr(gpu_check, "LEAST", 0.0)
    file = tmp_path / "record.json"
    checks = (Check("good", "ends well", 60, 1, module=ENDING),
              Check("part fails", "goes on", 60, 1, module=ENDING),
              Check("dies", "is killed", 60, 1, module=ENDING),
              Check("hangs", "takes too long", 0.5, 1, module=ENDING),
              Check("without", "needs a program", 60, 2, module=ENDING, under=("no-such-program-anywhere",)),
              Check("under", "has its program", 60, 2, module=ENDING, under=("env", "CHECKED=there")),
              Check("under what is unsupported", "has its program", 60, 2, module=ENDING, under=("env",)),
              Check("broken", "cannot start", 60, 2, module=ENDING, ranks="two"))  # type: ignore[arg-type]
    assert gpu_check.main(["--record", str(file), "--commit", "abc"], checks) == 1
    record = json.loads(file.read_text(encoding="utf-8"))
    states = {name: result["state"] for name, result in record["checks"].items()}
    assert states == {"good": "ok", "part fails": "failed", "dies": "failed", "hangs": "too long",
                      "without": "skipped", "under": "ok", "under what is unsupported": "skipped", "broken": "broken"}
    assert record["commit"] == "abc" and record["versions"]["torch"]
    figures = {name: [figure["value"] for figure in result.get("figures", ())] for name, result in record["checks"].items()}
    assert figures["good"] == [0] and figures["part fails"] == [0] and figures["dies"] == [0]
    assert record["checks"]["dies"]["codes"] == [-9] and "said" in record["checks"]["under"]
    assert "ZeroDivisionError" in record["checks"]["part fails"]["errors"]["rank 0: division"]
    printed = capsys.readouterr().out
    assert "division: ZeroDivisionError" in printed and "NOT MET" not in printed

    assert gpu_check.main(["--record", str(file), "--commit", "abc", "--only", "good"], checks) == 0
    assert set(json.loads(file.read_text(encoding="utf-8"))["checks"]) == set(states), "earlier checks stay"
    assert gpu_check.main(["--record", str(file), "--commit", "abc", "--only", "good", "--seconds", "-1"], checks) == 1
    assert "not begun" in json.loads(file.read_text(encoding="utf-8"))["checks"]["good"]["state"]
    assert gpu_check.main(["--show", str(file), str(tmp_path / "none")]) == 0
    assert "(too long)" in capsys.readouterr().out


def test_a_run_that_is_killed_leaves_what_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(check: Check, limit: float, gpus: int) -> Any:
        raise KeyboardInterrupt
    monkeypatch.setattr(gpu_check, "NEEDED", {})
    monkeypatch.setattr(gpu_check, "run_check", killed)
    file = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(["--record", str(file)], (Check("one", "", 60, 1),))
    assert json.loads(file.read_text(encoding="utf-8"))["checks"] == {"one": {"state": "under way"}}


def test_ranks_have_all_gpus() -> None:
    alone, several = Check("", "", 1, 1), Check("", "", 1, 1, ranks=2)
    assert [gpu_check.ranks_of(alone, gpus) for gpus in (0, 1, 8)] == [1, 1, 1]
    assert [gpu_check.ranks_of(several, gpus) for gpus in (0, 1, 8)] == [2, 2, 8]


def test_ranks_do_not_wait_long_for_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PATIENCE", 0.0)
    result = gpu_check.run_check(Check("one hangs", "", 100, 2, module=ENDING, ranks=2), 100)
    assert result["state"] == "too long" and result["codes"] == [3, None]


def test_outcomes_of_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.util, "find_spec", lambda name: None)
    tests = tmp_path / "test_some.py"
    tests.write_text("import pytest\ndef test_good(): pass\ndef test_bad(): assert 0, 'why'\n"
                     "@pytest.mark.skip(reason='no GPU')\ndef test_left_out(): pass\n", encoding="utf-8")
    result = gpu_check.run_tests(Check("tests", "", 60, 1, tests=str(tests)), 60)
    assert (result["state"], result["passed"], result["failed"], result["skipped"]) == ("failed", 1, 1, 1)
    assert "why" in result["tests"]["test_bad"] and "no GPU" in result["tests"]["test_left_out"]
    assert [gpu_check.state_of(*each) for each in ((None, 1, 0, 1), (0, 1, 1, 2), (0, 0, 2, 2), (1, 1, 0, 2), (0, 1, 0, 2))
            ] == ["too long", "ok", "skipped", "failed", "failed"]
    assert "1 passed, 1 failed" in gpu_report.summary("tests", {**result, "seconds": 1})
    log = ("tests/a.py::test_one PASSED [ 50%]\n[gw1] [ 60%] FAILED tests/a.py::test_two[2] \ntests/a.py::test_three \n"
           "[gw0] [ 70%] SKIPPED tests/a.py::test_four\n")
    assert gpu_check.outcomes_so_far(log) == {"test_one": "passed", "test_two[2]": "failed", "test_four": "skipped"}


def test_targets() -> None:
    def verdicts(**checks: Any) -> dict[str, str]:
        return {name: verdict for name, verdict, _ in gpu_report.targets({"checks": checks})}
    assert set(verdicts().values()) == {"not measured"}
    tests = dict.fromkeys(gpu_report.COLLECTIVE_TESTS, "passed")
    collectives = "every collective and dtype right on 2 and 4 ranks"
    ran = {"rank tests": {"state": "ok", "tests": tests}}
    assert verdicts(**ran)[collectives] == "met"
    tests[gpu_report.COLLECTIVE_TESTS[0]] = "failure: wrong"
    assert verdicts(**ran)[collectives] == "NOT MET"
    overhead = {"name": "resnet50 float32: wrapped / plain", "value": 1.02, "unit": ""}
    assert "NOT MET" in verdicts(training={"figures": [overhead]}).values()


def test_records_of_one_machine_and_commit_are_put_together() -> None:
    one = {"gpu": "H", "commit": "a", "checks": {"x": 1, "y": 1}}
    two = {"gpu": "H", "commit": "a", "checks": {"y": 2, "z": 2}}
    other = {"gpu": "H", "commit": "b", "checks": {"w": 3}}
    assert gpu_report.merged([one, two, other])["checks"] == {"x": 1, "y": 1, "z": 2}


def test_wheels_bring_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    def wheel(name: str, tags: str) -> None:
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-{tags}.whl", "w") as archive:
            archive.writestr(f"{name}.py", "VALUE = 3\n")
    monkeypatch.setattr(gpu_check, "NEEDED", {"brought_along": "brought-along"})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ})
    seen: list[Any] = []
    monkeypatch.setattr(gpu_check, "run_all", lambda checks, options: seen.append(
        (checks, __import__("brought_along").VALUE, os.environ["PYTHONPATH"])) or 0)
    assert gpu_check.main(["--part", "1"]) == 2
    assert "brought-along" in (said := capsys.readouterr().out) and "pip download" in said and "--wheels" in said
    assert gpu_check.main(["--wheels", str(tmp_path)]) == 2 and "no wheels" in capsys.readouterr().out
    wheel("brought_along", "py3-none-any")
    assert gpu_check.main(["--part", "2", "--wheels", str(tmp_path)]) == 0
    ((checks, value, path),) = seen
    assert value == 3 and path and {check.part for check in checks} == {2}
    del sys.modules["brought_along"]
    wheel("compiled", f"cp{sys.version_info.major}{sys.version_info.minor + 1}-cp3-manylinux2014_x86_64")
    assert gpu_check.main(["--wheels", str(tmp_path)]) == 2 and "--python-version" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "WHEELS_LIMIT", 10)
    assert gpu_check.main(["--wheels", str(tmp_path)]) == 2 and "meant to travel" in capsys.readouterr().out


def test_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0 and "compute-sanitizer" in capsys.readouterr().out
    assert gpu_check.main(["--only", "pack,nonsense"]) == 2 and "no check nonsense" in capsys.readouterr().out
    assert gpu_check.output(["no-such-program-anywhere"]) == ""
