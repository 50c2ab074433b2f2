"""What a newcomer finds by completion, by `help`, and by names of other packages."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import hvdlite

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", ["hvdlite", "hvdlite_torch", "hvdlite_tf"])
def test_completion_shows_public_names_only(name: str) -> None:
    pytest.importorskip({"hvdlite": "numpy", "hvdlite_torch": "torch", "hvdlite_tf": "tensorflow"}[name])
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module)) <= {*module.__all__, "elastic"}


@pytest.mark.parametrize(("name", "right"), [("torch", "hvdlite_torch"), ("tensorflow", "hvdlite_tf"),
                                             ("keras", "hvdlite_tf.keras")])
def test_an_import_that_is_spelled_as_horovods_is_told_the_right_name(name: str, right: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"import {right} as hvd"):
        importlib.import_module(f"hvdlite.{name}")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'hvdlite\.nosuch'"):
        importlib.import_module("hvdlite.nosuch")


def test_a_name_of_another_frontend_leads_to_it() -> None:
    with pytest.raises(AttributeError, match="for PyTorch import hvdlite_torch as hvd"):
        hvdlite.broadcast_parameters  # noqa: B018
    with pytest.raises(AttributeError, match=r"'_nothing'$"):
        hvdlite._nothing  # noqa: B018


def test_a_frontend_without_its_framework_says_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import hvdlite_torch as hvd; hvd.allreduce"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.stderr.endswith("ImportError: hvdlite_torch.allreduce needs torch: pip install 'hvdlite[torch]'\n")


def test_signatures_show_no_internal_arguments_and_a_wrapped_optimizer_has_its_methods() -> None:
    pytest.importorskip("torch")
    import hvdlite_torch as hvd
    from hvdlite_torch.optimizer import distributed_optimizer

    for shown in (hvd.DistributedOptimizer, hvd.MirroredStrategy):
        names = list(inspect.signature(shown).parameters)
        assert len(names) > 5 and not any(name.startswith("_") for name in names)
    wrapped = typing.get_type_hints(hvd.DistributedOptimizer, vars(distributed_optimizer))["return"]
    for method in ("synchronize", "no_sync", "set_weight", "step", "consolidate_state_dict", "synchronize_outer"):
        assert method in dir(wrapped)
