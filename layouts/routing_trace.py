"""RoutingTrace: who went where, recorded; a small file that placements, benchmarks and pictures read.

A trace is a NumPy .npz file with these arrays, and no others:

  schema        1
  num_experts   E
  step          [n] the optimizer step that each record was taken after
  expert        [n, layers, tokens, k] int16, the experts of each token, best first; -1: a choice that is not used
  token         [n, tokens] int32, the tokens' ids; -1: padding
  domain        [n, tokens] int16, each one's domain, as an index of `domain_names`; -1: none
  domain_names  [domains] strings

E: experts, n: records.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from layouts.errors import InputError

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class RoutingTrace:
    """The arrays of a trace, as above."""

    num_experts: int
    step: np.ndarray
    expert: np.ndarray
    token: np.ndarray
    domain: np.ndarray
    domain_names: tuple[str, ...]

    @classmethod
    def empty(cls, num_experts: int, domain_names: tuple[str, ...]) -> "RoutingTrace":
        """A trace without records."""
        none = np.zeros(0, np.int32)
        return cls(num_experts, none, none.reshape(0, 0, 0, 0), none.reshape(0, 0), none.reshape(0, 0), domain_names)

    def __len__(self) -> int:
        return len(self.step)

    def add(self, step: int, expert: np.ndarray, token: np.ndarray, domain: np.ndarray) -> "RoutingTrace":
        """The trace with one more record.

        Args:
          step: it was taken after.
          expert: [layers, tokens, k].
          token: [tokens].
          domain: [tokens].

        Raises:
          InputError: where shapes differ from those of the records before.
        """
        new = {"expert": expert[None].astype(np.int16), "token": token[None].astype(np.int32)}
        new["domain"] = domain[None].astype(np.int16)
        for name, part in new.items():
            before = getattr(self, name)
            if len(self) and before.shape[1:] != part.shape[1:]:
                raise InputError(f"{name} of shape {part.shape[1:]}: the trace's records have {before.shape[1:]}")
        join = lambda name: np.concatenate([getattr(self, name), new[name]]) if len(self) else new[name]
        return dataclasses.replace(self, step=np.append(self.step, step).astype(np.int32), **{name: join(name) for name in new})

    def until(self, step: int) -> "RoutingTrace":
        """The records taken after this step or an earlier one."""
        names = ("step", "expert", "token", "domain")
        return dataclasses.replace(self, **{name: getattr(self, name)[self.step <= step] for name in names})

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        arrays: dict[str, Any] = {field.name: np.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)}
        scratch = path.with_suffix(".part")
        with scratch.open("wb") as file:
            np.savez_compressed(file, schema=np.asarray(SCHEMA), **arrays)
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> "RoutingTrace":
        """Reads a file.

        Raises:
          InputError: where it is missing, no trace, or of another schema.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path}: not a routing trace ({error})") from error
        schema = arrays.pop("schema", None)
        names = {field.name for field in dataclasses.fields(cls)}
        if schema is None or int(schema) != SCHEMA or set(arrays) != names:
            raise InputError(f"{path}: schema {schema}, arrays {sorted(arrays)}: needs schema {SCHEMA} and {sorted(names)}")
        arrays |= {"num_experts": int(arrays["num_experts"]), "domain_names": tuple(arrays["domain_names"].tolist())}
        return cls(**arrays)

    def loads(self) -> np.ndarray:
        """[n, layers, E] tokens that chose each expert."""
        return self._member().sum(2)

    def by_domain(self) -> np.ndarray:
        """[n, layers, domains, E] the same for the tokens of each domain."""
        member = self._member()
        of = [np.where((self.domain == d)[:, None, :, None], member, False).sum(2) for d in range(len(self.domain_names))]
        return np.stack(of, 2)

    def coactivation(self, layer: int) -> np.ndarray:
        """[E, E] tokens of all records that used both experts in this layer; on the diagonal those that used one."""
        member = self._member()[:, layer].reshape(-1, self.num_experts).astype(np.int64)
        return member.T @ member

    def transitions(self, layer: int) -> np.ndarray:
        """[E, E] pairs (expert in this layer, expert in the next) of all tokens, added up over all records."""
        member = self._member().astype(np.int64)
        here, following = (member[:, i].reshape(-1, self.num_experts) for i in (layer, layer + 1))
        return here.T @ following

    def _member(self) -> np.ndarray:
        """[n, layers, tokens, E] bool."""
        return np.stack([(self.expert == e).any(-1) for e in range(self.num_experts)], -1)


def specialisation(counts: np.ndarray) -> np.ndarray:
    """How far apart domains are routed, in bits: the Jensen-Shannon divergence of their experts, weighed by their tokens.

    0 where all domains use the experts alike; the entropy of the domains' shares where no two have an expert in common.

    Args:
      counts: [..., domains, E] tokens of each domain and expert.
    """
    total = counts.sum((-1, -2), keepdims=True)
    share = counts.sum(-1) / np.maximum(total[..., 0], 1)
    mean = counts.sum(-2) / np.maximum(total[..., 0], 1)
    own = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    return _bits(mean) - (share * _bits(own)).sum(-1)


def _bits(probs: np.ndarray) -> np.ndarray:
    return -(probs * np.log2(np.where(probs > 0, probs, 1))).sum(-1)
