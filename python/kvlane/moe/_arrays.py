"""Arrays in the memory of the host: tensors of torch, or numpy's."""

from __future__ import annotations

from typing import Any


def is_torch(array: Any) -> bool:
    return hasattr(array, "data_ptr")


def as_array(value: Any, label: str, copy: bool = False) -> Any:
    """A tensor of torch or an array of numpy over the same memory; with `copy` over other if it has gaps."""
    if is_torch(value):
        import torch

        if value.device.type != "cpu":
            raise ValueError(f"{label} is on {value.device}, and has to be in the memory of the host")
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{label} requires a gradient, and none flows through kvlane: give {label}.detach()"
            )
        if copy:
            value = value.contiguous()
            value = value.clone() if value.data_ptr() % value.element_size() else value
        if not value.is_contiguous():
            raise ValueError(f"{label} is not contiguous")
        if value.nbytes and not value.data_ptr():
            raise ValueError(
                f"{label} has no memory of its own, as a tensor of several devices: give the local part"
            )
        return value
    import numpy

    if not isinstance(value, numpy.ndarray):
        if not hasattr(value, "__dlpack__"):
            raise ValueError(f"{label} is a {type(value).__name__}, and has to be a tensor or an array")
        value = numpy.from_dlpack(value)
    if value.dtype.hasobject:
        raise ValueError(f"{label} has objects of Python, which mean nothing in another process")
    value = numpy.require(value, requirements=["C", "A"]) if copy else value
    if not (value.flags.c_contiguous and value.flags.aligned):
        raise ValueError(f"{label} is not contiguous")
    return value


def kind_of(array: Any) -> str:
    """The name of its type of element, such as float32."""
    return str(array.dtype).removeprefix("torch.")


def item_bytes(array: Any) -> int:
    return array.element_size() if is_torch(array) else array.itemsize


def memory_of(array: Any) -> tuple[int, int]:
    """Address and bytes."""
    return (array.data_ptr() if is_torch(array) else array.ctypes.data), array.nbytes


def as_int64(ids: Any) -> Any:
    if not kind_of(ids).startswith(("int", "uint")) or kind_of(ids) == "uint64":
        raise ValueError(f"ids are {kind_of(ids)}, and have to be integers of at most 63 bits")
    if is_torch(ids):
        return ids.long()
    return ids.astype("int64", copy=False)


def as_library_of(like: Any, array: Any) -> Any:
    """The same memory as a tensor of torch or an array of numpy, whichever `like` is."""
    if is_torch(like) == is_torch(array):
        return array
    if is_torch(array):
        return array.numpy()
    import torch

    return torch.from_numpy(array)


def empty_like(like: Any, shape: tuple[int, ...]) -> Any:
    if is_torch(like):
        return like.new_empty(shape)
    import numpy

    return numpy.empty(shape, dtype=like.dtype)


def cast_like(like: Any, kind: str) -> tuple[Any, Any]:
    """Memory for rows of fp8, uint8 in numpy, and their scales."""
    tokens, hidden = like.shape
    blocks = hidden // 128
    columns, scale = (blocks // 4, "int32") if kind == "fp8_ue8m0" else (blocks, "float32")
    if is_torch(like):
        import torch

        rows = like.new_empty((tokens, hidden), dtype=torch.float8_e4m3fn)
        return rows, like.new_empty((tokens, columns), dtype=getattr(torch, scale))
    import numpy

    return numpy.empty((tokens, hidden), numpy.uint8), numpy.empty((tokens, columns), scale)


def by_column(array: Any) -> Any:
    """A view of an array [.., n, columns] in memory [.., columns, n], or the other way round."""
    return array.swapaxes(-1, -2)


def zeros_like(like: Any, kind: str, rows: int | None = None) -> Any:
    """Of another type of element, and another number of rows."""
    shape = (like.shape[0] if rows is None else rows, *like.shape[1:])
    if is_torch(like):
        import torch

        return like.new_zeros(shape, dtype=getattr(torch, kind))
    import numpy

    return numpy.zeros(shape, dtype=kind)


def int32_like(like: Any, values: list[int]) -> Any:
    if is_torch(like):
        import torch

        return torch.tensor(values, dtype=torch.int32, device="cpu")
    import numpy

    return numpy.array(values, dtype=numpy.int32)
