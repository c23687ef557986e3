"""What holds for every metric."""

import inspect
import pickle
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import inf, nan
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics import MetricCollection

from lightning_gem import metrics

CLASSES = [getattr(metrics, name) for name in metrics.__all__]
every_metric = pytest.mark.parametrize("cls", CLASSES)


def examples(cls, n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = {
        "logits": torch.randn(n, generator=generator, dtype=torch.float32),  # Lightning may change the default dtype
        "labels": (torch.rand(n, generator=generator, dtype=torch.float32) < 0.4).float(),
        "weights": torch.rand(n, generator=generator, dtype=torch.float32),
    }
    if cls is metrics.GAUC:
        columns["users"] = torch.randint(0, 5, (n,), generator=generator)
    return columns


def value_of(cls, *batches):
    metric = cls()
    for batch in batches:
        metric.update(**batch)
    return metric.compute()


@every_metric
def test_a_finite_double_scalar(cls):
    value = value_of(cls, examples(cls))
    assert value.shape == ()
    assert value.dtype == torch.float64
    assert value.isfinite()


@every_metric
def test_missing_labels_are_ignored(cls):
    columns = examples(cls)
    expected = value_of(cls, {name: column[40:] for name, column in columns.items()})
    columns["labels"][:30] = nan
    columns["weights"][20:40] = 0
    columns["logits"][:40] = torch.tensor([nan, inf, -inf, 1.0]).repeat(10)
    torch.testing.assert_close(value_of(cls, columns), expected)


@every_metric
def test_a_nan_logit_with_a_label_shows(cls):
    columns = examples(cls)
    columns["logits"][5] = nan
    assert value_of(cls, columns).isnan()


@every_metric
def test_without_weights_all_are_one(cls):
    columns = examples(cls)
    columns["weights"] = torch.ones(60)
    expected = value_of(cls, columns)
    del columns["weights"]
    torch.testing.assert_close(value_of(cls, columns), expected)


@every_metric
def test_weights_scale_out(cls):
    columns = examples(cls)
    expected = value_of(cls, columns)
    torch.testing.assert_close(value_of(cls, {**columns, "weights": 8 * columns["weights"]}), expected)


@every_metric
def test_the_order_of_examples_does_not_matter(cls):
    columns = examples(cls)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    shuffled = {name: column[order] for name, column in columns.items()}
    torch.testing.assert_close(value_of(cls, shuffled), value_of(cls, columns))


@every_metric
def test_empty_updates(cls):
    empty, full = examples(cls, n=0), examples(cls)
    assert value_of(cls, empty).isnan()
    torch.testing.assert_close(value_of(cls, empty, full, empty), value_of(cls, full))


@every_metric
def test_compute_before_update_is_nan(cls):
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert cls().compute().isnan()


@every_metric
def test_reset(cls):
    metric = cls()
    metric.update(**examples(cls, seed=1))
    metric.reset()
    metric.update(**examples(cls))
    torch.testing.assert_close(metric.compute(), value_of(cls, examples(cls)))


@every_metric
def test_forward_gives_the_batch_and_adds_it(cls):
    first, second = examples(cls), examples(cls, seed=1)
    first["logits"].requires_grad_()
    metric = cls()
    assert not metric(**first).requires_grad
    torch.testing.assert_close(metric(**second), value_of(cls, second))
    torch.testing.assert_close(metric.compute(), value_of(cls, first, second))


@every_metric
def test_state_dict(cls):
    first, second = examples(cls), examples(cls, seed=1)
    metric, restored = cls(), cls()
    assert metric.state_dict() == {}  # as in torchmetrics
    metric.persistent(True)
    restored.persistent(True)
    metric.update(**first)
    restored.load_state_dict(metric.state_dict())
    restored.update(**second)
    torch.testing.assert_close(restored.compute(), value_of(cls, first, second))
    torch.testing.assert_close(metric.compute(), value_of(cls, first))


@every_metric
def test_pickle_and_clone(cls):
    metric = cls()
    metric.update(**examples(cls))
    torch.testing.assert_close(pickle.loads(pickle.dumps(metric)).compute(), metric.compute())
    torch.testing.assert_close(metric.clone().compute(), metric.compute())


@every_metric
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_lose_nothing(cls, dtype):
    half = {name: c.to(dtype) if c.is_floating_point() else c for name, c in examples(cls).items()}
    wide = {name: c.double() if c.is_floating_point() else c for name, c in half.items()}
    torch.testing.assert_close(value_of(cls, half), value_of(cls, wide), rtol=1e-6, atol=0)


@every_metric
def test_any_shape_if_it_is_the_same(cls):
    columns = examples(cls)
    square = {name: column.reshape(12, 5) for name, column in columns.items()}
    torch.testing.assert_close(value_of(cls, square), value_of(cls, columns))
    for name in columns.keys() - {"logits"}:
        with pytest.raises(ValueError, match=rf"`{name}` has shape \(60,\) but `logits` has shape \(12, 5\)"):
            cls().update(**{**square, name: columns[name]})


@every_metric
def test_states_keep_their_dtype_and_values(cls):
    module = torch.nn.ModuleDict({"metric": cls(), "layer": torch.nn.Linear(1, 1)})
    module["metric"].update(**examples(cls))
    for change in (lambda: module.to(torch.bfloat16), module.half, lambda: module.to_empty(device="cpu")):
        change()
        module["metric"].update(**examples(cls, n=20, seed=1))
        module["metric"].update(**examples(cls, n=0))
    assert module["layer"].weight.dtype == torch.float16
    expected = value_of(cls, examples(cls), *[examples(cls, n=20, seed=1)] * 3)
    torch.testing.assert_close(module["metric"].compute(), expected)


@every_metric
def test_built_on_the_meta_device(cls):
    with torch.device("meta"):
        metric = cls()
    metric.update(**examples(cls))
    torch.testing.assert_close(metric.compute(), value_of(cls, examples(cls)))


@every_metric
def test_updates_do_not_synchronise_with_the_host(cls):
    columns = examples(cls)
    metric = cls()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # fake tensors have no values to read back
        for _ in range(3):
            metric.update(**{name: mode.from_tensor(column) for name, column in columns.items()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_metric
def test_on_a_gpu(cls):
    batches = [examples(cls, seed=seed) for seed in range(3)]
    metric = cls().to("cuda")
    on_gpu = [{name: column.cuda() for name, column in batch.items()} for batch in batches]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in on_gpu:
            metric.update(**batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    value = metric.compute()
    assert value.device.type == "cuda"
    torch.testing.assert_close(value.cpu(), value_of(cls, *batches), rtol=1e-12, atol=0)


def test_a_collection_keeps_them_apart_if_the_first_batch_has_no_label():
    classes = [cls for cls in CLASSES if cls is not metrics.GAUC]
    collection = MetricCollection({cls.__name__: cls() for cls in classes})
    collection.update(torch.randn(4), torch.full((4,), nan))
    columns = examples(None)
    collection.update(**columns)
    for name, value in collection.compute().items():
        torch.testing.assert_close(value, value_of(getattr(metrics, name), columns))


@every_metric
def test_documented_like_the_others(cls):
    assert list(inspect.signature(cls.update).parameters)[1:3] == ["logits", "labels"]
    assert inspect.signature(cls.update).parameters["weights"].default is None
    assert "NaN" in inspect.getdoc(cls) or "NaN" in inspect.getdoc(cls.compute)


def test_logged_by_lightning(tmp_path):
    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.values = torch.nn.ModuleDict({cls.__name__: cls() for cls in CLASSES})

        def validation_step(self, batch, batch_idx):
            for name, metric in self.values.items():
                cls = getattr(metrics, name)
                metric.update(**examples(cls, seed=batch_idx))
                self.log(name, metric)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            precision="bf16-true",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        model = Model()
        for _ in range(2):  # the second run shows that Lightning resets them
            (logged,) = trainer.validate(model, torch.utils.data.DataLoader([0.0, 1.0, 2.0]), verbose=False)
    for cls in CLASSES:
        expected = value_of(cls, *(examples(cls, seed=seed) for seed in range(3)))
        assert logged[cls.__name__] == pytest.approx(expected.item())
