"""How torch's data loaders make their iterators, and how these get batches."""

from collections.abc import Callable
from typing import Any


def iterator_factory(loader: Any) -> Callable[..., Any]:
    """Return the function that makes a data loader's iterator; all versions."""
    factory: Callable[..., Any] = type(loader)._get_iterator
    return factory


def set_iterator_factory(loader: Any, factory: Callable[[], Any]) -> None:
    """Let a data loader get its iterators from `factory`; all versions."""
    loader.__dict__["_get_iterator"] = factory


def iterator_methods(iterator: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return how an iterator gets a batch, and begins again with the same workers; all versions."""
    kind = type(iterator)
    return kind._next_data, kind._reset


def set_iterator_methods(iterator: Any, next_data: Callable[..., Any], reset: Callable[..., Any]) -> None:
    """Let a data loader's iterator get batches from `next_data`, and begin again by `reset`; all versions."""
    iterator._next_data, iterator._reset = next_data, reset


def iterator_class() -> type[Any]:
    """Return the class of all iterators of data loaders, which are made with their loader; all versions."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    return _BaseDataLoaderIter


def batches_yielded(iterator: Any) -> int:
    """Return how many batches an iterator has given; all versions."""
    return int(iterator._num_yielded)


def dataset_of(iterator: Any) -> Any:
    """Return the dataset that an iterator reads; all versions."""
    return iterator._dataset


def draws_all_items(sampler: Any) -> bool:
    """Return whether a RandomSampler was made without `num_samples`; all versions."""
    return sampler._num_samples is None


def watch_batches(seen: Callable[[Any], None]) -> None:
    """Call `seen` with every batch that any data loader's iterator gives from now on; all versions."""
    kind = iterator_class()
    give = kind.__next__

    def give_seen(self: Any) -> Any:
        batch = give(self)
        seen(batch)
        return batch

    setattr(kind, "__next__", give_seen)  # noqa: B010  (a method, for mypy)
