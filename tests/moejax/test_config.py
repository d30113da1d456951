"""MoEConfig refuses what cannot be, naming the value and what would be legal, before any device work."""

import dataclasses
import math

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

from moejax import MoEConfig, SigmoidBias, Softmax
from moejax.routers import Grouped, Queue

GOOD = {"d_model": 8, "d_ff": 16, "num_experts": 4, "top_k": 2}
BAD = [
    ({"d_model": 0}, r"d_model=0: needs a whole number of at least 1"),
    ({"d_ff": -3}, r"d_ff=-3: needs a whole number of at least 1"),
    ({"num_experts": 2.0}, r"num_experts=2.0: needs a whole number"),
    ({"top_k": True}, r"top_k=True: needs a whole number"),
    ({"top_k": 0}, r"top_k=0: needs a whole number of at least 1"),
    ({"top_k": 5}, r"top_k=5 exceeds num_experts=4: needs 1 to 4"),
    ({"router": "softmx"}, r"router='softmx': legal values are 'softmax', 'sigmoid_bias', .* \(did you mean 'softmax'\?\)"),
    ({"router": Softmax}, r"router=<class .*Softmax'>: needs one of softmax, sigmoid_bias, .*, or a Router object"),
    ({"router": 3}, r"router=3: needs one of softmax, sigmoid_bias, .*, or a Router object"),
    ({"capacity_factor": 0}, r"capacity_factor=0: needs a finite number above 0, or None"),
    ({"capacity_factor": -1.0}, r"capacity_factor=-1.0: needs a finite number above 0, or None"),
    ({"capacity_factor": math.nan}, r"capacity_factor=nan: needs a finite number above 0"),
    ({"capacity_factor": math.inf}, r"capacity_factor=inf: needs a finite number above 0"),
    ({"capacity_factor": 10**400}, r"capacity_factor=10+: needs a finite number above 0"),
    ({"capacity_factor": "1.25"}, r"capacity_factor='1.25': needs a finite number above 0"),
    ({"capacity": "pol"}, r"capacity='pol': legal values are 'cell'"),
    ({"drop_by": "weigth"}, r"drop_by='weigth': legal values are 'position', 'weight' \(did you mean 'weight'\?\)"),
    ({"num_senders": 0}, r"num_senders=0: needs a whole number of at least 1"),
    ({"exchange": "alltoall"}, r"exchange='alltoall': legal values are 'all_to_all', .*did you mean 'all_to_all'\?"),
    ({"codec": "bf61"}, r"codec='bf61': legal values are 'plain', 'bf16', .*\(did you mean 'bf16'\?\)"),
    ({"codec": ("plain", "int3")}, r"codec='int3': legal values are 'plain', 'bf16'"),
    ({"codec": ("plain",)}, r"codec=\('plain',\): needs a name or a pair \(forward, backward\)"),
    ({"codec": None}, r"codec=None: needs a name or a pair"),
    ({"num_chunks": 0}, r"num_chunks=0: needs a whole number of at least 1"),
    (
        {"num_chunks": 2, "exchange": "all_gather"},
        r"num_chunks=2: exchange='all_gather' crosses whole; legal is 1, or .*'pool'",
    ),
    ({"overlap": "yes"}, r"overlap='yes': needs True or False"),
    ({"overlap": True, "exchange": "weight_stream"}, r"overlap=True: exchange='weight_stream' with .* legal is False"),
    (
        {"overlap": True, "exchange": "ragged", "receive_factor": 1.5, "overflow": "fallback"},
        r"overlap=True: exchange='ragged' with overflow='fallback' sends the weights themselves round; legal is False",
    ),
    ({"num_destinations": 2}, r"num_destinations=2: needs capacity='pool', not 'cell'"),
    ({"receive_factor": 0.99}, r"receive_factor=0.99: needs a finite number of at least 1.0, what even load needs, or None"),
    ({"receive_factor": math.inf}, r"receive_factor=inf: needs a finite number of at least 1.0"),
    ({"receive_factor": True}, r"receive_factor=True: needs a finite number of at least 1.0"),
    ({"receive_factor": 1.5, "capacity": "pool"}, r"receive_factor=1.5: needs capacity='cell', not 'pool'"),
    ({"overflow": "fall back"}, r"overflow='fall back': legal values are 'drop', 'fallback' \(did you mean 'fallback'\?\)"),
    ({"overflow": "fallback"}, r"overflow='fallback': without receive_factor nothing overflows; legal is 'drop'"),
    ({"exchange": "ragged", "capacity": "pool"}, r"exchange of pools='ragged': legal values are 'all_to_all', 'auto'"),
    ({"exchange": "ragged", "num_chunks": 2}, r"num_chunks=2: exchange='ragged' crosses whole; legal is 1"),
    ({"level_loads": (1.0,)}, r"level_loads=\(1.0,\): needs capacity='pool', not 'cell'"),
    ({"capacity": "pool", "level_loads": (0.2, 0.5)}, r"level_loads=\(0.2, 0.5\): needs a tuple of shares .* do not increase"),
    ({"capacity": "pool", "exchange": "all_gather"}, r"exchange of pools='all_gather': legal values are 'all_to_all'"),
    ({"activation": "swiglo"}, r"activation='swiglo': legal values are 'swiglu', .*did you mean 'swiglu'\?"),
    ({"num_shared_experts": -1}, r"num_shared_experts=-1: needs a whole number of at least 0"),
    ({"num_shared_experts": 1.5}, r"num_shared_experts=1.5: needs a whole number of at least 0"),
    ({"aux_loss": -0.1}, r"aux_loss=-0.1: needs a finite weight of at least 0"),
    ({"aux_loss": None}, r"aux_loss=None: needs a finite weight of at least 0"),
    ({"z_loss": math.inf}, r"z_loss=inf: needs a finite weight of at least 0"),
    ({"z_loss": "1e-3"}, r"z_loss='1e-3': needs a finite weight of at least 0"),
    ({"loss_scope": "step"}, r"loss_scope='step': legal values are 'sequence', 'shard', 'microbatch', 'batch'"),
    ({"dtype": "float8"}, r"dtype='float8': legal values are 'float32', 'bfloat16', 'float16' \(did you mean"),
    ({"param_dtype": "int32"}, r"param_dtype='int32': legal values are 'float32', 'bfloat16', 'float16'"),
    ({"exchange": "weight_stream", "codec": "int8"}, r"codec='int8': exchange='weight_stream' sends no rows"),
    ({"capacity": "pool", "level_loads": 0.5}, r"level_loads=0.5: needs a tuple of shares"),
    ({"capacity": "pool", "level_loads": (math.nan,)}, r"level_loads=\(nan,\): needs a tuple of shares"),
    ({"exchange": ["all_to_all"]}, r"exchange=\['all_to_all'\]: legal values are 'all_to_all'"),
    ({"router": Grouped(3, 2)}, r"num_groups=3 does not divide num_experts=4: legal are 1, 2, 4"),
    ({"router": Grouped(4, 1)}, r"top_k=2: 1 of 4 groups hold 1 experts, the most legal"),
    ({"router": "prototype", "top_k": 3}, r"top_k=3 prototypes do not divide num_experts=4: legal are 1, 2, 4"),
    ({"router": Queue((1.0, 2.0, 1.0))}, r"rates of 3 devices do not divide num_experts=4: legal are 1, 2, 4"),
    ({"jitter": 1}, r"jitter=1: needs a number of at least 0 and below 1"),
    ({"jitter": "0.1"}, r"jitter='0.1': needs a number of at least 0 and below 1"),
    ({"extra_losses": "entropy"}, r"extra_losses='entropy': needs a tuple of pairs \(name, weight\)"),
    ({"extra_losses": (("entrpy", 1.0),)}, r"extra_losses='entrpy': legal values are .*did you mean 'entropy'\?"),
    ({"extra_losses": (("entropy", -1.0),)}, r"extra_losses: weight -1.0 of 'entropy': needs a finite weight"),
    ({"extra_losses": (("load", 1.0),)}, r"extra_losses: 'load' with router='softmax': it is a loss of router 'noisy'"),
    ({"extra_losses": (("entropy", 1.0),) * 2}, r"extra_losses=.*: each name at most once"),
    ({"weigh_at": "tokens"}, r"weigh_at='tokens': legal values are 'auto', 'token', 'expert' \(did you mean 'token'\?\)"),
    ({"exchange_by": "layer"}, r"exchange_by='layer': legal values are 'auto', 'device', 'expert'"),
    ({"weigh_at": "expert", "exchange": "all_gather"}, r"weigh_at of exchange='all_gather'='expert': legal .* 'auto', 'token'"),
    ({"weigh_at": "token", "capacity": "pool"}, r"weigh_at of pools='token': legal values are 'auto', 'expert'"),
    ({"exchange_by": "expert", "capacity": "pool"}, r"exchange_by of capacity='pool', .*='expert': legal values are 'auto', "),
    ({"exchange_by": "expert", "num_chunks": 2}, r"num_chunks=2: exchange_by='expert' crosses in parts already; legal is 1"),
    ({"rebalance": "feplb"}, r"rebalance='feplb': needs a RebalanceConfig, or None"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda part: str(part)[:40])
@pytest.mark.usefixtures("unchecked")
def test_impossible_values_are_refused(change, message, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("touched devices"))
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        MoEConfig(**{**GOOD, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_impossible_routers_are_refused():
    makers = [
        lambda: Softmax(renormalise="no"),
        lambda: SigmoidBias(rate="x"),
        lambda: SigmoidBias(scale=math.nan),
        lambda: SigmoidBias(rule="signs"),
    ]
    for make in makers:
        with pytest.raises(
            ValueError, match=r"^(renormalise='no': needs True or False|rate='x'|scale=nan|rule='signs': legal values)"
        ):
            make()


@pytest.mark.usefixtures("unchecked")
def test_huge_factors_hold_everything():
    """Counted in whole numbers or compared before rounding up: neither overflows."""
    for factor in (1e30, 1e308):
        assert MoEConfig(**GOOD, capacity_factor=factor).cell_rows(64) == 64
        assert MoEConfig(**GOOD, capacity="pool", capacity_factor=factor).pool_rule(64, 2).max_rows is None


def test_a_config_is_a_frozen_key():
    cfg = MoEConfig(**GOOD, router=SigmoidBias(rate=0.1), codec=("plain", "bf16"))
    assert {cfg: 1}[dataclasses.replace(cfg)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.top_k = 3


def test_names_become_rules_and_pairs():
    assert MoEConfig(**GOOD).router_rule == Softmax()
    assert MoEConfig(**GOOD, router="sigmoid_bias").router_rule == SigmoidBias()
    assert MoEConfig(**GOOD, router=Softmax(renormalise=False)).router_rule == Softmax(renormalise=False)
    assert MoEConfig(**GOOD, codec="bf16").codecs == ("bf16", "bf16")
    assert MoEConfig(**GOOD, codec=("plain", "bf16")).codecs == ("plain", "bf16")


@hypothesis.given(st.integers(1, 500), st.integers(1, 64), st.data())
def test_cells_hold_the_even_share_times_the_factor(t, num_experts, data):
    """In quarters, so that the rule can be said in whole numbers."""
    k, quarters = data.draw(st.integers(1, num_experts)), data.draw(st.integers(1, 40))
    cfg = MoEConfig(8, 8, num_experts, k, capacity_factor=quarters / 4)
    ceiling = -(-quarters * t * k // (4 * num_experts))
    assert cfg.cell_rows(t) == max(1, min(t, ceiling))


def test_cells_without_a_factor_hold_every_token():
    assert MoEConfig(**GOOD, capacity_factor=None).cell_rows(37) == 37
