"""Convert between our messages and Flower's records, without trusting the network.

Flower sends every array of a message with requests of its own. So the tensors of a field travel as
one flat array per dtype. The record `HEAD` holds their layout and all other entries of a message.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, ConfigRecordValues, RecordDict
from torch import Tensor, nn

from torchpisa.federated.algorithms.base import Fields, Message, Tensors
from torchpisa.federated.clients.objective import trainable

__all__ = [
    "DTYPES",
    "HEAD",
    "OversizeError",
    "PayloadError",
    "array_bytes",
    "arrays",
    "arrays_of",
    "check_size",
    "fingerprint",
    "load_arrays",
    "read_entry",
    "read_fields",
    "read_head",
    "read_numbers",
    "size_limit",
    "tensors_of",
    "to_records",
]

HEAD = "torchpisa"
"""The record that says what a message is about."""

_LAYOUT, _NUMBER = "layout.", "number."

DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
"""The dtypes of weights, by the name that Flower's arrays have for them."""

Layout = list[tuple[str, str, list[int]]]
"""Name, dtype and shape of each tensor of a field."""


class PayloadError(ValueError):
    """Raised for a message that cannot be used."""


class OversizeError(PayloadError):
    """Raised for a message that is too large, before it is read."""


def arrays(model: nn.Module) -> ArrayRecord:
    """Return the trained parameters of a model: `initial_arrays` of `FederatedStrategy.start`."""
    return arrays_of(trainable(model))


def load_arrays(model: nn.Module, record: ArrayRecord) -> nn.Module:
    """Copy arrays into the parameters of a model, for an `evaluate_fn`, and return the model."""
    values = tensors_of(record)
    _check_layout(_layout(values), trainable(model))
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)
    return model


def arrays_of(tensors: Tensors) -> ArrayRecord:
    """Return tensors by name as a record with one of Flower's arrays each."""
    _layout(tensors)  # checks the dtypes
    return ArrayRecord({name: Array(_numpy(tensor)) for name, tensor in tensors.items()})


def tensors_of(record: ArrayRecord) -> Tensors:
    """Return the tensors of a record that `arrays_of` made."""
    return dict(record.to_torch_state_dict())


def to_records(message: Message, about: Mapping[str, str | int]) -> RecordDict:
    """Return a message of an algorithm as the content of one of Flower's.

    Args:
        message: tensors and numbers.
        about: further entries of the head.
    """
    head: dict[str, ConfigRecordValues] = dict(about)
    head |= {_NUMBER + name: float(value) for name, value in message.numbers.items()}
    head |= {_LAYOUT + kind: json.dumps(_layout(t)) for kind, t in message.tensors.items()}
    content = RecordDict({kind: _flat(tensors) for kind, tensors in message.tensors.items()})
    content[HEAD] = ConfigRecord(head)
    return content


def _layout(tensors: Tensors) -> Layout:
    layout = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise TypeError(f"{name!r} must be one of {', '.join(DTYPES)}, got {dtype}")
        layout.append((name, dtype, list(tensor.shape)))
    return layout


def _flat(tensors: Tensors) -> ArrayRecord:
    parts: dict[str, list[Tensor]] = {}
    for name, dtype, _ in _layout(tensors):
        parts.setdefault(dtype, []).append(tensors[name].detach().flatten())
    return ArrayRecord({dtype: Array(_numpy(torch.cat(part))) for dtype, part in parts.items()})


def _numpy(tensor: Tensor) -> "np.ndarray[Any, Any]":
    return tensor.detach().cpu().contiguous().numpy()


_SLACK = 64 * 1024
"""Bytes that a message may have beside tensors and layouts."""


def size_limit(like: Message) -> int:
    """Return the largest number of bytes that a message shaped like `like` may have."""
    return 2 * like.bytes + _layout_limit(like) + 1024 * 1024


def _layout_limit(like: Message) -> int:
    return 2 * sum(len(json.dumps(_layout(t))) for t in like.tensors.values()) + _SLACK


def check_size(content: RecordDict, like: Message) -> None:
    """Raise OversizeError, before reading it, if a message is larger than `like` allows."""
    if len(content) > len(like.tensors) + 8:
        raise OversizeError(f"a message must have few records, got {len(content)}")
    counts = [len(cast(Sized, record)) for record in content.values()]
    if max(counts, default=0) > 1000:
        raise OversizeError(f"a record must have few entries, got {max(counts)}")
    size = array_bytes(content)
    allowed = like.bytes + _SLACK
    if size > allowed:
        raise OversizeError(f"arrays must have {like.bytes} bytes, got {size}")
    texts = sum(
        _byte_count(v) for record in content.config_records.values() for v in record.values()
    )
    texts += sum(
        _byte_count(v) for record in content.metric_records.values() for v in record.values()
    )
    if texts > _layout_limit(like):
        raise OversizeError(f"layouts must have at most {_layout_limit(like)} bytes, got {texts}")


