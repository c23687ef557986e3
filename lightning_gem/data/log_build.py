"""Encodes a log as the arrays that its row source reads."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from lightning_gem.data.cache import save_arrays
from lightning_gem.data.columns import flatten, one_array, to_numpy
from lightning_gem.data.encoding import encode_dense, encode_ids, encode_labels
from lightning_gem.data.fitting import Fitted, features_to_fit, fit, statistics_key, vocabulary_key
from lightning_gem.data.history import Earlier, histories
from lightning_gem.data.log_config import LogConfig
from lightning_gem.data.log_table import Encoder, Log, add_counter, add_derived, read_log, sort_log, split_log
from lightning_gem.data.rows import Ints, ranges_to_index
from lightning_gem.data.schema import DenseFeature, Sequence, SparseFeature

Arrays = dict[str, npt.NDArray[np.generic]]


def build_log(config: LogConfig, folder: Path) -> None:
    """Reads, joins, sorts and encodes a log and writes the arrays, with a progress bar over these stages.

    Per row of the sorted log there are ``order`` (its position in the files), ``dense``, ``labels``, ``weights``,
    ``times``, ``domain``, ``user``, ``sparse<i>`` (of lists: the values of all rows in turn, with ``sparse<i>_starts``
    and ``sparse<i>_lengths``), ``seq<i>_starts`` and ``seq<i>_lengths``; per event ``seq<i>_ids``, ``seq<i>_floats``
    and ``seq<i>_times``; and the
    rows ``split_<name>`` of each split. ``<i>`` counts as in the schema.
    """
    stages = 5 + len(config.counters) + len(config.schema.sequences)
    with tqdm(total=stages, desc="prepare log", unit="stage") as progress:

        def stage(text: str) -> None:
            progress.set_postfix_str(text)
            progress.update()

        stage("read")
        log = read_log(config)
        stage("sort")
        sort_log(log)
        stage("columns")
        for derived in config.derived:
            add_derived(log, derived)
        for counter in config.counters:
            stage(f"counter {counter.count_name}")
            add_counter(log, counter)
        stage("rows")
        splits = split_log(log)
        arrays: Arrays = {f"split_{name}": rows for name, rows in splits.items()}
        fitted = _fit(log, splits["train"])
        fitted.save(folder)
        arrays |= _encode_rows(log, fitted)
        if config.schema.sequences:
            earlier = log.earlier([str(config.schema.user)])
        for i, sequence in enumerate(config.schema.sequences):
            stage(f"history {sequence.name}")
            delayed = config.label_delay and config.has_outcomes(sequence)
            events = _encode_events(log, sequence, earlier.before(log.known()) if delayed else earlier, fitted)
            arrays |= {f"seq{i}_{name}": array for name, array in events.items()}
        stage("write")
        save_arrays(folder, arrays)


def _fit(log: Log, train: Ints) -> Fitted:
    """Vocabularies and statistics of the training rows: as requests and as events."""
    sparse, dense = features_to_fit(log.config.schema)
    columns = {feature.source for _, feature in sparse} | {feature.source for _, feature in dense}
    rows = log.table.select(sorted(columns)).take(pa.array(log.order[train]))
    return fit(log.config.schema, [(rows, f"{log.where}, training split")])


def _encode_rows(log: Log, fitted: Fitted) -> Arrays:
    """Everything but the histories."""
    schema, num_rows = log.config.schema, len(log.order)
    for task in schema.tasks:
        log.column(task.source)
    coded = [encode_labels(schema.tasks, log.table.slice(start, stop - start), path) for path, start, stop in log.parts]
    arrays: Arrays = {
        "order": log.order,
        "times": log.seconds,
        "user": log.users,
        "domain": np.zeros(num_rows, dtype=np.int64),
        "labels": np.concatenate([labels for labels, _ in coded])[log.order],
        "weights": np.concatenate([weights for _, weights in coded])[log.order],
        "dense": np.empty((num_rows, len(schema.dense)), dtype=np.float32),
    }
    if schema.domain is not None:
        surfaces = SparseFeature(schema.domain, num_embeddings=schema.num_domains, encoding="index")
        arrays["domain"] = log.encode(schema.domain, _ids(surfaces, None, fitted))
    for i, dense in enumerate(schema.dense):
        arrays["dense"][:, i] = log.encode(dense.source, _numbers(dense, None, fitted))
    for i, sparse in enumerate(schema.sparse):
        if log.is_list(sparse.source):
            values, starts, lengths = _encode_lists(log, sparse.source, _ids(sparse, None, fitted))
            arrays |= {f"sparse{i}": values, f"sparse{i}_starts": starts, f"sparse{i}_lengths": lengths}
        else:
            arrays[f"sparse{i}"] = log.encode(sparse.source, _ids(sparse, None, fitted))
    return arrays


def _encode_lists(log: Log, name: str, encoder: Encoder) -> tuple[Ints, Ints, Ints]:
    """Values, starts and lengths of a list column, for the sorted rows and in their order."""
    column = one_array(log.table.column(name))
    flat = [(*flatten(column[start:stop]), path) for path, start, stop in log.parts]
    values = np.concatenate([encoder(part, path) for part, _, path in flat])
    lengths = np.concatenate([part for _, part, _ in flat])
    starts = (np.cumsum(lengths) - lengths)[log.order]
    lengths = lengths[log.order]
    return values[ranges_to_index(starts, lengths)], np.cumsum(lengths) - lengths, lengths


def _encode_events(log: Log, sequence: Sequence, earlier: Earlier, fitted: Fitted) -> Arrays:
    """The events of a sequence, by user and time, and the history of every row among them."""
    keep = _is_event(log, sequence)
    events, starts, lengths = histories(earlier, sequence.max_len, keep[log.order])
    where = f", events of sequence {sequence.name!r}"
    floats = np.empty((len(events), len(sequence.floats)), dtype=np.float32)
    for i, dense in enumerate(sequence.floats):
        floats[:, i] = log.encode(dense.source, _numbers(dense, sequence.name, fitted), keep, where)[events]
    ids = np.empty((len(sequence.features), len(events)), dtype=np.int64)
    for i, sparse in enumerate(sequence.features):
        ids[i] = log.encode(sparse.source, _ids(sparse, sequence.name, fitted), keep, where)[events]
    return {"ids": ids, "floats": floats, "times": log.seconds[events], "starts": starts, "lengths": lengths}


def _is_event(log: Log, sequence: Sequence) -> npt.NDArray[np.bool_]:
    """Rows of the table that the filters of a sequence keep."""
    keep = np.ones(log.table.num_rows, dtype=bool)
    conditions = log.config.history_filters.get(sequence.name, {})
    for name, value in conditions.items():
        column = log.column(name)
        try:
            equal = pc.equal(column, pa.scalar(value).cast(column.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ValueError(
                f"history_filters ({sequence.name}): {value!r} does not compare with column {name!r} of type "
                f"{column.type} ({log.where})"
            ) from error
        keep &= to_numpy(equal.fill_null(False))
    if not keep.any():
        raise ValueError(f"history_filters ({sequence.name}): no row of {log.where} has {conditions}")
    return keep


def _ids(feature: SparseFeature, sequence: str | None, fitted: Fitted) -> Encoder:
    vocabulary = fitted.vocabularies.get(vocabulary_key(feature, sequence))
    return lambda values, where: encode_ids(feature, values, vocabulary, where)


def _numbers(feature: DenseFeature, sequence: str | None, fitted: Fitted) -> Encoder:
    statistics = fitted.statistics.get(statistics_key(feature, sequence))
    return lambda values, where: encode_dense(feature, values, statistics, where)
