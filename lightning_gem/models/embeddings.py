"""The embedding tables of a schema as TorchRec collections."""

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_gem.data.schema import Schema, Table


def table_name(table: Table) -> str:
    """Name of a table inside its collection: a module's name, so free of dots and of the names of methods."""
    return f"table_{table.name.replace('.', '_')}"


def _init_range(init: float | None) -> dict[str, float]:
    return {} if init is None else {"weight_init_min": -init, "weight_init_max": init}


def request_embeddings(schema: Schema, init: float | None) -> EmbeddingBagCollection | None:
    """Tables of the request features, pooled by sum; None when the schema has none.

    The collection is made on torch's default device, so ``with torch.device("meta")`` costs no memory.
    """
    if not schema.sparse:
        return None
    return EmbeddingBagCollection(
        device=torch.get_default_device(),
        tables=[
            EmbeddingBagConfig(
                name=table_name(table),
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=table.features,
                pooling=PoolingType.SUM,
                **_init_range(init),
            )
            for table in schema.request_tables
        ],
    )


def event_embeddings(schema: Schema, init: float | None) -> nn.ModuleList:
    """Tables of the event features of all sequences: one collection per embedding width, as TorchRec wants it."""
    by_width: dict[int, list[Table]] = {}
    for table in schema.event_tables:
        by_width.setdefault(table.embedding_dim, []).append(table)
    return nn.ModuleList(
        EmbeddingCollection(
            device=torch.get_default_device(),
            tables=[
                EmbeddingConfig(
                    name=table_name(table),
                    num_embeddings=table.num_embeddings,
                    embedding_dim=table.embedding_dim,
                    feature_names=table.features,
                    **_init_range(init),
                )
                for table in tables
            ],
        )
        for tables in by_width.values()
    )