def _byte_count(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_byte_count, value)) if isinstance(value, list) else 8


def read_fields(content: RecordDict, like: Fields) -> Fields:
    """Return the tensors of a message, which must match `like` in name, shape and dtype."""
    records = content.array_records
    missing, extra = like.keys() - records.keys(), records.keys() - like.keys()
    if missing or extra:
        raise PayloadError(f"records {_list(missing)} are missing and {_list(extra)} are unknown")
    result = {}
    for kind, tensors in like.items():
        layout = _read_layout(str(read_entry(content, _LAYOUT + kind, str)))
        _check_layout(layout, tensors)
        result[kind] = _unflatten(records[kind], layout)
    return result


def _read_layout(text: str) -> Layout:
    try:
        return [
            (str(name), str(dtype), [int(n) for n in shape])
            for name, dtype, shape in json.loads(text)
        ]
    except (ValueError, TypeError, RecursionError) as error:
        raise PayloadError(f"the layout cannot be read: {error}") from error


def _check_layout(layout: Layout, like: Tensors) -> None:
    names = [name for name, _, _ in layout]
    missing, extra = like.keys() - set(names), set(names) - like.keys()
    if missing or extra:
        raise PayloadError(
            f"parameters {_list(missing)} are missing and {_list(extra)} are not trained "
            "parameters of the model"
        )
    if len(set(names)) != len(names):
        raise PayloadError(f"a parameter is there twice: {_list(names)}")
    for name, dtype, shape in layout:
        if shape != list(like[name].shape):
            raise PayloadError(f"{name!r} must have shape {list(like[name].shape)}, got {shape}")
        if DTYPES.get(dtype) != like[name].dtype:
            raise PayloadError(f"{name!r} must be {like[name].dtype}, got {dtype}")


def _unflatten(record: ArrayRecord, layout: Layout) -> Tensors:
    """Return the tensors in a field, whose layout has been checked."""
    counts: dict[str, int] = {}
    for _, dtype, shape in layout:
        counts[dtype] = counts.get(dtype, 0) + int(np.prod(shape, dtype=np.int64))
    if counts.keys() != record.keys():
        raise PayloadError(f"arrays must be {list(counts)}, got {_list(record)}")
    unread = {dtype: _read_array(record[dtype], dtype, count) for dtype, count in counts.items()}
    result = {}
    for name, dtype, shape in layout:
        count = int(np.prod(shape, dtype=np.int64))
        result[name], unread[dtype] = unread[dtype][:count].reshape(shape), unread[dtype][count:]
    return result


def _read_array(array: Array, dtype: str, count: int) -> Tensor:
    """Read an .npy file without trusting its header."""
    stream = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"version {version}")
        shape, _, kind = np.lib.format.read_array_header_1_0(stream)
    except Exception as error:  # the parser of the header raises what it likes
        raise PayloadError(f"the array cannot be read: {error}") from error
    if kind != np.dtype(dtype):  # in the order of its bytes, too
        raise PayloadError(f"the array must be {dtype}, got {kind}")
    payload = array.data[stream.tell() :]
    if shape != (count,) or len(payload) != count * kind.itemsize:
        raise PayloadError(
            f"the array must have {count} entries, got shape {shape} in {len(payload)} bytes"
        )
    return torch.from_numpy(np.frombuffer(bytearray(payload), dtype=kind))


def read_head(content: RecordDict) -> ConfigRecord:
    """Return the head of a message."""
    record = content.config_records.get(HEAD)
    if record is None:
        raise PayloadError(f"record {HEAD!r} is missing")
    return record


def read_entry(content: RecordDict, name: str, kind: type[str] | type[int]) -> str | int:
    """Return an entry of the head of a message."""
    value = read_head(content).get(name)
    if type(value) is not kind:
        raise PayloadError(f"{name!r} must be of type {kind.__name__}, got {value!r}")
    return value


def read_numbers(content: RecordDict) -> dict[str, float]:
    """Return the numbers of a message."""
    numbers = {}
    for name, value in read_head(content).items():
        if not name.startswith(_NUMBER):
            continue
        if not isinstance(value, (int, float)):
            raise PayloadError(f"{name!r} must be a number, got {value!r}")
        numbers[name.removeprefix(_NUMBER)] = float(value)
    return numbers


def fingerprint(public_key: bytes) -> str:
    """Return a short name for the public key of a node."""
    return hashlib.sha256(public_key).hexdigest()


def array_bytes(content: RecordDict) -> int:
    """Return the bytes of all arrays of a message, expected or not."""
    records = content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def _list(names: Any) -> str:
    shown = sorted(map(str, names))
    return f"{shown}" if len(shown) <= 5 else f"{shown[:5]} and {len(shown) - 5} more"
