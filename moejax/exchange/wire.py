"""Wire: the mesh axes that an exchange crosses, and the codecs that rows cross them in."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Wire:
    """Attributes: axes, the expert axes (none: one device, nothing is sent); codecs, names (forward, backward)."""

    axes: tuple[str, ...] = ()
    codecs: tuple[str, str] = ("plain", "plain")
