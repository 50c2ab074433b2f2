"""What ranks do in test_outer.py with weights that are not finite."""

from __future__ import annotations

import numpy as np

import hvdlite as hvd
from hvdlite import api
from hvdlite.training.outer.settings import DiLoCo
from hvdlite.training.replicas import check_replicas
from tests.training.outer.programs.training import begin, initial, learn, same


def skips_what_is_not_finite() -> None:
    """On all ranks; and the rank whose weights are not finite gets the global ones."""
    hvd.init()
    settings = DiLoCo(2, workers="rank", fragments=1, delay=0)
    arrays = [np.ones(2000, np.float32)]
    outer, _ = begin(settings, arrays, "skips")
    for value in (1.0, np.nan, np.inf, 1.0):
        before, errors = [each.copy() for _, each in outer.global_weights()], outer.state()["fragments"][0]["errors"]
        outer.stepped()
        learned = np.random.default_rng(hvd.rank()).random(2000).astype(np.float32)
        arrays[0] += learned
        if hvd.rank() == 1:
            arrays[0][1500] *= value
        outer.stepped()
        is_left_out = value != 1.0
        assert same([each for _, each in outer.global_weights()], before) == is_left_out
        left = outer.state()["fragments"][0]["errors"]
        assert left is not None and (errors is not None and same(left, errors)) == is_left_out
        assert np.array_equal(arrays[0], before[0]) == (is_left_out and hvd.rank() == 1)
    assert outer.skipped == 2
    outer.check_replicas()
    assert np.isfinite(arrays[0]).all()
    outer.close()


def recovers_in_all_fragments() -> None:
    """A rank with weights that are not finite takes the global ones of all fragments, also of one that is under way."""
    hvd.init()
    for merge in ("carry", 0.5):
        settings = DiLoCo(8, workers="rank", fragments=4, delay=3, merge=merge, wire=None)
        arrays = initial()
        outer, worker = begin(settings, arrays, f"recovers.{merge}")
        for step in range(1, 40):
            learn(worker, step, arrays)
            if step == 15 and hvd.rank() == 1:  # the exchange that is merged at 16 has begun; that merged at 18 begins now
                for each in arrays:
                    each[:] = np.nan
            outer.stepped()
            if step >= 18:
                assert all(np.isfinite(each).all() for each in arrays), step
        assert outer.skipped >= 1
        outer.check_replicas()
        outer.synchronize()
        check_replicas(api.runtime(), [(str(index), each) for index, each in enumerate(arrays)], f"recovered.{merge}")
        outer.close()


def what_is_under_way_replaces_reset_weights() -> None:
    """Rank 1's weights are NaN in fragment 0 while fragment 1 is under way: the merge of that one is no "carry"."""
    hvd.init()
    settings = DiLoCo(8, workers="rank", fragments=2, delay=5, wire=None)
    arrays = [np.zeros(4), np.zeros(4)]
    outer, worker = begin(settings, arrays, "reset")
    for step in range(1, 13):  # fragment 0 is merged at 8, from step 3; fragment 1 at 12, from step 7
        for each in arrays:
            each += worker + 1.0
        if hvd.rank() == 1 and step == 3:
            arrays[0][2] = np.nan
        outer.stepped()
        if step == 10:
            assert [each["is_reset"] for each in outer.state()["fragments"]] == [False, hvd.rank() == 1]
    assert outer.skipped == 1
    if hvd.rank() == 1:
        assert np.array_equal(arrays[1], dict(outer.global_weights())["p1"]), arrays
    outer.close()


def synchronizes_after_a_skip() -> None:
    """All ranks have the global weights afterwards, whenever one of them becomes NaN; the warning comes once."""
    hvd.init()
    for fragments in (1, 2):
        for broken in (8, 11):  # in the step of a merge, and between two
            arrays = initial()
            outer, worker = begin(DiLoCo(8, workers="rank", fragments=fragments, delay=0), arrays, f"{fragments}.{broken}")
            for step in range(1, broken + 1):
                learn(worker, step, arrays)
                if step == broken and hvd.rank() == 1:
                    arrays[0][0] = np.nan
                outer.stepped()
            for _ in range(2):
                outer.synchronize()
                assert outer.skipped == 1
                assert same(arrays, [values for _, values in outer.global_weights()]), (fragments, broken)
                outer.check_replicas()
            outer.close()


def is_said_once() -> None:
    hvd.init()
    arrays = [np.ones(3)]
    outer, _ = begin(DiLoCo(1, workers="rank", fragments=1, delay=0), arrays, "once")
    for _ in range(3):
        arrays[0][0] = np.nan
        outer.stepped()
    assert outer.skipped == 3
    outer.close()
