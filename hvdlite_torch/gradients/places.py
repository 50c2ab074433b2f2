"""Places of learned buckets in torch: where a gradient is copied, which tensor the result is, and who else uses memory.

| incoming gradient | fill | result |
|---|---|---|
| the place's own view (`zero_grad(set_to_none=False)`) | - | the view |
| any other that fits, and that nobody else uses | copied | the view |
| it has another user (1), is cast (compression), or views are off (2) | copied, cast | *target*: it is copied back into it |
| sparse, to be densified | `to_dense`, copied | `to_sparse` |
| other dtype, shape or memory; or the place has another user (3) | does not fit | the bucket breaks |
| none | filled with the operation's identity | the old gradient (4); the view, or new memory for a target |

(1) A flat buffer or a list of the script's, or a graph (`create_graph`). (2) By the knob, in an old torch, or because the
script has kept one over a round. (3) A view that was kept, a slice of it, its NumPy array. (4) One that does not count is
the target; where it lies in the place, it is cloned before, unless the script uses it, too: then the place is in use.

A gradient is *fresh* when it has never been written to, or has as many users as one that nobody else uses: references of
Python's and torch's to the tensor and to its storage. (A share of a `torch.cat` is fresh, but its storage has other users.)

A small gradient costs more in calls than in copying. So where all small members of a bucket have an ordinary gradient, a few
calls that loop in C handle them together. Any other case goes member by member.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvdlite.core.device import AnyArray, Event
from hvdlite.handoff.buckets import LearnedBucket
from hvdlite.training.gradients.framework import SMALL
from hvdlite_torch.arrays import cuda
from hvdlite_torch.arrays.tensors import contiguous, empty_gradient, gradient_dtype, host_tensor

if TYPE_CHECKING:
    from hvdlite_torch.gradients.torch_gradients import TorchGradients

_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda storage: 0)
"""Return how many tensors share a storage."""
_uses: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda tensor: 0)
"""Return how often torch itself refers to a tensor."""
_storage_of: Callable[[torch.Tensor], int] = getattr(
    torch._C, "_storage_id", lambda tensor: tensor.untyped_storage()._cdata)
"""Return torch's handle of a tensor's storage."""
COUNTS = hasattr(torch._C, "_storage_Use_Count") and hasattr(torch.Tensor, "_use_count")
"""Whether torch can count who uses a tensor; else gradients are never views of buckets."""
_version = operator.attrgetter("_version")
_view_of = operator.attrgetter("view")
_home_of = operator.attrgetter("home")
_target_of = operator.attrgetter("target")
_kind = operator.attrgetter("dtype", "shape", "layout", "requires_grad")
_is_cpu = operator.attrgetter("is_cpu")


def _users(tensors: Sequence[torch.Tensor], storages: Iterable[int]) -> tuple[list[int], list[int], list[int]]:
    """Return how many refer to each storage and to each tensor, which only the caller's sequence has."""
    return list(map(_use_count, storages)), list(map(sys.getrefcount, tensors)), list(map(_uses, tensors))


def _users_at(tensors: Sequence[torch.Tensor], index: int) -> tuple[int, int, int]:
    """Like `_users`, of one in the sequence: for few, maps cost more than they save."""
    return (_use_count(tensors[index].untyped_storage()._cdata), sys.getrefcount(tensors[index]), _uses(tensors[index]))


_FRESH = _users_at([torch.empty(1)], 0)
"""The users of a tensor that nobody else uses."""


def has_other(gradients: Sequence[torch.Tensor], index: int, is_own: bool) -> bool:
    """Return whether somebody else uses a gradient, which only the caller's sequence has; of a sparse one any.

    Args:
        is_own: whether the script has made it.
    """
    return bool(is_own or gradients[index]._version) and (
        gradients[index].layout is not torch.strided or _users_at(gradients, index) != _FRESH)


