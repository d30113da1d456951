"""Records the routing of held-out text at each evaluation, into the run folder's trace."""

from pathlib import Path

import numpy as np
from jax.experimental.multihost_utils import process_allgather

from layouts.errors import InputError
from layouts.routing_trace import RoutingTrace, specialisation
from moejax.step import Batch, Metrics
from train.config import TrainConfig
from train.domains import NAMES, domain_of_ids
from train.metrics import MetricsLog, NoLog
from train.pictures import TRACE, load_figure
from train.tokens import Tokenizer


class Recorder:
    """The trace of a run."""

    def __init__(self, cfg: TrainConfig, folder: Path, tokenizer: Tokenizer, start_step: int):
        """Args: cfg, the run's; folder, its; tokenizer, its; start_step: later records are dropped, they are taken again."""
        moe = cfg.model.moe
        self.path, self.num_tokens = folder / TRACE, cfg.trace_tokens if moe else 0
        if moe is None:
            return
        self.domain_of = domain_of_ids(tokenizer, cfg.model.vocab_size)
        self.trace = RoutingTrace.empty(moe.num_experts, NAMES)
        if self.path.exists() and start_step:
            try:
                self.trace = RoutingTrace.load(self.path).until(start_step)
            except InputError:  # a picture's data is no reason not to train
                self.path.rename(self.path.with_suffix(".damaged"))

    @property
    def wanted(self) -> bool:
        """Whether evaluations are to record."""
        return self.num_tokens > 0

    def take(self, step: int, batch: Batch, found: Metrics, log: MetricsLog | NoLog) -> dict[str, float]:
        """Records the first tokens of an evaluated batch; returns {"specialisation": bits by domain, mean of the layers}."""
        whole = lambda array: np.asarray(process_allgather(array, tiled=True))
        expert, token, segment = (whole(array) for array in (found["expert"], batch["tokens"], batch["segment_ids"]))
        flat = lambda array: array.reshape(-1)[: self.num_tokens]
        token, live = flat(token), flat(segment) > 0
        domain = np.where(live, self.domain_of[token], -1)
        expert = expert.reshape(len(expert), -1, expert.shape[-1])[:, : self.num_tokens]
        self.trace = self.trace.until(step - 1).add(step, expert, np.where(live, token, -1), domain)
        if isinstance(log, MetricsLog):
            self.trace.save(self.path)
            log.draw("routing/load", step, load_figure(self.trace.loads()[-1].tolist(), step))
        return {"specialisation": float(specialisation(self.trace.by_domain()[-1]).mean())}
