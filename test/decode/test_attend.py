"""Stage C reads chunks in ascending id: where they lie and how they were ranked cannot change a bit."""

import torch
from kvsupport.driver import Driver, make_config, make_engine, make_layout, random_tokens
from sglang_kvdrive.decode.attend import attend
from sglang_kvdrive.values import Lookup, Selection


def test_rank_and_place_of_the_selected_chunks_do_not_change_a_bit():
    layout = make_layout(layers=1)
    driver = Driver(make_engine(layout, make_config(layout, budget="20%", groups_per_page=4), max_tokens=401))
    driver.begin(0, random_tokens(layout, 401))
    driver.prefill(0, 400, 400)
    engine = driver.engine
    engine.extend(0, 401)
    plan = engine.begin_step(torch.tensor([0]))
    driver.decode_layer(plan, 0, [0], [400])
    (part,) = plan.parts
    q = torch.randn(1, 2, 2, layout.head_dim)
    selection = engine.schedule.selector.select(0, part, q, driver.scale)
    lookup = engine.schedule.fetcher.probe(0, part, selection)
    engine.schedule.fetcher.fetch(0, part, selection, lookup)
    out = attend(engine.hbm, part, 0, q, driver.scale, selection, lookup)
    order = torch.randperm(selection.chunk_ids.shape[-1])
    mixed = Selection(selection.chunk_ids[..., order], selection.group_ids[..., order], selection.group_scores)
    moved = Lookup(lookup.slot_ids[..., order], lookup.misses[..., order], lookup.n_hits, lookup.n_misses, lookup.n_evictions)
    assert torch.equal(out, attend(engine.hbm, part, 0, q, driver.scale, mixed, moved))
    assert not out.isnan().any()
