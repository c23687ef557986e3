"""The safetensors format, without its library: a JSON header and the tensors one after the other.

Files are mapped into memory, so that a rank reads only its own rows of a table and an export holds one part at a time.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def create(path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Makes a file for tensors of these types and shapes.

    Returns:
        The tensors, whose memory is the file.

    Raises:
        ValueError: If the format has no name for a type.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wide types first: then every tensor is aligned, and there is no hole.
    for name, (dtype, shape) in sorted(entries.items(), key=lambda entry: (-entry[1][0].itemsize, entry[0])):
        if dtype not in _NAMES:
            raise ValueError(f"{name} is of {dtype}, which the safetensors format does not have")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return map_tensors(path, shared=True)


def map_tensors(path: Path, shared: bool = False) -> dict[str, Tensor]:
    """Tensors of a file, mapped into memory.

    Args:
        path: The file.
        shared: Whether writing to the tensors writes to the file.

    Raises:
        ValueError: If it is not a whole safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from None
    header.pop("__metadata__", None)
    if max((entry["data_offsets"][1] for entry in header.values()), default=0) > size - 8 - length:
        raise ValueError(f"{path} is shorter than its header says: it was not written to the end")
    data = torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)[8 + length :]
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        part, dtype = data[start:end], _TYPES[entry["dtype"]]
        # Other writers may not align.
        aligned = shared or part.data_ptr() % dtype.itemsize == 0
        tensors[name] = (part if aligned else part.clone()).view(dtype).view(entry["shape"])
    return tensors


class SafetensorsReader(StorageReader):
    """Lets ``torch.distributed.checkpoint`` load from such a file.

    Args:
        path: The file.
        prefix: Put before the names in it.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.tensors = {f"{prefix}{name}": tensor for name, tensor in map_tensors(path).items()}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to do."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """One chunk for every tensor."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=tensor.size(),
                    chunks=[ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())],
                )
                for name, tensor in self.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what was asked for."""
        for item in plan.items:
            part = self.tensors[item.storage_index.fqn]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is the name of such a file."""
        return str(checkpoint_id).endswith(".safetensors")
