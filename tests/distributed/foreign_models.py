"""More models that know nothing of the strategy."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN

from tests.distributed.foreign import DIM, KEYS, NUM_DENSE, ROWS, LitDLRM


class LitDeepFM(LitDLRM):
    """TorchRec's DeepFM."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        tables = self.model.sparse_arch.embedding_bag_collection
        self.model = SimpleDeepFMNN(NUM_DENSE, tables, hidden_layer_size=16, deep_fm_dimension=5)

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        scores = self.model(batch["dense"], batch["sparse"]).squeeze(1)
        return nn.functional.binary_cross_entropy(scores, batch["label"])


class LitPlain(LitDLRM):
    """Plain torch embeddings, which are no TorchRec tables."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.model = nn.ModuleDict({key: nn.EmbeddingBag(rows, DIM, mode="sum") for key, rows in ROWS.items()})
        self.score = nn.Linear(len(ROWS) * DIM + NUM_DENSE, 1)

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        features = batch["sparse"].to_dict()
        pooled = [self.model[key](features[key].values(), features[key].offsets()[:-1]) for key in KEYS]
        scores = self.score(torch.cat([*pooled, batch["dense"]], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["label"])
