"""The poison that the whole suite relies on is really there. (It is what makes many other tests worth their name.)"""

import torch
from kvsupport.driver import make_config, make_engine, make_layout
from sglang_kvdrive.device import CpuDevice


def test_empty_tensors_hold_nan_or_impossible_positions():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    assert (torch.empty((2, 2), dtype=torch.int64) == 2**63 - 1).all()


def test_the_poison_reaches_both_tiers():
    device = CpuDevice()
    assert device.allocate_hbm((4, 2), torch.float32).isnan().all()
    assert device.allocate_dram((4, 2), torch.bfloat16).isnan().all()
    layout = make_layout()
    engine = make_engine(layout, make_config(layout), max_tokens=200)
    assert engine.hbm.arena.isnan().all()
    assert engine.dram.home.isnan().all()
