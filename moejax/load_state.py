"""What a layer carries from step to step besides its parameters."""

from jaxtyping import Array, Int


class LoadState:
    """A router's state, which `update_router` changes by the loads of a step, and nothing else does."""

    def update(self, tokens_per_expert: Int[Array, "*layers E"]) -> "LoadState":
        """The state after a step of these loads."""
        raise NotImplementedError

    @property
    def loads_shape(self) -> tuple[int, ...]:
        """The shape of the loads that it takes: (*layers, E)."""
        raise NotImplementedError
