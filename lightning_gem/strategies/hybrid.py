"""HybridShardedStrategy: FSDP2, expert parallelism and TorchRec tables in one Lightning strategy."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from lightning_gem.optimizers import DenseAndTables
from lightning_gem.strategies import checkpoint as checkpoints
from lightning_gem.strategies import collectives, processes, steps
from lightning_gem.strategies.batches import nothing_counted, num_samples
from lightning_gem.strategies.checks import check_trainer
from lightning_gem.strategies.compat import (
    SubprocessScriptLauncher,
    default_process_group_backend,
    optimizers_to_device,
    reduce_over_ranks,
    reset_seed,
)
from lightning_gem.strategies.embeddings import ShardedTables
from lightning_gem.strategies.failures import RollCall
from lightning_gem.strategies.gradients import clip_by_norm
from lightning_gem.strategies.loader_hooks import LoaderHooks
from lightning_gem.strategies.mesh import Meshes, Size, build_meshes, resolve_axes
from lightning_gem.strategies.report import LayoutReport, layout_report
from lightning_gem.strategies.sharding import DenseConfig, Sharded, shard_module
from lightning_gem.strategies.steps import RankStep
from lightning_gem.strategies.table_plan import TableConfig
from lightning_gem.strategies.table_rates import join_tables, push_learning_rate

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HybridShardedStrategy(LoaderHooks):
    """Trains a model with TorchRec collections, dense layers and experts on any number of ranks.

    Every size is a number of ranks or ``"auto"``; ``replicate * shard`` and ``table_replicate * table`` are the world
    size. The module needs no change: TorchRec collections are found by type, experts by their protocol
    (:mod:`lightning_gem.strategies.experts`), everything else is sharded by FSDP2.

    Args:
        replicate: Copies of the dense parameters; across zones.
        shard: Ranks that share one copy of the dense parameters; inside a zone.
        expert: Ranks that share the experts of a layer, each holding whole ones; inside a host.
        table: Ranks that share one copy of the tables; inside a zone.
        table_replicate: Copies of the tables; inside a host where there is one zone, else across zones.
        host_size: Ranks with the fastest links; the ranks of this node when ``"auto"``.
        zone_size: Ranks inside which activations and parameters travel; the world when ``"auto"``.
        tables: Placement and optimizer of the tables.
        wrap: Units of FSDP2: names of module classes; ``"auto"`` takes modules that declare ``fully_shard_unit`` and
            those with ``wrap_min_parameters`` parameters. In Python also a function of name and module.
        wrap_min_parameters: Size of a unit under ``wrap: auto``.
        reshard_after_forward: Free the gathered parameters of a unit between forward and backward.
        param_dtype: Type in which dense parameters are gathered and used.
        reduce_dtype: Type in which dense gradients are reduced.
        meta_init: Run ``configure_model`` on the meta device, so that nothing is held whole; modules need
            ``reset_parameters``.
        loss_weighting: ``samples``: the loss of a rank counts by the size of its batch, so that ranks with unequal
            batches give the mean over samples. ``ranks``: every rank counts the same.
        nonfinite_loss: What to do when the loss of any rank is not finite; checked on all ranks before the backward,
            which would write it into the tables. ``skip`` drops the step on all ranks.
        async_checkpoints: Copy the state to host memory and write it beside the training. The next save waits for the
            one before, and so does the end of the training; a failure stops all ranks in their next step.
        grow_tables: Load checkpoints whose tables have fewer rows; the new rows keep their fresh values.
        weights: File to start from, as ``lightning_gem.strategies.export`` writes it.
        sm_free_collectives: Gather dense parameters by copy engines and symmetric memory (NCCL 2.28, CUDA): ``auto``
            where there is such a thing, ``require`` or an error.
        pipeline: Copy the next batch to the device, and exchange its ids, beside the step of this one; ``auto``: on
            CUDA.
        process_group_backend: ``nccl`` or ``gloo``; by device when not given.
        timeout_seconds: Time after which a collective fails.
    """

    strategy_name = "hybrid_sharded"
    # Lightning asks this of strategies that it does not know: whether to reduce logged values and split data.
    is_distributed = True
    # Read by modules that would check the loss themselves, on one rank only.
    checks_loss = True

    def __init__(
        self,
        replicate: int | Literal["auto"] = "auto",
        shard: int | Literal["auto"] = "auto",
        expert: int | Literal["auto"] = "auto",
        table: int | Literal["auto"] = "auto",
        table_replicate: int | Literal["auto"] = "auto",
        host_size: int | Literal["auto"] = "auto",
        zone_size: int | Literal["auto"] = "auto",
        tables: TableConfig | None = None,
        wrap: list[str] | Literal["auto"] = "auto",
        wrap_min_parameters: int = 1_000_000,
        reshard_after_forward: bool = True,
        param_dtype: Literal["float32", "bfloat16"] = "float32",
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        meta_init: bool = False,
        loss_weighting: Literal["samples", "ranks"] = "samples",
        nonfinite_loss: Literal["raise", "skip"] = "raise",
        async_checkpoints: bool = False,
        grow_tables: bool = False,
        weights: str | None = None,
        sm_free_collectives: Literal["off", "auto", "require"] = "off",
        pipeline: bool | Literal["auto"] = "auto",
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        super().__init__(pipeline, async_checkpoints, grow_tables, timedelta(seconds=timeout_seconds))
        self.weights = Path(weights) if weights is not None else None
        self.sizes: dict[str, Size] = {
            "replicate": replicate,
            "shard": shard,
            "expert": expert,
            "table": table,
            "table_replicate": table_replicate,
            "zone_size": zone_size,
        }
        self.host_size: Size = host_size
        self.table_config = tables or TableConfig()
        self.dense_config = DenseConfig(
            wrap, wrap_min_parameters, reshard_after_forward, _DTYPES[param_dtype], _DTYPES[reduce_dtype]
        )
        self.meta_init = meta_init
        self.loss_weighting: Literal["samples", "ranks"] = loss_weighting
        self.nonfinite_loss = nonfinite_loss
        self.sm_free_collectives: collectives.Mode = sm_free_collectives
        self.process_group_backend = process_group_backend
        if self.table_config.sync_interval < 1:
            raise ValueError(f"tables.sync_interval must be positive, not {self.table_config.sync_interval}")
        self.num_nodes = 1
        self.meshes: Meshes | None = None
        self.gradient_norm: Tensor | None = None
        self._sharded: Sharded | None = None
        self._loss_weight = 1.0
        self._steps = 0
        self._roll_call = RollCall()

    @property
    def tables(self) -> ShardedTables | None:
        """The sharded tables, if the module has any."""
        return self._sharded.tables if self._sharded is not None else None

    # Processes.

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _ranks_of_host(self) -> int:
        return self.num_processes if self.host_size == "auto" else self.host_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank has batches of its own: all axes but none are data-parallel."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Starts the process group and makes the meshes."""
        super().setup_environment()
        reset_seed()
        self._set_world_ranks()
        axes = resolve_axes(self.world_size, self._ranks_of_host, **self.sizes)
        self.process_group_backend = self.process_group_backend or default_process_group_backend(self.root_device)
        assert self.cluster_environment is not None
        means = collectives.choose(
            self.sm_free_collectives, collectives.offered(self.root_device, self.process_group_backend)
        )
        collectives.prepare(means.means)
        self.dense_config.means = means.means
        if self.sm_free_collectives != "off":
            rank_zero_info(f"hybrid_sharded: {means.means} collectives ({means.reason})")
        processes.start_processes(self.cluster_environment, self.process_group_backend, self.root_device, self.timeout)
        if self.meshes is None or self.meshes.axes != axes:
            self.meshes = build_meshes(axes, self.root_device.type)
        rank_zero_info(
            f"hybrid_sharded: dense {axes.replicate} x {axes.shard} (replicate x shard), experts over {axes.expert}, "
            f"tables {axes.table_replicate} x {axes.table} (table_replicate x table)"
        )

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        self._agree_if_nothing_loads(name)
        processes.barrier(self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank ``src`` on every rank."""
        # Callbacks that save after a failure come here first; without all ranks they would wait for ever.
        interrupted = self._trainer is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED
        if interrupted and (missing := self._roll_call.missing(self.global_rank, self.world_size)):
            raise RuntimeError(f"nothing can be saved: {missing}")
        return processes.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the ranks."""
        if not isinstance(tensor, Tensor):
            return tensor
        if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.float()  # Lightning would round the mean of sample counts down
        return reduce_over_ranks(tensor, group, reduce_op=reduce_op)

    # Model.

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Device and precision for ``configure_model``."""
        on_meta = torch.device("meta") if self.meta_init or empty_init else nullcontext()
        with on_meta, self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Moves what is neither sharded nor a parameter of a unit: metrics and the like."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Shards the model, then makes the optimizers."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        check_trainer(trainer, self.precision_plugin, self._layer_sync, self._saver is not None)
        self._watch_steps(trainer)
        # Inference mode breaks the first forward of FSDP2 and the tables on the CPU.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        if self._sharded is None or self._sharded.module is not self.lightning_module:
            self._shard(self.lightning_module)
        self._set_up_pipeline(trainer)
        self.model_to_device()
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # Any plugin clips through these; its own functions fail on parameters of several meshes.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self, module: Any) -> None:
        assert self.meshes is not None
        seed = self.broadcast(torch.initial_seed())
        self._sharded = shard_module(
            module,
            self.meshes,
            self.dense_config,
            self.table_config,
            self._ranks_of_host,
            self.root_device,
            seed,
            self._trainer is not None and self.table_config.holds_updates(self._trainer),
        )
        if self.weights is not None:
            checkpoints.load(self.weights, module, [], self.tables, self.grow_tables)

    def layout_report(self, samples: int, ids_per_feature: float = 1.0) -> LayoutReport:
        """Memory of this rank, and the bytes that it sends by axis in a step; after :meth:`setup`.

        Args:
            samples: Batch size of a rank.
            ids_per_feature: Mean number of ids of a feature in a sample.
        """
        assert self._sharded is not None
        assert self.meshes is not None
        dense = self.dense_config
        return layout_report(
            self._sharded.module,
            self.tables,
            self.meshes.axes,
            samples,
            ids_per_feature,
            dense.param_dtype.itemsize,
            dense.reduce_dtype.itemsize,
        )

    # Optimizers.

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Makes the module's optimizers and gives the tables' learning rate to the first of them.

        Raises:
            ValueError: If nothing says the learning rate of the tables.
        """
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        if self.tables is None:
            return
        assert self._sharded is not None
        self.optimizers = join_tables(
            list(self.optimizers), self.tables, self.table_config.lr, self._sharded.attached_lr
        )

    # Steps.

    def _exchange(self, batch: Any) -> list[RankStep]:
        samples = num_samples(batch)
        own = RankStep(-1 if samples is None else samples, not self._is_filler, self._requeue.asked, self._save_failed)
        if self.world_size == 1:
            return [own]
        assert self._sharded is not None
        ranks = steps.exchange(own, self.root_device)
        if self.tables is not None and self.tables.needs_equal_batches:
            steps.check_equal(ranks)
        self._loss_weight = steps.loss_weight(ranks, self.global_rank, self.loss_weighting)
        steps.tell_experts(self._sharded.experts, ranks)
        return ranks

    @contextmanager
    def _step(self, batch: Any) -> Generator[list[RankStep], None, None]:
        """Around a step of the module."""
        ranks = self._exchange(batch)
        with nothing_counted(self.lightning_module) if self._is_filler else nullcontext():
            yield ranks

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step after the ranks have told each other their batch sizes.

        Raises:
            RuntimeError: On every rank, if a checkpoint could not be written beside the training.
        """
        if self.tables is not None:
            push_learning_rate(list(self.optimizers), self.tables)
        with self._step(batch) as ranks:
            self._start_of_step(ranks)
            with nullcontext() if self._pipeline is None else self._pipeline.around_forward():
                return super().training_step(batch, *args, **kwargs)

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`."""
        with self._step(batch):
            return super().validation_step(batch, *args, **kwargs)

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`."""
        with self._step(batch):
            return super().test_step(batch, *args, **kwargs)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`training_step`; nothing is predicted for a batch that only stands in."""
        with self._step(batch):
            predictions = super().predict_step(batch, *args, **kwargs)
        return None if self._is_filler else predictions

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Weighs the loss and checks it on all ranks, then runs the backward.

        Raises:
            FloatingPointError: On all ranks, if the loss of any is not finite and ``nonfinite_loss`` is ``raise``.
        """
        ranks = steps.nonfinite_ranks(closure_loss, self.root_device)
        if ranks:
            if self.nonfinite_loss == "raise":
                raise FloatingPointError(
                    f"the loss is not finite on rank {', '.join(map(str, ranks))}: no weight was changed in this step; "
                    "look for extreme inputs, lower the learning rates, or set nonfinite_loss: skip"
                )
            rank_zero_info(f"hybrid_sharded: step skipped, the loss is not finite on rank {ranks}")
            if self.tables is not None:
                self.tables.gather()
            return closure_loss
        loss = super().backward(closure_loss * self._loss_weight, optimizer, *args, **kwargs)
        if self.tables is not None:
            self.tables.copies.finish_backward()
        return loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Steps, updates tables whose updates were held back, and averages their copies when it is time."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.tables is not None and isinstance(optimizer, DenseAndTables):
            self._steps += 1
            self.tables.step()
            if self._steps % self.table_config.sync_interval == 0:
                self.tables.synchronize()
        return result

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.gradient_norm = clip_by_norm(parameters, float(clip_val))

    def on_validation_start(self) -> None:
        """Validates the mean of the copies of the tables."""
        if self.tables is not None and self.table_config.sync_interval > 1:
            self.tables.synchronize()

    # Failures.

    def on_exception(self, exception: BaseException) -> None:
        """Says which ranks are gone: a broken connection names none."""
        if isinstance(exception, RuntimeError) and (
            missing := self._roll_call.missing(self.global_rank, self.world_size)
        ):
            log.error("hybrid_sharded: %s", missing)

    def teardown(self) -> None:
        """Leaves parameters where they are: sharded ones cannot move."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._end_checkpoints()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
