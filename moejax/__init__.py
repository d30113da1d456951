"""moejax: mixture-of-experts layers for JAX and Flax, sharded by the compiler over any mesh."""

from moejax import linen
from moejax.axes import AxisRules, make_mesh
from moejax.compiler import compiler_options
from moejax.config import MoEConfig
from moejax.context import RoutingContext
from moejax.executor import PipelineParams, run_pipeline
from moejax.forecast import forecast
from moejax.grouped_matmul import grouped_matmul
from moejax.layer import MoELayer, RouterState, moe
from moejax.lift import as_experts
from moejax.migration import num_moved
from moejax.pipeline import Schedule
from moejax.placement import ExpertPlacement, choose_slots
from moejax.rebalance import RebalanceConfig
from moejax.router import BiasState, Routing, SigmoidBias, Softmax, update_router
from moejax.stage_layers import StageLayers
from moejax.stage_program import LayerKind, PipelineModel
from moejax.stats import RoutingStats
from moejax.transformer import Transformer, TransformerConfig

__all__ = [
    "AxisRules",
    "BiasState",
    "ExpertPlacement",
    "LayerKind",
    "MoEConfig",
    "MoELayer",
    "PipelineModel",
    "PipelineParams",
    "RebalanceConfig",
    "RouterState",
    "Routing",
    "RoutingContext",
    "RoutingStats",
    "Schedule",
    "SigmoidBias",
    "Softmax",
    "StageLayers",
    "Transformer",
    "TransformerConfig",
    "as_experts",
    "choose_slots",
    "compiler_options",
    "forecast",
    "grouped_matmul",
    "linen",
    "make_mesh",
    "moe",
    "num_moved",
    "run_pipeline",
    "update_router",
]
