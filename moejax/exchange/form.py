"""In which form cells cross, where none is asked for: a table by hardware, with its evidence.

All forms give one answer; docs/compiled.md says what each costs where.
"""

import dataclasses

from moejax.config import CHUNKED, MoEConfig


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of the exchange.

    Attributes:
      weigh_at: "token": combine multiplies what comes back; "expert": the weights travel in a small all-to-all and multiply
        inside the experts, so that no output is kept for the backward and empty rows need no zeros.
      exchange_by: "device": the rows of all of a device's experts cross in one all-to-all, products are batched; "expert":
        each local expert's rows cross in their own, and products have no batch dimension.
      evidence: what was measured or read, where, when.
    """

    weigh_at: str
    exchange_by: str
    evidence: str = ""


ALONE = Form("token", "device")
TABLE = {
    "cpu": Form("token", "device", "a forward with two all-to-alls and no third; nothing else was timed"),
    "tpu": Form(
        "expert",
        "expert",
        "compiled for v5p, 2026-11-30: an all-to-all that concatenates on the rows' axis is transposed at both ends, 3.5 of "
        "14.1 Mcycles at 8 local experts, 11.7 of 66 at one (docs/compiled.md)",
    ),
    "gpu": Form(
        "expert",
        "device",
        "compiled for H100, 2026-11-30, 8 local experts: 0.63 GiB and 5.6 GB moved; by expert 0.53 and 6.7 (docs/compiled.md)",
    ),
}
# Local experts up to which a table's "expert" is taken: compile time grows with them, and 8 is what was measured.
MAX_APART = 8


def choose_form(cfg: MoEConfig, stand: str, exchange: str, platform: str, num_local: int) -> Form:
    """The form that the config asks for; what it leaves to "auto" by the table.

    Args:
      cfg: the layer.
      stand: how its rows do: in a "cell", "flat" or in a "pool".
      exchange: its name, never "auto".
      platform: as `moejax.axes.platform` names it.
      num_local: experts on one shard.
    """
    if stand != "cell" or exchange not in CHUNKED:
        return ALONE
    best = TABLE.get(platform, ALONE)
    apart = best.exchange_by == "expert" and num_local <= MAX_APART and cfg.num_chunks == 1
    weigh_at = best.weigh_at if cfg.weigh_at == "auto" else cfg.weigh_at
    exchange_by = ("expert" if apart else "device") if cfg.exchange_by == "auto" else cfg.exchange_by
    return Form(weigh_at, exchange_by)
