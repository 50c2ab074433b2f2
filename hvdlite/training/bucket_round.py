"""One round of a gradient set whose buckets are learned: gradients go into their places, full buckets go to the runtime.

A bucket is FILLING until its last member is given, then RUNNING until its handle is done (docs/protocol.md#rounds).
What a gradient costs here is a copy and a count: no lock, no message. The count is an `itertools.count`, whose `next` is
one uninterrupted step, so hooks may come from several autograd threads. Small gradients are copied together when their
bucket is full: for them a call costs more than a copy.

When a gradient does not fit its place any more, its bucket is broken: what lies in places becomes the parameters' own
gradients again, every member goes by itself, and the layout is marked stale on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Generic

from hvdlite.core.array import SUPPORTED_DTYPES, Array, identity
from hvdlite.core.device import CPU
from hvdlite.core.errors import HvdliteError
from hvdlite.handoff.buckets import BucketHandle, LearnedBucket, LearnedLayout
from hvdlite.negotiation.messages import BucketReady
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.framework import Framework, Parameter

SMALL = 16 << 10
"""Bytes up to which a gradient waits for its bucket's other small ones."""
Alone = Sequence[tuple[Parameter, bool]]
"""Members that go by themselves, and whether this rank has a gradient for them."""


class BucketViews(Generic[Parameter]):
    """Which parameter sits where in a learned layout; lasts as long as the layout.

    Attributes:
        where: by a parameter's identity: its bucket's index, its index in the bucket, its view, and whether it is small.
        members: by bucket: the parameters and their bucket views, in order.
        small: by bucket: those of them whose gradients are copied together.
        small_keys: by bucket: their identities.
        small_indices: by bucket: their indices in the bucket.
    """

    def __init__(self, learned: LearnedLayout, framework: Framework[Parameter], parameters: Mapping[str, Parameter]) -> None:
        self.learned = learned
        self.where: dict[int, tuple[int, int, Any, bool]] = {}
        self.members: list[Sequence[tuple[Parameter, Any]]] = []
        self.small: list[Sequence[tuple[Parameter, Any]]] = []
        self.small_keys: list[frozenset[int]] = []
        self.small_indices: list[list[int]] = []
        for bucket_index, bucket in enumerate(learned.buckets):
            viewed, small, indices = [], [], []
            at_once = bucket.definition.response.device != CPU  # a GPU copies many gradients as fast as one
            for index, member in enumerate(bucket.definition.members):
                parameter = parameters[member.name]
                view = framework.bucket_view(parameter, bucket.logical(index))
                viewed.append((parameter, view))
                is_small = at_once or bucket.places[index].nbytes <= SMALL
                if is_small:
                    small.append((parameter, view))
                    indices.append(index)
                self.where[id(parameter)] = (bucket_index, index, view, is_small)
            self.members.append(framework.batch(viewed))
            self.small_indices.append(indices)
            self.small_keys.append(frozenset(id(parameter) for parameter, _ in small))
            self.small.append(self.members[-1] if len(small) == len(viewed) else framework.batch(small))

    @classmethod
    def of(cls, learned: LearnedLayout, framework: Framework[Parameter],
           parameters: Mapping[str, Parameter]) -> BucketViews[Parameter] | None:
        """Return the bucket_views, or None when the layout does not describe these parameters."""
        members = {member.name: member for bucket in learned.buckets for member in bucket.definition.members}
        if members.keys() != parameters.keys():
            return None
        for name, member in members.items():
            now = framework.shape(parameters[name])
            if (now.dtype, now.shape) != (member.dtype, member.shape) or member.strides not in ((), now.strides):
                return None
        return cls(learned, framework, parameters)


class _Filling:
    """One bucket in one round."""

    __slots__ = ("broken", "bucket", "count", "handle", "has_small", "later", "missing", "present", "size")

    def __init__(self, bucket: LearnedBucket) -> None:
        self.bucket = bucket
        self.size = len(bucket.definition.members)
        self.count = itertools.count(1)
        self.present: list[int] = []  # members that lie in their places
        self.later: list[int] = []  # small members with a gradient that is not in its place yet
        self.missing: list[int] = []
        self.has_small = False  # a small member was given
        self.broken = False
        self.handle: BucketHandle | None = None


