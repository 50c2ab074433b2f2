"""`hvd.elastic.fit`: bodies have the same samples in any world, and callbacks and the history go on."""

from __future__ import annotations

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.elastic_jobs import ElasticJob
from tests.tf.support import BACKENDS, ENVIRONMENT, PROGRAMS, imported, pairs, run

SAMPLES, EPOCHS = 22, 4
BATCH, EACH = 5, 5
"""Of a global batch, and bodies in an epoch; the last one has 2."""


def job(backend: str, *arguments: object, slots: int = 2, **limits: Any) -> ElasticJob:
    return ElasticJob(f"{PROGRAMS}.elastic_fit:train", *arguments, slots={"a": slots}, min_np=1, imported=imported(backend),
                      environment={**ENVIRONMENT, "KERAS_BACKEND": backend}, **limits)


def judge(folder: Path, results: dict[int, Any], backend: str, is_told: bool = True) -> list[int]:
    """Check that ranks agree, and have had what an undisturbed training has; return the sizes of worlds, by body."""
    first, *others = results.values()
    whole, epochs = first["whole"], len(first["epochs"])
    for result in [first, *others]:
        assert result["epochs"] == list(range(epochs)) and result["loss"] == first["loss"]
        assert result["parameters"] == pytest.approx(whole["parameters"], abs=1e-4, rel=0)
        assert result["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-4)
        assert result["stopped"] in (0, EPOCHS - 1), "EarlyStopping has gone on"
    bodies: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
    for file in folder.glob("ledger.*"):
        for epoch, begin, size, rows in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            bodies[epoch, begin].append((size, rows))
    for epoch in range(epochs if is_told and backend != "jax" else 0):
        samples: collections.Counter[int] = collections.Counter()
        for (at, _), shares in bodies.items():
            if at == epoch:
                lists = [rows for _, rows in shares]
                is_whole = all(each == lists[0] for each in lists)
                samples.update(lists[0] if is_whole else itertools.chain(*lists))
        assert samples == dict.fromkeys(range(SAMPLES), 1), f"epoch {epoch}"
    if backend not in ("jax", "a checkpoint"):
        assert all([size for size, _ in shares] == [len(shares)] * len(shares) for shares in bodies.values())
    return [bodies[at][0][0] for at in sorted(bodies)]


@pytest.mark.parametrize(("backend", "data"), pairs(
    ("tensorflow", ("arrays", None)), ("torch", ("PyDataset", None)), ("torch", ("arrays", "drawn")),
    ("tensorflow", ("PyDataset", [1, 3]))))
def test_a_rank_is_killed_in_the_middle_of_an_epoch(tmp_path: Path, backend: str, data: tuple[str, Any]) -> None:
    """With arrays it is run eagerly, so that the model can tell its samples."""
    kind, shares = data
    is_told = kind == "arrays"
    with job(backend, str(tmp_path), BATCH, kind, (), (1, "begin", 7), is_told, EPOCHS, False, shares,
             hosts_are_fixed=True) as running:
        results = running.finish()
        assert running.orders[2].restore == (backend == "jax"), f"{running}"
    sizes = judge(tmp_path, results, backend, is_told)
    assert backend == "jax" or sizes == [2] * 7 + [1] * 13, "no finished step is made again"
    if shares == "drawn" and backend != "jax":
        lines = map(json.loads, (tmp_path / "ledger.0").read_text(encoding="utf-8").splitlines())
        assert {len(rows) for _, _, size, rows in lines if size == 2} > {1, 4}
    loss, whole = results[0]["loss"], results[0]["whole"]["loss"]
    assert loss == pytest.approx([whole[0], loss[1], *whole[2:]], abs=1e-4), "only that epoch's mean is another one"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_0_is_lost_at_the_end_of_an_epoch(tmp_path: Path, backend: str) -> None:
    """The last body of an epoch has fewer rows than there are ranks, and then one each."""
    dies = 0, "evaluated", 10
    with job(backend, str(tmp_path), BATCH, "arrays", (), dies, True, slots=3, hosts_are_fixed=True) as running:
        results = running.finish()
    sizes = judge(tmp_path, results, backend)
    assert backend == "jax" or sizes == [3] * 10 + [2] * 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_come_and_go(tmp_path: Path, backend: str) -> None:
    """The one that has come is left in the end, with everything that the first one knew."""
    with job(backend, str(tmp_path), BATCH, "arrays", (1000,), (-1, "", 0), False, 1000, False, "auto", slots=1) as running:
        running.until_printed(0, "body 3 in 1")
        running.see({"a": 1, "b": 1})
        running.until_printed(1, "in 2")
        running.see({"b": 1})
        running.until_printed(1, "in 1")
        running.until(lambda: running.processes[0].poll() == 0)
        (tmp_path / "end").touch()
        results = running.finish()
    sizes = judge(tmp_path, {1: results[1]}, backend, False)
    assert [size for size, _ in itertools.groupby(sizes)] == [1, 2, 1]


def test_a_job_goes_on_from_a_checkpoint_with_another_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    given = (str(tmp_path), BATCH, "arrays")
    with job("torch", *given, (8,), (-1, "", 0), False, EPOCHS, True) as running:
        for member in range(2):
            running.until_printed(member, "body 8 in 2")
    with job("torch", *given, (), (-1, "", 0), False, EPOCHS, True, slots=1) as running:
        results = running.finish()
        assert "training goes on from a checkpoint" in running.output(0) and "body 0" not in running.output(0), f"{running}"
    judge(tmp_path, results, "a checkpoint", False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_is_smaller_than_the_number_of_ranks(tmp_path: Path, backend: str) -> None:
    run(3, "elastic_fit:small_batches", str(tmp_path), KERAS_BACKEND=backend)


def test_what_is_refused() -> None:
    run(1, "elastic_fit:what_is_refused")


def test_means_of_an_interrupted_epoch() -> None:
    run(1, "elastic_fit:means_of_parts")