class Place:
    """A place in a bucket.

    `home` never leaves the adapter. Parameters get a view of the same memory as their gradient, so users can do anything to
    it. While anybody else uses the view, or anything that shares its memory, the place is in use; else the next round's
    gradient is the same tensor, because making 2,000 of them costs a millisecond and garbage collections.
    """

    __slots__ = ("_idle", "address", "context", "dtype", "home", "shape", "shows_view", "storage", "target", "view")

    def __init__(self, home: torch.Tensor, context: Any, shows_view: bool) -> None:
        self.home = home
        self.context = context  # what the compressor needs to undo its work; None: nothing is compressed
        self.shows_view = shows_view  # a fresh gradient comes back as the view
        self.address = home.data_ptr()
        self.dtype = home.dtype
        self.shape = home.shape
        self.storage: int = home.untyped_storage()._cdata  # torch's handle of the memory, which is the place alone
        self.target: torch.Tensor | None = None  # in this round
        self._make_view()

    def current_view(self) -> torch.Tensor:
        """Return the view; another one if somebody gave it other memory."""
        if self.view.data_ptr() != self.address:
            self._make_view()
        return self.view

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
        self.current_view()
        return self.has_users_beside(0)

    def has_users_beside(self, references: int) -> bool:
        """Return whether there are other users of the memory than so many references to the view."""
        return (_use_count(self.storage), sys.getrefcount(self.view) - references, _uses(self.view)) != self._idle

    def _make_view(self) -> None:
        self.view = self.home.detach()  # what parameters get
        self._idle = _use_count(self.storage), sys.getrefcount(self.view), _uses(self.view)


_set_target: Callable[[Place, torch.Tensor | None], None] = vars(Place)["target"].__set__


