"""Which means of communication are chosen, without processes."""

import pytest
import torch

from lightning_gem.strategies import collectives
from lightning_gem.strategies.collectives import Offer, choose, install, offered, prepare


def test_a_cpu_has_plain_ones_only() -> None:
    offer = offered(torch.device("cpu"), "gloo")
    assert offer == Offer("plain", "gloo on cpu has no others")
    assert choose("auto", offer) == offer
    with pytest.raises(ValueError, match="there is no symmetric memory here .gloo on cpu"):
        choose("require", offer)


@pytest.mark.parametrize(
    ("version", "memory", "allocates", "means"),
    [
        ((2, 28, 9), True, True, "symmetric"),
        ((2, 27, 5), True, True, "registered"),
        ((2, 29, 7), False, True, "registered"),
        ((2, 27, 5), False, False, "plain"),
    ],
)
def test_nccl(
    version: tuple[int, ...], memory: bool, allocates: bool, means: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    backend = type("ProcessGroupNCCL", (), {"NCCL_CTA_POLICY_ZERO": 2})
    monkeypatch.setattr(collectives.dist, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr(collectives, "symmetric_memory", lambda: object() if memory else None)
    monkeypatch.setattr(collectives, "process_group_allocates", lambda: allocates)
    offer = offered(torch.device("cuda"), "nccl")
    assert offer.means == means
    assert "NCCL 2." in offer.reason
    assert choose("off", offer).means == "plain"


def test_policy_of_the_environment_stays() -> None:
    environment: dict[str, str] = {}
    prepare("registered", environment)
    assert environment == {}
    prepare("symmetric", environment)
    assert environment == {"NCCL_CTA_POLICY": "2"}
    environment["NCCL_CTA_POLICY"] = "1"
    prepare("symmetric", environment)
    assert environment == {"NCCL_CTA_POLICY": "1"}


class _Unit:
    def __init__(self) -> None:
        self.enabled = False

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        self.enabled = enable


def test_registered_buffers_where_there_is_something_to_gather() -> None:
    units = [_Unit(), _Unit()]
    assert install(units, [1, 4], "registered") == 1  # type: ignore[arg-type]
    assert [unit.enabled for unit in units] == [False, True]
    assert install(units, [4, 4], "plain") == 0  # type: ignore[arg-type]
