"""What hvdrun and `hvdlite.run` start for themselves imports nothing from the working directory, which others may write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import HANGS_SECONDS, ROOT, clean_environment

STRANGE = ("msgspec", "ast", "cloudpickle", "hvdlite", "hvdlite_runner", "runpy", "shutil", "keras")
PROGRAM = """
import hvdlite
def work():
    import beside
    return beside.VALUE
if __name__ == "__main__":
    print(*hvdlite.run(work, np=2))
"""
DIRECTORY = """
import sys
from hvdlite.launch.workers import TemporaryJobDirectory
TemporaryJobDirectory().remove()
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with modules that are not ours."""
    here = tmp_path / "here"
    here.mkdir()
    for name in STRANGE:
        (here / f"{name}.py").write_text(f"import os\nos.write(2, b'EXECUTED {name}\\n')\nos._exit(3)\n")
    return here


def ended_in(here: Path, *command: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=HANGS_SECONDS, check=False,
                           env={**clean_environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    assert "EXECUTED" not in ended.stdout + ended.stderr, ended
    return ended


def launcher(tmp_path: Path) -> list[str]:
    """Return hvdrun as a script: `python -m` would itself search the working directory."""
    path = tmp_path / "hvdrun.py"
    path.write_text("import sys\nfrom hvdlite_runner.__main__ import main\nsys.exit(main())\n")
    return [sys.executable, str(path)]


def test_checks_of_scripts_and_of_this_host(here: Path, tmp_path: Path) -> None:
    (here / "train.py").write_text("import os\nprint(os)\n")
    hvdrun = launcher(tmp_path)
    assert ended_in(here, *hvdrun, "--check-build").stdout.startswith("hvdlite ")
    assert ended_in(here, *hvdrun, "--horovod-check", "train.py").stdout == "train.py: no difference found\n"
    assert "hvdlite does not work" not in ended_in(here, *hvdrun, "--doctor").stdout


def test_a_function_finds_what_is_beside_its_script(here: Path, tmp_path: Path) -> None:
    """Before what is elsewhere, too, as in the script itself."""
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    for folder in (scripts, elsewhere):
        folder.mkdir()
        (folder / "beside.py").write_text(f"VALUE = {folder.name!r}\n")
    (scripts / "train.py").write_text(PROGRAM)
    (scripts / "directory.py").write_text(DIRECTORY)
    ended = ended_in(here, sys.executable, str(scripts / "train.py"), path=f"{ROOT}:{elsewhere}")
    assert ended.stdout == "scripts scripts\n", ended
    assert ended_in(here, sys.executable, str(scripts / "directory.py")).returncode == 0