class TorchPlaces:
    """The places of one bucket in host memory; see `training.gradients.framework.Places`."""

    _is_on_gpu = False  # where the places are

    def __init__(self, gradients: TorchGradients, bucket: LearnedBucket, parameters: Sequence[torch.Tensor]) -> None:
        self.gradients = gradients
        self.parameters = parameters
        self.places: list[Place] = []
        for index, parameter in enumerate(parameters):
            context = gradients.wire(parameter)[1]
            shows_view = gradients.shows_view(parameter, context)
            self.places.append(Place(self._tensor(bucket.logical(index)), context, shows_view))
        self.small: Sequence[int] = [  # a GPU copies many gradients as fast as one
            index for index, place in enumerate(self.places) if self._is_on_gpu or place.home.nbytes <= SMALL]
        self._has_targets = False  # there have been some
        self._has_kept_views = False  # gradients were views of their places already, which the script may move until the end
        # Results are views of all places, or copies of all; small gradients may be handled in a few calls.
        self._is_plain = (gradients.casts and not gradients.sparse_as_dense
                          and len({(place.context is None, place.shows_view) for place in self.places}) == 1
                          and all(cuda.is_on_gpu(parameter) is self._is_on_gpu for parameter in parameters))
        small = [self.places[place] for place in self.small]
        self._together = _SmallPlaces(small, self._changes) if self._is_plain and len(small) > 1 else None

    def fill(self, places: Sequence[int], gradients: Sequence[torch.Tensor], is_own: bool) -> bool:
        if (places is self.small and self._together is not None and gradients[0] is not None
                and self._belongs(self._together.places[0], gradients[0])):
            targets = self._together.fill(gradients, is_own, self._copy_in)
            if targets is not None:
                self._has_kept_views = self._has_kept_views or gradients[0] is self._together.places[0].view
                self._aim(self._together.places, targets)
                return True
        chosen, kept, homes, values, all_fit = [], [], [], [], True
        for position, index in enumerate(places):
            if gradients[position] is None:
                return False
            is_used = has_other(gradients, position, is_own)  # before anything here refers to it
            place, gradient = self.places[index], gradients[position]
            if place.context is None and place.holds(gradient):
                value, target, self._has_kept_views = (place.home if self._changes else None), None, True
            else:
                value = self._fitting(place, self.parameters[index], gradient)
                target = gradient if self._is_target(place, gradient, is_used) else None
                all_fit = all_fit and value is not None  # go on: all gradients that were kept are to be known at once
            if value is not None:
                homes.append(place.home)
                values.append(value)
            chosen.append(place)
            kept.append(target)
            self._has_targets = self._has_targets or target is not None
        if all_fit and homes:
            self._copy_in(homes, values)
        if all_fit and self._has_targets:
            self._aim(chosen, kept)
        return all_fit

    def vacate(self, place: int, held: list[torch.Tensor]) -> None:
        at = self.places[place]
        if at.holds(held[0]) and not at.has_users_beside(1):  # else it stays the script's, and the place is in use
            held[0] = held[0].clone()

    def blank(self, place: int, value: Any, old: torch.Tensor | None) -> bool:
        at, parameter = self.places[place], self.parameters[place]
        if not (self._is_free(at, parameter) and self._suits(at, parameter)):
            return False
        with torch.no_grad():
            at.home.fill_(value)
        if parameter.is_cuda != at.home.is_cuda:
            old = empty_gradient(parameter)
        wanted = gradient_dtype(parameter), parameter.shape, torch.strided
        self._aim([at], [None if old is None or (old.dtype, old.shape, old.layout) != wanted else old])
        return True

    def filled(self) -> Event | None:
        return None

    def take_back(self, places: Sequence[int]) -> Sequence[torch.Tensor]:
        return self.results(places)

    @torch.no_grad()
    def results(self, places: Sequence[int] | None) -> Sequence[torch.Tensor]:
        chosen = self.places if places is None else [self.places[place] for place in places]
        if self._is_plain:
            if not self._has_targets and self.places[0].shows_view:
                return [place.current_view() for place in chosen] if self._has_kept_views else list(map(_view_of, chosen))
            targets = list(map(_target_of, chosen))
            if targets and all(map(operator.is_not, targets, itertools.repeat(None))):
                self._copy(targets, list(map(_home_of, chosen)))
                self._outlive_copy(targets)
                self._aim(chosen, [None] * len(chosen))
                return targets
        return self._results_one_by_one(range(len(self.places)) if places is None else places)

    def _results_one_by_one(self, places: Sequence[int]) -> Sequence[torch.Tensor]:
        homes, targets, results = [], [], list[torch.Tensor]()
        decompress = self.gradients.compression.decompress
        for index in places:
            place, parameter = self.places[index], self.parameters[index]
            target, place.target = place.target, None
            if sparse_dims := self.gradients.restored_dims(parameter):
                results.append(decompress(place.home, place.context).to_sparse(sparse_dims))
            elif target is None and place.shows_view:
                results.append(place.current_view())
            else:
                results.append(empty_gradient(parameter) if target is None else target)
                targets.append(results[-1])
                homes.append(place.home if self.gradients.casts else decompress(place.home, place.context))
        if homes:
            self._copy(targets, homes)
            self._outlive_copy(targets)
        return results

    def from_row_major(self, place: int, values: AnyArray) -> None:
        assert isinstance(values, np.ndarray)
        self.places[place].home.copy_(host_tensor(values))

    def _tensor(self, place: AnyArray) -> torch.Tensor:
        assert isinstance(place, np.ndarray)
        return host_tensor(place)

    def _aim(self, places: Sequence[Place], targets: Sequence[torch.Tensor | None]) -> None:
        """The results are to be copied to these tensors, if there are any."""
        if self._has_targets or any(map(operator.is_not, targets, itertools.repeat(None))):
            self._has_targets = True
            deque(map(_set_target, places, targets), maxlen=0)

    @property
    def _changes(self) -> bool:
        """Whether gradients are changed when they are copied in, so that those that lie there already are changed, too."""
        return False

    def _copy_in(self, homes: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Copy gradients into their places."""
        self._copy(homes, values)
        self._outlive_copy(values)

    def _copy(self, homes: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        if len(homes) == 1:
            homes[0].copy_(values[0])
        else:
            torch._foreach_copy_(homes, values)

    def _outlive_copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """On a GPU: keep the memory of tensors until they are copied."""

    def _is_free(self, place: Place, parameter: torch.Tensor) -> bool:
        """Return whether a place can be written to."""
        if not place.is_in_use:
            return True
        self.gradients.was_kept(parameter)
        return False

    def _suits(self, place: Place, parameter: torch.Tensor) -> bool:
        """Return whether a place is right for the parameter as it is now, which has no gradient."""
        dtype = gradient_dtype(parameter)
        if not self.gradients.casts:
            dtype, place.context = self.gradients.wire(parameter)
        return (dtype is self._fitting_dtype(place) and parameter.shape == place.shape
                and self._belongs(place, parameter))

    def _fitting_dtype(self, place: Place) -> torch.dtype:
        """Return the dtype of what can be copied into a place; where a copy does not cast, of what has been compressed."""
        return place.context if self.gradients.casts and place.context is not None else place.dtype

    def _fitting(self, place: Place, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return what is to be copied, and cast, into a place; None when it does not fit."""
        if not (self._is_free(place, parameter) and self._belongs(place, gradient)):
            return None
        if gradient.layout is not torch.strided:
            densified = self.gradients.densified(parameter, gradient)
            if densified is None:
                return None
            gradient = contiguous(densified, "gradient")
        gradient = gradient.detach() if gradient.requires_grad else gradient
        if not self.gradients.casts:
            gradient, place.context = self.gradients.compression.compress(gradient)
        return gradient if gradient.dtype is self._fitting_dtype(place) and gradient.shape == place.shape else None

    def _is_target(self, place: Place, gradient: torch.Tensor, is_used: bool) -> bool:
        """Return whether the result is to be copied back into a gradient that has been copied into its place."""
        return (gradient.layout is torch.strided
                and (is_used or not place.shows_view or gradient.requires_grad or gradient.is_cuda != place.home.is_cuda))

    def _belongs(self, place: Place, tensor: torch.Tensor) -> bool:
        """Return whether a gradient like `tensor` is reduced in this memory: models are moved."""
        return not self.gradients.has_plane_for(place.dtype) or not cuda.is_on_gpu(tensor)


class _SmallPlaces:
    """The small places of a bucket, of which `fill` and `results` handle all at once.

    What is constant is listed once; what has to be looked at in every round is compared as a list.

    Args:
        changes: whether gradients are changed when they are copied in, also those that lie there already.
    """

    def __init__(self, places: Sequence[Place], changes: bool) -> None:
        self.places = places
        self._changes = changes
        self._shows_views = places[0].shows_view
        self._homes = [place.home for place in places]
        self._addresses = [place.address for place in places]
        self._storages = [place.storage for place in places]
        dtypes = [place.dtype if place.context is None else place.context for place in places]
        self._kinds = [(dtype, place.shape, torch.strided, False) for dtype, place in zip(dtypes, places, strict=True)]
        self._are_cpu = list(map(_is_cpu, self._homes))
        self._idle = _users(self._views(), self._storages)
        fresh = [torch.empty(1)]  # autograd writes to copies that it makes for parameters, so versions are not enough
        self._fresh = tuple(users * len(places) for users in _users(fresh, map(_storage_of, fresh)))
        self._no_targets: list[torch.Tensor | None] = [None] * len(places)

    def fill(self, gradients: Sequence[torch.Tensor], is_own: bool,
             copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None]) -> Sequence[torch.Tensor | None] | None:
        """Like `TorchPlaces.fill`; return the targets.

        Return None, and change nothing, when a gradient or a place is not an ordinary one.

        Args:
            copy: copies gradients into places.
        """
        views = self._views() if self._shows_views else []  # else scripts never get them
        try:
            if list(map(_kind, gradients)) != self._kinds:
                return None
        except AttributeError:  # of None
            return None
        if torch.cuda.is_initialized() and list(map(_is_cpu, gradients)) != self._are_cpu:
            return None
        targets: Sequence[torch.Tensor | None] = self._no_targets
        if not self._shows_views:
            targets = gradients
        elif gradients[0] is views[0]:
            if not (all(map(operator.is_, gradients, views)) and self._have_addresses(gradients)):
                return None
            if self._changes:
                copy(self._homes, self._homes)
            return targets
        elif ((is_own or any(map(_version, gradients)))
                and _users(gradients, map(_storage_of, gradients)) != self._fresh):
            targets = [gradients[index] if has_other(gradients, index, is_own) else None for index in range(len(gradients))]
        if self._shows_views and (_users(views, self._storages) != self._idle or not self._have_addresses(views)):
            return None
        with torch.no_grad():
            copy(self._homes, list(gradients))
        return targets

    def _views(self) -> list[torch.Tensor]:
        return list(map(_view_of, self.places))

    def _have_addresses(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors lie in the places."""
        return list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