class BucketRound(Generic[Parameter]):
    """Fills the buckets of one round.

    Args:
        round_id: of the round.
        step: how many steps the optimizer has made.
        closes: whether the round is over when all buckets are reported: no member goes by itself.

    Attributes:
        bucket_views: see above.
        detached: parameters whose reduced gradient was moved out of its place, because they are missing, and new marks.
        gathered: after `wait`: members for which another rank had a sparse gradient, and all ranks' rows.
        contributors: after `wait`: members that were answered one by one, and the ranks that contributed to each.
        partly_unused: after `wait`: members of whole buckets to which some ranks did not contribute.
        behind: after `wait`: ranks that reported a bucket from within their step, while others had not.
    """

    def __init__(self, runtime: Runtime, framework: Framework[Parameter], bucket_views: BucketViews[Parameter],
                 round_id: int, step: int, *, closes: bool) -> None:
        self.gathered: list[tuple[Parameter, Array]] = []
        self.contributors: list[tuple[Parameter, Sequence[int]]] = []
        self.partly_unused: list[Parameter] = []
        self.detached: list[tuple[Parameter, Any]] = []
        self.behind: set[int] = set()
        self._step, self._closes = step, closes
        self._runtime, self._framework, self.bucket_views, self._round_id = runtime, framework, bucket_views, round_id
        self._where = bucket_views.where
        self._fillings = [_Filling(bucket) for bucket in bucket_views.learned.buckets]
        self._reported = itertools.count(1)

    def give(self, parameter: Parameter, present: bool, in_step: bool) -> Alone[Parameter]:
        """Put a gradient into its place, or note that there is none; return what has to go by itself instead.

        Args:
            in_step: whether this comes from within the optimizer's step.
        """
        bucket_index, index, view, small = self._where[id(parameter)]
        filling = self._fillings[bucket_index]
        filling.has_small = filling.has_small or small
        if filling.broken:
            return [(parameter, present)]
        if present and small:
            filling.later.append(index)
        elif not present:
            mark = self._framework.detach_view(parameter, view)
            if mark is not None:
                self.detached.append((parameter, mark))
            filling.missing.append(index)
        elif self._framework.fill(parameter, view):
            filling.present.append(index)
        else:
            return [*self._break(bucket_index), (parameter, True)]
        return () if next(filling.count) < filling.size else self._complete(bucket_index, in_step)

    def give_small(self, keys: Set[int], in_step: bool) -> Iterator[tuple[int, Alone[Parameter]]]:
        """Like `give`, for all small members of a bucket together, where all are present.

        Yield the indices of buckets whose small members are given, and what has to go by itself instead.

        Args:
            keys: members that could be given, by identity.
        """
        views = self.bucket_views
        for index, (filling, small_keys) in enumerate(zip(self._fillings, views.small_keys, strict=True)):
            if (not small_keys or filling.has_small or filling.broken or not small_keys <= keys
                    or not self._framework.fill_all(views.small[index])):
                continue
            filling.has_small = True
            filling.present += views.small_indices[index]
            given = next(itertools.islice(filling.count, len(small_keys) - 1, None))
            yield index, () if given < filling.size else self._complete(index, in_step)

    def wait(self, errors: list[HvdliteError], deferrable: bool) -> Iterator[tuple[int, Sequence[tuple[Parameter, Any]],
                                                                                   Sequence[Any]]]:
        """Wait for every bucket; yield its index, the members whose gradients are now the reduced ones, and their marks.

        Raises:
            WaitDeferred: when that is allowed; may be called again then.
        """
        self.gathered.clear()
        self.contributors.clear()
        self.partly_unused.clear()
        for index, (filling, members) in enumerate(zip(self._fillings, self.bucket_views.members, strict=True)):
            if filling.handle is None:
                continue
            try:
                filling.handle.wait(deferrable=deferrable)
            except HvdliteError as error:
                errors.append(error)
                continue
            if filling.handle.completion is not None:
                self._framework.follow(filling.handle.completion)
            self.behind.update(filling.handle.behind)
            reduced = self._reduced(filling, members, errors, deferrable)
            yield index, reduced, self._framework.install_views(reduced)

    def _complete(self, bucket_index: int, in_step: bool) -> Alone[Parameter]:
        """Every member is given: copy the small ones and report the bucket."""
        filling, members = self._fillings[bucket_index], self.bucket_views.members[bucket_index]
        if filling.later:
            small = self.bucket_views.small[bucket_index]
            if not self._framework.fill_all(small if len(filling.later) == len(small)
                                            else [members[index] for index in filling.later]):
                return self._break(bucket_index)
            filling.present += filling.later
            filling.later = []
        if filling.missing:
            response = filling.bucket.definition.response
            neutral = identity(response.op, SUPPORTED_DTYPES[response.dtype])
            if not all(self._framework.fill_with(*members[index], neutral) for index in filling.missing):
                return self._break(bucket_index)
        closes = next(self._reported) == len(self._fillings) and self._closes
        filling.handle = self._runtime.enqueue_bucket(
            filling.bucket,
            BucketReady(bucket_id=filling.bucket.definition.bucket_id, round_id=self._round_id,
                        unused=tuple(sorted(filling.missing)), ends_round=closes, step=self._step, in_step=in_step),
            self._framework.filled(filling.bucket.memory))
        return ()

    def _break(self, bucket_index: int) -> Alone[Parameter]:
        filling, members = self._fillings[bucket_index], self.bucket_views.members[bucket_index]
        filling.broken = True
        self._runtime.mark_stale(self.bucket_views.learned.layout)
        for index in filling.present:
            self._framework.install_view(*members[index])
        return [*((members[index][0], True) for index in (*filling.present, *filling.later)),
                *((members[index][0], False) for index in filling.missing)]

    def _reduced(self, filling: _Filling, members: Sequence[tuple[Parameter, Any]], errors: list[HvdliteError],
                 deferrable: bool) -> Sequence[tuple[Parameter, Any]]:
        """Return the members of a finished bucket that somebody contributed to, and their bucket views."""
        assert filling.handle is not None
        if not filling.handle.parts:
            self.partly_unused += [members[index][0] for index in filling.handle.partly_unused]
            unused = filling.handle.globally_unused
            return members if not unused else [member for index, member in enumerate(members) if index not in unused]
        reduced = []
        for index, part in enumerate(filling.handle.parts):
            try:
                result = part.wait(deferrable=deferrable)
            except HvdliteError as error:
                errors.append(error)
                continue
            self.behind.update(part.behind)
            self.contributors.append((members[index][0], part.contributors))
            if part.completion is not None:
                self._framework.follow(part.completion)
            if result.dtype.name != filling.bucket.definition.members[index].dtype:
                self.gathered.append((members[index][0], result))
            elif part.contributors:
                if not filling.bucket.is_row_major(index):
                    self._framework.copy_from_row_major(members[index][1], result)
                reduced.append(members[index])
        return reduced

