"""Bucket views: torch tensors over the places of learned buckets, and the copies into and out of them.

A small gradient costs more in calls than in copying. So where a bucket's small members all have an ordinary gradient, a
`BucketViewBatch` handles them together, in a few calls that loop in C. Any other case goes member by member.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvdlite_torch.unfinal import get_grad, set_grad

_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda storage: 0)
"""Return how many tensors share a storage."""
_uses: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda tensor: 0)
"""Return how often torch itself refers to a tensor."""
COUNTS = hasattr(torch._C, "_storage_Use_Count") and hasattr(torch.Tensor, "_use_count")
"""Whether torch can tell who uses a tensor; else gradients are never views of buckets."""
_kind = operator.attrgetter("dtype", "shape", "layout")
_version = operator.attrgetter("_version")


class Mark:
    """Identifies a reduced gradient without keeping it alive."""

    __slots__ = ("tensor", "version")

    def __init__(self, gradient: torch.Tensor) -> None:
        self.tensor = weakref.ref(gradient)
        self.version: int = gradient._version  # torch counts how often a tensor is written to


class BucketView:
    """A tensor over a place in a bucket.

    `home` never leaves the adapter. Parameters get a view of the same memory as their gradient, so users can do anything to
    it. While anybody else uses the view, or anything that shares its memory, the view `is_in_use`; else the next round's
    gradient is the same tensor, because making 2,000 of them costs a millisecond and garbage collections.

    Attributes:
        view: what parameters get.
        mark: identifies the view.
        storage: torch's handle of the memory, which is the place alone.
        context: what the compressor needs to undo its work; None when nothing is compressed.
        dtype: of gradients that fit.
        copy: memory for the gradient when it is not a view, made when it is first needed.
    """

    __slots__ = ("_idle", "address", "context", "copy", "dtype", "home", "mark", "on_gpu", "shape", "storage", "view")

    def __init__(self, home: torch.Tensor, context: Any, *, on_gpu: bool = False) -> None:
        self.home, self.context, self.on_gpu = home, context, on_gpu
        self.address, self.dtype, self.shape = home.data_ptr(), home.dtype, home.shape
        self.copy: BucketView | None = None
        self.storage = home.untyped_storage()._cdata
        self._make_view()

    def give_to(self, parameter: torch.Tensor) -> Mark:
        """Make the view the parameter's gradient; return its mark."""
        if self.view.data_ptr() != self.address:  # somebody gave it other memory
            self._make_view()
        set_grad(parameter, self.view)
        self.mark.version = self.view._version
        return self.mark

    def private_copy(self, parameter: torch.Tensor) -> BucketView:
        """Return memory like the parameter's for its gradient, which nobody uses: the same in every round, if possible."""
        if self.copy is None or self.copy.is_in_use:
            self.copy = BucketView(torch.empty_like(parameter.detach()), None, on_gpu=self.on_gpu)
        return self.copy

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is the view, unchanged."""
        return tensor is self.view and tensor.data_ptr() == self.address and tensor.dtype is self.dtype

    @property
    def is_in_use(self) -> bool:
        """Whether somebody else uses the memory: the view, a slice of it, its NumPy array, an autograd graph.

        Or `home` has other memory now, because the view was moved (`share_memory_()`).
        """
        if self.home.data_ptr() != self.address:
            return True
        if self.view.data_ptr() != self.address:
            self._make_view()
        return (_use_count(self.storage), sys.getrefcount(self.view), _uses(self.view)) != self._idle

    def _make_view(self) -> None:
        self.view = self.home.detach()
        self.mark = Mark(self.view)
        self._idle = _use_count(self.storage), sys.getrefcount(self.view), _uses(self.view)


_view_of = operator.attrgetter("view")
_mark_of = operator.attrgetter("mark")
_set_version: Callable[[Mark, int], None] = vars(Mark)["version"].__set__


class BucketViewBatch(list[tuple[torch.Tensor, BucketView]]):
    """Members of a bucket in host memory with new bucket views, of which `fill` and `install` handle all at once.

    What is constant is listed once; what has to be looked at in every round is compared as a list. When gradients are
    compressed, all of them are: then parameters get private copies, which are kept, instead of views of the places.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, BucketView]]) -> None:
        super().__init__(pairs)
        self._parameters = [parameter for parameter, _ in self]
        # The bucket views whose views parameters get: in the places, or private copies.
        self._shown = [view if view.context is None else view.private_copy(parameter) for parameter, view in self]
        self._places = [view.home for _, view in self]
        self._is_cast = any(view.context is not None for _, view in self)
        self._homes = [view.home for view in self._shown]
        self._addresses = [view.address for view in self._shown]
        self._storages = [view.storage for view in self._shown]
        self._kinds = [(view.dtype, view.shape, torch.strided) for view in self._shown]
        self._idle = self._users(self._views())
        self._is_unseen = False  # nobody can have given a view other memory

    def fill(self) -> bool:
        """Copy all gradients into their bucket views, unless all lie there already; the parameters have none afterwards.

        Return False, and change nothing, when a gradient is missing or does not fit, or a view is in use.
        """
        gradients, views = list(map(get_grad, self._parameters)), self._views()
        self._is_unseen = False
        try:
            if list(map(_kind, gradients)) != self._kinds:
                return False
        except AttributeError:  # of None
            return False
        if self._is_cast:
            with torch.no_grad():
                torch._foreach_copy_(self._places, gradients)
        elif gradients[0] is self._shown[0].view:
            if not (all(map(operator.is_, gradients, views)) and self._have_addresses(gradients)):
                return False
        elif self._users(views) == self._idle and self._have_addresses(views):
            with torch.no_grad():
                torch._foreach_copy_(self._homes, gradients)
            self._is_unseen = True
        else:
            return False
        _all(map(set_grad, self._parameters, itertools.repeat(None)))
        return True

    def install(self) -> list[Mark] | None:
        """Make the views the parameters' gradients; return their marks.

        Return None when that has to be done one by one: somebody gave a view other memory, uses a private copy, or has moved
        a parameter to a GPU.
        """
        views = self._views()
        if self._is_cast:
            if not (self._users(views) == self._idle and self._have_addresses(views)):
                return None
            torch._foreach_copy_(self._homes, self._places)
        elif not (self._is_unseen or self._have_addresses(views)):
            return None
        self._is_unseen = False
        marks = list(map(_mark_of, self._shown))
        try:
            _all(map(set_grad, self._parameters, views))
        except RuntimeError:  # a gradient has to be where its parameter is
            return None
        _all(map(_set_version, marks, map(_version, views)))
        return marks

    def _views(self) -> list[torch.Tensor]:
        return list(map(_view_of, self._shown))

    def _users(self, views: list[torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
        """Return how many refer to the bucket views' memory and views, each view as in `BucketView.is_in_use`.

        A view is listed while it is counted, so these numbers are only compared with each other.
        """
        return list(map(_use_count, self._storages)), list(map(sys.getrefcount, views)), list(map(_uses, views))

    def _have_addresses(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether tensors lie in the bucket views' places."""
        return list(map(torch.Tensor.data_ptr, tensors)) == self._addresses


def fill_views(pairs: Sequence[tuple[torch.Tensor, BucketView]],
               fitting: Callable[[torch.Tensor, torch.Tensor, BucketView], torch.Tensor | None],
               copy: Callable[[list[torch.Tensor], list[torch.Tensor]], object]) -> bool:
    """Put gradients into their bucket views; see `training.Framework.fill_all`.

    Args:
        fitting: returns what is to be copied for a parameter's gradient; None when it does not fit its view.
        copy: copies all that is to be copied into the bucket views.
    """
    homes, values, all_fit = [], [], True
    for parameter, view in pairs:
        gradient = get_grad(parameter)
        if gradient is not None and (view.context is not None or not view.holds(gradient)):
            gradient = fitting(parameter, gradient, view)
            if gradient is not None:
                homes.append(view.home)
                values.append(gradient)
        all_fit = all_fit and gradient is not None
    if not all_fit:
        return False
    if homes:
        copy(homes, values)
    for parameter, _ in pairs:
        set_grad(parameter, None)
    return True


def given_to(parameter: torch.Tensor, gradient: torch.Tensor) -> Mark:
    """Make a tensor the parameter's gradient; return its mark."""
    set_grad(parameter, gradient)
    return Mark(gradient)


def _all(calls: Iterable[object]) -> None:
    """Make the calls of a `map`."""
    deque(calls, maxlen=0)
