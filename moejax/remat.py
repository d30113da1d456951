"""What a layer keeps of its forward for its backward, by name: remat policies in the words of the layer's stages.

The names that the layer gives to values (`jax.ad_checkpoint.checkpoint_name`) are its named scopes' words:

- moe/route: the router's logits;
- moe/dispatch: the rows that arrived at their experts, and the numbers that came with them;
- moe/hidden: the products that go into the experts' activation, and what comes out of it where one kernel does both; of
  shared experts and dense feed-forwards too;
- moe/experts: the experts' outputs where they live;
- moe/combine: the rows that came back.

docs/budgets.md has, for each exchange, what each policy makes a forward and a backward do.
"""

import jax

ROUTE, DISPATCH, HIDDEN, EXPERTS, COMBINE = STAGES = (
    "moe/route",
    "moe/dispatch",
    "moe/hidden",
    "moe/experts",
    "moe/combine",
)
_policies = jax.checkpoint_policies
# Of MPipeMoE's four ways to reuse memory (2506.22175), "received" recomputes the hidden rows and keeps those received,
# "full" asks for these again and recomputes the hidden ones, "offload" has the host keep what crossed.
REMAT_POLICIES = {
    "none": _policies.everything_saveable,
    "full": _policies.nothing_saveable,
    "dots": _policies.dots_with_no_batch_dims_saveable,
    "received": _policies.save_only_these_names(ROUTE, DISPATCH),
    "exchange": _policies.save_only_these_names(ROUTE, DISPATCH, COMBINE),
    "experts": _policies.save_only_these_names(*STAGES),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[ROUTE],
        names_which_can_be_offloaded=[DISPATCH, COMBINE],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
