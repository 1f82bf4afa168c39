"""Tensors for tests that run without torch."""

from __future__ import annotations

from typing import Any

import numpy as np


class Tensor:
    """A numpy array that answers like a torch tensor."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = f"torch.{array.dtype}"

    def data_ptr(self) -> int:
        return self.array.__array_interface__["data"][0]

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def permute(self, *dims: int) -> Tensor:
        return Tensor(self.array.transpose(dims))

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index])


def strided(shape: tuple[int, ...], order: tuple[int, ...], dtype: str = "float32") -> np.ndarray[Any, Any]:
    """An array of that shape whose dimensions lie in memory in that order, the outermost first."""
    memory = np.arange(int(np.prod(shape)), dtype=dtype).reshape([shape[dim] for dim in order])
    return memory.transpose(np.argsort(order))
