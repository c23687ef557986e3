"""All weights of a checkpoint in one safetensors file: ``python -m lightning_gem.strategies.export CHECKPOINT FILE``.

One process, without a model. It holds as much in memory as one rank wrote of one tensor. The way back is
``HybridShardedStrategy(weights=FILE)``, to train, validate, test or predict.
"""

import argparse
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_gem.strategies import checkpoint_files as files
from lightning_gem.strategies import safetensors
from lightning_gem.strategies.regions import RegionPlanner

_PREFIX = "model."


def export(checkpoint: Path, file: Path) -> list[str]:
    """Writes the weights of a checkpoint to one file, which appears under its name when it is complete.

    Args:
        checkpoint: Directory that the strategy saved.
        file: File to write; its name ends in ``.safetensors``.

    Returns:
        Names of the tensors, as in the module's ``state_dict()``.

    Raises:
        FileNotFoundError: If there is no checkpoint, or a part of it is missing.
        ValueError: If it is something else, or the file has another ending.
    """
    if file.suffix != ".safetensors":
        raise ValueError(f"{file} must end in .safetensors, by which it is known when it is loaded")
    metadata, _ = files.check(checkpoint)
    saved = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    partial = file.with_name(f".{file.name}.partial")
    entries = {name[len(_PREFIX) :]: (entry.properties.dtype, tuple(entry.size)) for name, entry in saved.items()}
    tensors = safetensors.create(partial, entries)
    regions = {f"{_PREFIX}{name}": [(tensor, (0,) * tensor.dim())] for name, tensor in tensors.items()}
    reader = FileSystemReader(str(checkpoint))
    dcp.load({}, storage_reader=reader, planner=RegionPlanner(regions), no_dist=True)
    files.flush(partial)
    partial.rename(file)
    return sorted(tensors)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lightning_gem.strategies.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="directory that hybrid_sharded saved")
    parser.add_argument("file", type=Path, help="file to write, ending in .safetensors")
    options = parser.parse_args(arguments)
    try:
        names = export(options.checkpoint, options.file)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    print(f"{len(names)} tensors, {options.file.stat().st_size:,} bytes: {options.file}")


if __name__ == "__main__":
    main()
