import os, pytest, torch
from functools import partial
from tests.harness import *
from tests.harness.models import *
def drift():
    m=build_mlp()
    if os.environ.get("RANK")=="1":
        with torch.no_grad(): m.third.bias[0]+=1e-4
    return m
def freeze(model, step):
    for p in model.first.parameters() if hasattr(model,"first") else (): p.requires_grad_(step>=2)
def look(model, engine): return type(engine).__name__
sched=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=.5)
@pytest.mark.parametrize("kw",[{"accumulate":2},{"clip":.1},{"clip":.1,"accumulate":3,"scheduler":sched},{"init":True},{"optimizer_first":True},{"before_step":freeze,"inspect":look},{"engine":False,"clip":.1}])
@pytest.mark.parametrize("transport",["shared","collective"])
@pytest.mark.parametrize("b",[(build_mlp,mlp_batch),(build_tied_lm,lm_batch),(build_moe,moe_batch),(build_two_tower,two_tower_batch)])
@pytest.mark.parametrize("world",[2,3])
def test_same(transport,kw,b,world):
    s=assert_same_training(*b,world=world,transport=transport,**kw)
    if "inspect" in kw: assert s.ranks[1].extra
