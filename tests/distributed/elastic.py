"""Run by torchrun: a rank dies in the first attempt, the second one goes on from the last checkpoint."""

import json
import os
import sys
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gem.strategies import HybridShardedStrategy
from tests.distributed.foreign import ClickData, LitDLRM
from tests.distributed.hybrid_cases import Kill, trainer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    keep = ModelCheckpoint(folder / "elastic", every_n_train_steps=2, save_last=True)
    strategy = HybridShardedStrategy(timeout_seconds=60)
    run = trainer(folder, strategy, callbacks=[keep, Kill()], enable_checkpointing=True, max_steps=8)
    run.fit(LitDLRM(), ClickData(), ckpt_path="last")
    if run.is_global_zero:
        result = {"step": run.global_step, "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"]}
        (folder / "result.json").write_text(json.dumps(result))
