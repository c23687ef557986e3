"""Criteo's click logs: the Display Advertising Challenge, the 1 TB logs, and files like them."""

import math
from typing import Literal

from lightning_gem.data.cache import atomic_directory, fingerprint
from lightning_gem.data.criteo_convert import CATEGORICAL, LABEL, NUMERIC, Layout, convert
from lightning_gem.data.parquet_source import expand_paths
from lightning_gem.data.parquet_stream import ParquetStream
from lightning_gem.data.schema import DenseFeature, Schema, SparseFeature, Task

# Below 0, then from 0 on, to 2**30.
_BOUNDARIES = {
    "power_of_two": [0.0, *(float(1 << power) for power in range(31))],
    "squared_log": [math.expm1(math.sqrt(square)) for square in range(433)],
}


class CriteoTSV(ParquetStream):
    """Lines of a label, 13 counts (I1 .. I13) and 26 hashed categories (C1 .. C26), oldest first, compressed or not.

    The files are converted once to Parquet in ``cache_dir`` and streamed from there. Validation and test are the last
    lines of ``train``, or files of their own, such as later days. A path is a file, a folder, a glob pattern, or a list
    of them; ``day_2`` sorts before ``day_10``.

    Args:
        train: Files of the training split, and of the others where those have none of their own.
        val: Files of the validation split.
        test: Files of the test split.
        val_fraction: Share of the lines of ``train``, just before those for test, that become the validation split
            unless ``val`` is given; 0: none.
        test_fraction: Share of the lines of ``train``, the last, that become the test split unless ``test`` is given;
            0: none.
        delimiter: Character between the columns.
        header: Whether the first line of each file has names.
        order_column: Position of an additional column with numbers that give the time order. The files of a split are
            then sorted in memory.
        numeric: How counts are used: ``bucket``: as categories, missing being one of its own; ``dense``:
            ``sign(x) * log(1 + |x|)`` with 0 for missing; ``both``.
        buckets: What a category of counts is: ``power_of_two``: the counts of one power of two; ``squared_log``: those
            of one ``floor(log(1 + x) ** 2)``, which is finer for large counts. Counts below 0 are one category.
        categorical: Encoding of C1 .. C26, see :class:`~lightning_gem.data.schema.SparseFeature`; missing is a value of
            its own.
        num_embeddings: Rows of the tables of C1 .. C26, one number for all or a list of 26.
        embedding_dim: Width of all tables.
        min_count: Occurrences in the training split that the ``vocabulary`` encoding asks for.
        batch_size: Rows per batch and rank.
        num_workers: Worker processes per loader; 0 reads in the training process.
        shuffle_rows: Rows of the shuffle window of the training split.
        seed: Seed of the shuffles.
        cache_dir: Where converted files and vocabularies are kept; ``~/.cache/lightning_gem`` by default.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        delimiter: str = "\t",
        header: bool = False,
        order_column: int | None = None,
        numeric: Literal["bucket", "dense", "both"] = "both",
        buckets: Literal["power_of_two", "squared_log"] = "power_of_two",
        categorical: Literal["vocabulary", "hash"] = "vocabulary",
        num_embeddings: int | list[int] = 100_000,
        embedding_dim: int = 16,
        min_count: int = 10,
        batch_size: int = 1024,
        num_workers: int = 0,
        shuffle_rows: int = 65536,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        schema = criteo_schema(numeric, buckets, categorical, num_embeddings, embedding_dim, min_count)
        super().__init__(
            schema,
            batch_size=batch_size,
            num_workers=num_workers,
            shuffle_rows=shuffle_rows,
            seed=seed,
            cache_dir=cache_dir,
        )
        given = {"train": train, "val": val, "test": test}
        self.files = {split: paths for split, paths in given.items() if paths is not None}
        shares = {"val": val_fraction, "test": test_fraction}
        for name, share in shares.items():
            if not 0 <= share < 1:
                raise ValueError(f"{name}_fraction is a share of lines from 0 to below 1, not {share}")
        self.shares = {split: share for split, share in shares.items() if share and split not in self.files}
        if sum(self.shares.values()) >= 1:
            raise ValueError(f"val_fraction and test_fraction leave no line for training: {self.shares}")
        self.layout = Layout(delimiter, header, order_column)

    def prepare_data(self) -> None:
        """Converts the files and fits vocabularies, once per machine."""
        self._convert()
        super().prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Opens the converted files of the splits that ``stage`` needs; of all without one."""
        self._convert()
        super().setup(stage)

    def _how_to_give(self, split: str) -> str:
        share = f", or set data.init_args.{split}_fraction above 0" if split != "train" else ""
        return f"name its files as {split} (data.init_args.{split}){share}"

    def _convert(self) -> None:
        files = {split: expand_paths(paths, suffix="") for split, paths in self.files.items()}
        every = [file for group in files.values() for file in group]
        folder = self.cache_dir / f"criteo-{fingerprint(every, [files, self.shares, self.layout])}"
        if not folder.exists():
            with atomic_directory(folder) as temporary:
                convert(files, self.shares, self.layout, temporary)
        for split in [*self.files, *self.shares]:
            self.paths[split] = str(folder / f"{split}.parquet")


def criteo_schema(
    numeric: Literal["bucket", "dense", "both"],
    buckets: Literal["power_of_two", "squared_log"],
    categorical: Literal["vocabulary", "hash"],
    num_embeddings: int | list[int],
    embedding_dim: int,
    min_count: int,
) -> Schema:
    """Schema of the converted files; see :class:`CriteoTSV` for the arguments."""
    sizes = [num_embeddings] * len(CATEGORICAL) if isinstance(num_embeddings, int) else num_embeddings
    if len(sizes) != len(CATEGORICAL):
        raise ValueError(f"num_embeddings is one number or a list of {len(CATEGORICAL)}, not of {len(sizes)}")
    sparse = [
        SparseFeature(
            name,
            size,
            embedding_dim,
            encoding=categorical,
            min_count=min_count,
            null_row=categorical == "vocabulary",
        )
        for name, size in zip(CATEGORICAL, sizes, strict=True)
    ]
    if numeric != "dense":
        limits = _BOUNDARIES[buckets]
        sparse += [
            SparseFeature(f"{name}_bucket", len(limits) + 2, embedding_dim, name, encoding="bucket", boundaries=limits)
            for name in NUMERIC
        ]
    dense = [DenseFeature(name, transform="log1p", fill=0.0) for name in NUMERIC] if numeric != "bucket" else []
    return Schema([Task("click", column=LABEL)], sparse, dense)
