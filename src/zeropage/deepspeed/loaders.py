"""Data loaders: what `engine.deepspeed_io` makes, and one that never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zeropage.deepspeed import comm

__all__ = ["RepeatingLoader", "data_loader"]

_T = TypeVar("_T")


class RepeatingLoader(Generic[_T]):
    """Begins `loader` anew whenever it ends; a sampler that shuffles by epoch is told the next one."""

    def __init__(self, loader: Iterable[_T]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)
        self._epoch = 0

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        try:
            return next(self.data_iter)
        except StopIteration:
            self._epoch += 1
            if isinstance(self.loader, DataLoader) and isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(self._epoch)
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def data_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool,
    sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """A loader of this rank's share: a `DistributedSampler` deals the samples out, unless another one is given."""
    if not isinstance(dataset, IterableDataset) and sampler is None:
        sampler = DistributedSampler(
            dataset, num_replicas=comm.get_world_size(), rank=comm.get_rank(), shuffle=shuffle, drop_last=drop_last
        )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        drop_last=drop_last,
    )
